"""Experts that lie in RAM: a store over the model's own tensors, without a copy."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from promoe.errors import UnsupportedModelError
from promoe.layout import ExpertLayout
from promoe.scheduler.keys import ExpertKey
from promoe.stores.base import DEFAULT_CHUNK_BYTES, Chunk, split_at_pages

# A copy this short is over before another thread could have used the interpreter, which is slow to get back.
SHORT_COPY_BYTES = 64 * 1024
Bytes = NDArray[np.uint8]


class HostStore:
    """Store over live CPU tensors: `banks[layer_idx][name]` is a tensor `[num_experts, ...]` of which each row is
    contiguous.

    One source per tensor; an expert's chunks are its row of each tensor, in the mapping's order, long rows split into
    about equal parts. The tensors are kept alive and must not be written or replaced while the store is in use.

    Args:
        banks: per MoE layer, parameter name -> tensor.
        chunk_bytes: longest chunk, a multiple of 4096.

    Raises:
        UnsupportedModelError: a tensor is not a plain CPU tensor, its rows are not contiguous, or the numbers of
            experts differ.
        ConfigError: `chunk_bytes` is not a positive multiple of 4096.
    """

    def __init__(self, banks: Sequence[Mapping[str, torch.Tensor]], chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> None:
        self.layouts: Sequence[ExpertLayout] = []
        self.num_experts: Sequence[int] = []
        self._names: list[str] = []  # per source
        self._row_bytes: list[int] = []  # per source: from one expert's row to the next
        self._tensors: list[torch.Tensor] = []  # per source; keeps the memory alive
        self._bytes: list[Bytes] | None = []  # per source, read-only
        self._chunks: dict[ExpertKey, tuple[Chunk, ...]] = {}
        self._parts: list[
            list[tuple[int, int, int, int]]
        ] = []  # per layer: slot offset, bytes, source, offset in the row
        for layer_idx, bank in enumerate(banks):
            self._add_layer(layer_idx, bank, chunk_bytes)
        self.expert_bytes = sum(
            layout.payload_bytes * count for layout, count in zip(self.layouts, self.num_experts, strict=True)
        )

    def chunks(self, key: ExpertKey) -> tuple[Chunk, ...]:
        """The expert's row of each tensor, in the mapping's order, long rows in parts; made at the first call."""
        chunks = self._chunks.get(key)
        return self._chunks.setdefault(key, self._chunks_of(key)) if chunks is None else chunks

    def _chunks_of(self, key: ExpertKey) -> tuple[Chunk, ...]:
        return tuple(
            Chunk(
                slot_offset_bytes,
                nbytes,
                source_idx,
                key.expert_idx * self._row_bytes[source_idx] + offset_bytes,
                nbytes,
            )
            for slot_offset_bytes, nbytes, source_idx, offset_bytes in self._parts[key.layer_idx]
        )

    def chunk_bytes(self, layer_idx: int) -> tuple[int, ...]:
        """Destination bytes of each chunk, the same for every expert of the layer."""
        return tuple(nbytes for _, nbytes, _, _ in self._parts[layer_idx])

    def view(self, chunk: Chunk) -> memoryview:
        """The chunk's bytes where they lie, read-only, without a copy. Raises OSError after `close`."""
        sources = self._bytes
        if sources is None:
            raise OSError(
                errno.EBADF, f"Cannot read {chunk.nbytes} bytes of {self.describe(chunk)}: the store was closed"
            )
        start = chunk.source_offset_bytes
        return sources[chunk.source_idx][start : start + chunk.source_nbytes].data

    def read(self, chunk: Chunk, destination: memoryview) -> None:
        """Copy the chunk into `destination`. Releases the GIL if it is long. Raises OSError after `close`."""
        if chunk.nbytes <= SHORT_COPY_BYTES:
            destination[:] = self.view(chunk)
            return
        # numpy, not Tensor.copy_: that would start OpenMP threads beside the ones that compute.
        np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(self.view(chunk), np.uint8))

    def describe(self, chunk: Chunk) -> str:
        """For error messages: "tensor gate_up_proj of MoE layer 3 in RAM, offset 1234"."""
        return f"{self._names[chunk.source_idx]} in RAM, offset {chunk.source_offset_bytes}"

    def close(self) -> None:
        """Drop the tensors; reading afterwards raises OSError. Closing twice is allowed."""
        self._bytes = None
        self._tensors.clear()

    def _add_layer(self, layer_idx: int, bank: Mapping[str, torch.Tensor], chunk_bytes: int) -> None:
        layout = ExpertLayout.of({name: (tensor.shape[1:], tensor.dtype) for name, tensor in bank.items()})
        num_experts = next(iter(bank.values())).shape[0]
        parts: list[tuple[int, int, int, int]] = []
        for name, tensor in bank.items():
            what = f"tensor {name} of MoE layer {layer_idx}"
            _check_tensor(what, tensor, num_experts)
            spec, source_idx = layout[name], len(self._tensors)
            self._tensors.append(tensor)
            self._names.append(what)
            self._row_bytes.append(tensor.stride(0) * tensor.itemsize)
            assert self._bytes is not None
            self._bytes.append(_bytes_of(tensor))
            for offset_bytes, nbytes in split_at_pages(spec.offset_bytes, spec.nbytes, chunk_bytes):
                parts.append((spec.offset_bytes + offset_bytes, nbytes, source_idx, offset_bytes))
        self.layouts = [*self.layouts, layout]
        self.num_experts = [*self.num_experts, num_experts]
        self._parts.append(parts)


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


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    """The bytes from the tensor's first to its last element, read-only, sharing memory."""
    span_bytes = ((tensor.shape[0] - 1) * tensor.stride(0) + tensor[0].numel()) * tensor.itemsize
    raw = torch.empty(0, dtype=torch.uint8)
    raw.set_(tensor.untyped_storage(), tensor.storage_offset() * tensor.itemsize, (span_bytes,), (1,))
    array: Bytes = raw.numpy()
    array.flags.writeable = False
    return array
