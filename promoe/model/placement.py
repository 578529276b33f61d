"""Everything of a model but its routed experts, moved to the device that has the slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from promoe.errors import ConfigError
from promoe.experts.moe_layers import MoELayer
from promoe.transfer.devices import Device
from promoe.transfer.links.free_ram import free_ram_bytes
from promoe.units import format_memory


def other_tensors(model: nn.Module, layers: Sequence[MoELayer]) -> Iterator[torch.Tensor]:
    """Parameters and buffers that are no routed expert's, each once."""
    seen = {id(tensor) for layer in layers for tensor in layer.parameters()}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def other_bytes(model: nn.Module, layers: Sequence[MoELayer]) -> int:
    """What they take."""
    return sum(tensor.nbytes for tensor in other_tensors(model, layers))


def free_bytes(model: nn.Module, layers: Sequence[MoELayer], device: Device | None) -> int | None:
    """Memory that slots may take: RAM, or what `device` has left beside all that will be placed there. None: unknown."""
    return free_ram_bytes() if device is None else device.free_bytes() - other_bytes(model, layers)


class Placed:
    """Tensors that were moved, and where from. Copied or pickled along with its model, it is of the copy's tensors."""

    def __init__(self) -> None:
        self._moved: list[tuple[torch.Tensor, torch.Tensor | torch.device]] = []

    def move(self, tensor: torch.Tensor, device: torch.device, keep: bool) -> None:
        """Move one; `keep` the memory that it was in, and have it back."""
        before = tensor.data
        self._moved.append((tensor, before if keep else before.device))  # first: Ctrl-C may come between
        tensor.data = before.to(device)

    def undo(self) -> None:
        """All are where they were. Safe to repeat."""
        while self._moved:
            tensor, before = self._moved.pop()
            tensor.data = tensor.data.to(before) if isinstance(before, torch.device) else before


def place(model: nn.Module, layers: Sequence[MoELayer], device: Device, with_experts: bool = False) -> Placed:
    """Move them to a device. The tensor objects stay, so that ties between them do.

    Args:
        model: whose.
        layers: its MoE layers.
        device: where to.
        with_experts: experts as well, which stay in RAM beside.

    Raises:
        ConfigError: the device has no room for them; nothing was moved then.
    """
    placed = Placed()
    try:
        with torch.inference_mode(False):
            for tensor in other_tensors(model, layers):
                placed.move(tensor, device.torch_device, keep=False)
            for layer in layers if with_experts else ():
                for tensor in layer.parameters():
                    placed.move(tensor, device.torch_device, keep=True)
    except BaseException as error:
        placed.undo()
        if not isinstance(error, torch.OutOfMemoryError):
            raise
        raise ConfigError(
            f"The model without its routed experts takes {format_memory(other_bytes(model, layers))}, and {device.name} has "
            f"{format_memory(device.free_bytes())} free beside {'the experts' if with_experts else 'the slots'}. Choose a "
            "smaller cache, or load the model with a smaller dtype."
        ) from error
    return placed
