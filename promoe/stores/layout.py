"""Where the tensors of one expert lie in a slot. It knows shapes and bytes; not files, models or policies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from promoe.errors import ConfigError
from promoe.stores.slot_format import MatrixFormat

PAGE_BYTES = 4096
DEFAULT_CHUNK_BYTES = 4 * 2**20  # of a transfer, at most
CACHE_LINE_BYTES = 64
# A tensor of at least this size starts at a page, so that O_DIRECT can read it straight into the slot.
PAGE_ALIGNED_FROM_BYTES = 64 * 1024


def round_up(nbytes: int, alignment_bytes: int) -> int:
    """Return the smallest multiple of `alignment_bytes` that is at least `nbytes`."""
    return -(-nbytes // alignment_bytes) * alignment_bytes


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of an expert inside a slot: `shape` (one expert's row) at `offset_bytes`.

    `shape` and `dtype` are the model's. `format` says what the bytes are; None: a contiguous tensor of these.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset_bytes: int
    format: MatrixFormat | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the slot."""
        return math.prod(self.shape) * self.dtype.itemsize if self.format is None else self.format.nbytes

    @property
    def end_bytes(self) -> int:
        """The offset of the first byte after the tensor."""
        return self.offset_bytes + self.nbytes


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The tensors of one expert in a slot of `slot_bytes`. Hashable: layers with equal layouts share one pool."""

    tensors: tuple[TensorSpec, ...]
    slot_bytes: int

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, tuple[Sequence[int], torch.dtype]],
        formats: Mapping[str, MatrixFormat] = MappingProxyType({}),
    ) -> ExpertLayout:
        """Lay tensors out one after the other, in the order of the mapping.

        A tensor of 64 KiB or more starts at a multiple of 4096 bytes, a smaller one at a multiple of 64 bytes (fp32
        products with one row depend on the weights' address modulo 16). If any tensor is that large, the slot's size is
        rounded up to a multiple of 4096 bytes, else of 64, so that consecutive slots keep the alignment.

        Args:
            tensors: name -> (shape of one expert's row, dtype).
            formats: of the tensors that are not plain ones, by name.

        Raises:
            ConfigError: no tensors, or a tensor without elements.
        """
        if not tensors:
            raise ConfigError("An expert needs at least one tensor. Got none.")
        specs: list[TensorSpec] = []
        offset_bytes, slot_alignment_bytes = 0, CACHE_LINE_BYTES
        for name, (shape, dtype) in tensors.items():
            spec = TensorSpec(name, tuple(int(size) for size in shape), dtype, 0, formats.get(name))
            if spec.nbytes == 0:
                raise ConfigError(f"Tensor {name!r} of an expert has no elements: shape {tuple(shape)}.")
            alignment_bytes = PAGE_BYTES if spec.nbytes >= PAGE_ALIGNED_FROM_BYTES else CACHE_LINE_BYTES
            slot_alignment_bytes = max(slot_alignment_bytes, alignment_bytes)
            offset_bytes = round_up(offset_bytes, alignment_bytes)
            specs.append(replace(spec, offset_bytes=offset_bytes))
            offset_bytes += spec.nbytes
        return cls(tuple(specs), round_up(offset_bytes, slot_alignment_bytes))

    def in_formats(self, formats: Mapping[str, MatrixFormat]) -> ExpertLayout:
        """Return the layout of the same tensors with these formats, by name; the others are plain."""
        return ExpertLayout.of({spec.name: (spec.shape, spec.dtype) for spec in self.tensors}, formats)

    @property
    def formats(self) -> dict[str, MatrixFormat]:
        """The formats of the tensors that are not plain ones, by name."""
        return {spec.name: spec.format for spec in self.tensors if spec.format is not None}

    @property
    def payload_bytes(self) -> int:
        """The size of one expert's weights in bytes, without the padding between tensors."""
        return sum(spec.nbytes for spec in self.tensors)

    def __getitem__(self, name: str) -> TensorSpec:
        """Return the tensor called `name`. Raises KeyError if there is none."""
        for spec in self.tensors:
            if spec.name == name:
                return spec
        raise KeyError(name)
