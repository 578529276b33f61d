"""Move everything of a model except its routed experts to the device that has the slots."""

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
    """Yield the parameters and buffers that do not belong to routed experts, each once."""
    seen = {id(tensor) for layer in layers for tensor in layer.parameters()}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def other_bytes(model: nn.Module, layers: Sequence[MoELayer]) -> int:
    """Return the size of `other_tensors`, in bytes."""
    return sum(tensor.nbytes for tensor in other_tensors(model, layers))


def free_bytes(model: nn.Module, layers: Sequence[MoELayer], device: Device | None) -> int | None:
    """Return the bytes that slots may take in RAM, or on `device` beside all other tensors of the model; None: unknown."""
    return free_ram_bytes() if device is None else device.free_bytes() - other_bytes(model, layers)


class Placed:
    """The tensors that were moved, and where they were before.

    If it is copied or pickled together with its model, the copy refers to the copied model's tensors.
    """

    def __init__(self) -> None:
        self._moved: list[tuple[torch.Tensor, torch.Tensor | torch.device]] = []

    def move(self, tensor: torch.Tensor, device: torch.device, keep: bool) -> None:
        """Move a tensor. With `keep`, `undo` gives it its present memory back; otherwise `undo` copies its values back."""
        before = tensor.data
        self._moved.append((tensor, before if keep else before.device))  # noted first, because Ctrl-C may come between
        tensor.data = before.to(device)

    def undo(self) -> None:
        """Move all tensors back. Calling it again does nothing."""
        while self._moved:
            tensor, before = self._moved.pop()
            tensor.data = tensor.data.to(before) if isinstance(before, torch.device) else before


def place(model: nn.Module, layers: Sequence[MoELayer], device: Device, with_experts: bool = False) -> Placed:
    """Move the tensors of `other_tensors` to a device. The tensor objects stay the same, so tied weights stay tied.

    Args:
        model: the model.
        layers: its MoE layers.
        device: the device to move to.
        with_experts: copy the experts to the device as well. Their memory in RAM is kept for the undo.

    Raises:
        ConfigError: the device has too little memory. Nothing was moved.
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
            f"The model without its routed experts takes {format_memory(other_bytes(model, layers))}, but {device.name} has "
            f"only {format_memory(device.free_bytes())} free beside {'the experts' if with_experts else 'the slots'}. Choose a "
            "smaller cache, or load the model with a smaller dtype."
        ) from error
    return placed
