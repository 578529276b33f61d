"""Experts that lie in RAM: a store over the model's own tensors, without a copy."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from promoe.errors import UnsupportedModelError
from promoe.stores.base import Chunk
from promoe.stores.layer_plan import LayerPlan, Piece, PlannedStore, SourceRange
from promoe.stores.layout import DEFAULT_CHUNK_BYTES, ExpertLayout

# A copy this short is done before another thread could use the interpreter, which takes long to get back.
SHORT_COPY_BYTES = 64 * 1024
Bytes = NDArray[np.uint8]
# One tensor of all experts of a layer.
Bank = torch.Tensor | Sequence[torch.Tensor]


class HostStore(PlannedStore):
    """A store over live CPU tensors: `banks[layer_idx][name][expert_idx]` is one expert's tensor, contiguous.

    Each tensor is a source. An expert's chunks are its row of each tensor, in the mapping's order; long rows are split
    into about equal parts. The tensors are kept alive and must not be written or replaced while the store is in use.

    Args:
        banks: per MoE layer, name -> a tensor `[num_experts, ...]`, or a list of `num_experts` equal tensors.
        chunk_bytes: longest chunk, a multiple of 4096.

    Raises:
        UnsupportedModelError: a tensor is not a plain CPU tensor, its rows are not contiguous, or the numbers of
            experts differ.
        ConfigError: `chunk_bytes` is not a positive multiple of 4096.
    """

    def __init__(self, banks: Sequence[Mapping[str, Bank]], chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> None:
        self._names: list[str] = []  # per source
        self._tensors: list[torch.Tensor] = []  # per source; keeps the memory alive
        self._raw: list[torch.Tensor] = []  # per source, its bytes from the first to the last element
        self._bytes: list[Bytes] | None = []  # the same as numpy arrays, which are faster to slice; read-only
        super().__init__([self._plan(layer_idx, bank, chunk_bytes) for layer_idx, bank in enumerate(banks)])

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """All tensors that chunks come from."""
        return tuple(self._tensors)

    def tensor(self, chunk: Chunk) -> torch.Tensor:
        """Return the chunk's bytes where they lie, `[nbytes]` uint8, not to be written. Raises OSError after `close`."""
        if self._bytes is None:
            raise self._closed(chunk)
        start = chunk.source_offset_bytes
        return self._raw[chunk.source_idx][start : start + chunk.source_nbytes]

    def view(self, chunk: Chunk) -> memoryview:
        """Return the chunk's bytes where they lie, read-only. Raises OSError after `close`."""
        sources = self._bytes
        if sources is None:
            raise self._closed(chunk)
        start = chunk.source_offset_bytes
        return sources[chunk.source_idx][start : start + chunk.source_nbytes].data

    def _closed(self, chunk: Chunk) -> OSError:
        what = f"{chunk.nbytes} bytes of {self.describe(chunk)}"
        return OSError(errno.EBADF, f"Cannot read {what}: the store was closed")

    def read(self, chunk: Chunk, destination: memoryview) -> None:
        """Copy the chunk into `destination`. Releases the GIL if the chunk is long. Raises OSError after `close`."""
        if chunk.nbytes <= SHORT_COPY_BYTES:
            destination[:] = self.view(chunk)
            return
        # numpy, not Tensor.copy_: that would start OpenMP threads beside the ones that compute.
        np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(self.view(chunk), np.uint8))

    def describe(self, chunk: Chunk) -> str:
        """Return where the chunk lies, for error messages: "tensor up_proj of MoE layer 3 in RAM, offset 1234"."""
        return f"{self._names[chunk.source_idx]} in RAM, offset {chunk.source_offset_bytes}"

    def close(self) -> None:
        """Drop the tensors; reading afterwards raises OSError. Closing twice is allowed."""
        self._bytes = None
        self._raw.clear()
        self._tensors.clear()

    def _plan(self, layer_idx: int, banks: Mapping[str, Bank], chunk_bytes: int) -> LayerPlan:
        layout = ExpertLayout.of({name: (bank[0].shape, bank[0].dtype) for name, bank in banks.items()})
        num_experts = len(next(iter(banks.values())))
        pieces = []
        for name, bank in banks.items():
            what, spec, first = f"tensor {name} of MoE layer {layer_idx}", layout[name], len(self._tensors)
            if isinstance(bank, torch.Tensor):
                self._add_source(what, bank, num_experts)
                row_bytes = bank.stride(0) * bank.itemsize
                ranges = [SourceRange(first, idx * row_bytes, spec.dtype) for idx in range(num_experts)]
            else:
                for expert_idx, tensor in enumerate(bank):
                    self._add_source(f"{what}, expert {expert_idx}", tensor.detach().unsqueeze(0), 1)
                ranges = [SourceRange(first + idx, 0, spec.dtype) for idx in range(num_experts)]
            pieces.append(Piece(spec.offset_bytes, spec.nbytes, spec.dtype, tuple(ranges)))
        return LayerPlan(layout, num_experts, tuple(pieces), chunk_bytes)

    def _add_source(self, what: str, tensor: torch.Tensor, num_rows: int) -> None:
        _check_tensor(what, tensor, num_rows)
        assert self._bytes is not None
        self._tensors.append(tensor)
        self._names.append(what)
        self._raw.append(_bytes_of(tensor))
        array: Bytes = self._raw[-1].numpy()
        array.flags.writeable = False
        self._bytes.append(array)


def _check_tensor(what: str, tensor: torch.Tensor, num_experts: int) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise UnsupportedModelError(
            f"{what} is a {type(tensor).__name__}, not a plain tensor. Load the model unquantised."
        )
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise UnsupportedModelError(
            f"{what} is on {tensor.device} ({tensor.layout}); experts served from RAM must be dense tensors on the "
            "CPU. Load the model without device_map, or use promoe.from_pretrained."
        )
    if tensor.shape[0] != num_experts:
        raise UnsupportedModelError(f"{what} has {tensor.shape[0]} rows, but the layer has {num_experts} experts.")
    if not tensor[0].is_contiguous() or tensor.stride(0) < tensor[0].numel():
        raise UnsupportedModelError(
            f"The rows of {what} are not contiguous: shape {tuple(tensor.shape)}, strides {tensor.stride()}. "
            "Replace the parameter's data by its .contiguous() copy first."
        )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes from the tensor's first to its last element, `[nbytes]` uint8, sharing memory."""
    span_bytes = ((tensor.shape[0] - 1) * tensor.stride(0) + tensor[0].numel()) * tensor.itemsize
    raw = torch.empty(0, dtype=torch.uint8)
    raw.set_(tensor.untyped_storage(), tensor.storage_offset() * tensor.itemsize, (span_bytes,), (1,))
    return raw
