"""The system that brings all experts of a layer whenever it runs, as well as that can be done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

import promoe
from promoe.transfer.devices import Device, Event


class StreamedLayers:
    """A model's experts in pinned memory, a whole layer at a time, the next one copied while this one computes.

    Args:
        model: with experts in RAM and everything else on the device; all MoE layers alike.
        device: that computes.
    """

    def __init__(self, model: nn.Module, device: Device) -> None:
        self._device, self._queue = device, device.new_queue()
        self._parameters = [layer.parameters() for layer in promoe.find_moe_layers(model)]
        self._pinned = device.pin([tensor for layer in self._parameters for tensor in layer])
        self._at_home = [[parameter.data for parameter in layer] for layer in self._parameters]
        nbytes = sum(tensor.nbytes for tensor in self._at_home[0])
        self._buffers = [device.allocate(nbytes) for _ in range(2)]
        self._arrived: list[Event | None] = [None] * len(self._parameters)
        self._read: list[Event | None] = [None, None]
        self._hooks = ExitStack()
        for idx, layer in enumerate(promoe.find_moe_layers(model)):
            self._hooks.callback(layer.experts.register_forward_pre_hook(self._before(idx)).remove)
            self._hooks.callback(layer.experts.register_forward_hook(self._after(idx)).remove)

    def close(self) -> None:
        """Use the experts where they lie again."""
        self._hooks.close()
        self._queue.mark().wait_on_host()
        self._pinned.undo()

    def _fetch(self, idx: int) -> None:
        if (read := self._read[idx % 2]) is not None:
            self._queue.wait(read)
        sources = [own.view(-1).view(torch.uint8) for own in self._at_home[idx]]
        self._queue.copy_all(list(zip(self._parts(idx), sources, strict=True)))
        self._arrived[idx] = self._queue.mark()

    def _parts(self, idx: int) -> Sequence[torch.Tensor]:
        return self._buffers[idx % 2].split([tensor.nbytes for tensor in self._at_home[idx]])

    def _before(self, idx: int) -> Callable[..., None]:
        def before(*args: Any) -> None:
            if self._arrived[idx] is None:
                self._fetch(idx)
            arrived, self._arrived[idx] = self._arrived[idx], None
            assert arrived is not None
            self._device.current().wait(arrived)
            for parameter, part in zip(self._parameters[idx], self._parts(idx), strict=True):
                parameter.data = part.view(parameter.dtype).view(parameter.shape)
            following = (idx + 1) % len(self._parameters)
            if following % 2 != idx % 2 and self._arrived[following] is None:
                self._fetch(following)

        return before

    def _after(self, idx: int) -> Callable[..., None]:
        def after(*args: Any) -> None:
            self._read[idx % 2] = self._device.current().mark()
            for parameter, own in zip(self._parameters[idx], self._at_home[idx], strict=True):
                parameter.data = own

        return after
