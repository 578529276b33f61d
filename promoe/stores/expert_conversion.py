"""Computes experts from the checkpoint's tensors as they arrive, one at a time.

Some checkpoints do not hold experts in the form that the model computes with: they are in fewer bits, transposed, or have
interleaved rows. They are stored and moved as they are in the files. A weight in fewer bits is decoded by its encoding
(`Decoding`). The conversion that Transformers would apply to all experts of a layer when loading is applied to each one
when it arrives, with the same result bit for bit (`ExpertConversion`). This works for conversions that treat each expert
separately; all others are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from promoe.errors import CheckpointError
from promoe.stores.checkpoint_names import BankSpec
from promoe.stores.encodings.base import Encoding

# Operations that treat each expert separately unless they work along the dimension of the experts.
_ALONG_DIMENSIONS = ("Concatenate", "Interleave", "Transpose", "MergeModulelist")


@dataclass(frozen=True, slots=True)
class Decoding:
    """Decodes one expert's part of a weight in fewer bits, which becomes `shape`."""

    encoding: Encoding
    shape: tuple[int, ...]

    @property
    def encodings(self) -> set[Encoding]:
        """The encoding, as the only one."""
        return {self.encoding}

    def __call__(self, sources: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Decode `sources`, the parts of the weight, into `out`, its elements."""
        self.encoding.decode(sources, out.view(self.shape))


@dataclass(frozen=True, slots=True)
class ConversionSource:
    """One source of a conversion.

    Attributes:
        pattern: its pattern in the conversion.
        stacked: whether the checkpoint has all experts of it in one tensor.
        num_parts: tensors that it is made of.
        decoding: how it is made of them; None: it is a plain tensor.
    """

    pattern: str
    stacked: bool
    num_parts: int = 1
    decoding: Decoding | None = None

    def tensor(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return one expert's part of the source; it has `dtype` if it is decoded."""
        if self.decoding is None:
            return parts[0]
        out = torch.empty(self.decoding.shape, dtype=dtype, device="cpu")
        self.decoding(parts, out.view(-1))
        return out


class ExpertConversion:
    """Computes one tensor of an expert from the expert's part of the checkpoint's tensors.

    Args:
        bank: the tensor to compute.
        sources: in the order of the patterns in the conversion.
        operations: Transformers' operations.

    Raises:
        CheckpointError: one of the operations does not treat each expert separately.
    """

    def __init__(self, bank: BankSpec, sources: Sequence[ConversionSource], operations: Sequence[Any]) -> None:
        for operation in operations:
            if not _keeps_experts_separate(operation):
                raise CheckpointError(
                    f"The experts of {bank} would have to be computed from {sources[0].pattern!r} by {operation!r}, which does "
                    "not treat one expert at a time: load the model with Transformers, save it with "
                    "model.save_pretrained(folder, save_original_format=False), and open that folder."
                )
        self._bank = bank
        self._sources = list(sources)
        self._operations = list(operations)
        self._model = _ModelStandIn(bank)

    @property
    def encodings(self) -> set[Encoding]:
        """The encodings that the sources are decoded from."""
        return {source.decoding.encoding for source in self._sources if source.decoding is not None}

    def __call__(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Compute the elements `out` of the expert's tensor, given all parts of its sources in order."""
        out.view(self._bank.row_shape).copy_(self._computed(parts))

    def _computed(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        values: dict[str, Any] = {}
        rest = iter(parts)
        for source in self._sources:
            tensor = source.tensor([next(rest) for _ in range(source.num_parts)], self._bank.dtype)
            values.setdefault(source.pattern, []).append(tensor.unsqueeze(0) if source.stacked else tensor)
        for operation in self._operations:
            values = operation.convert(
                values,
                source_patterns=[source.pattern for source in self._sources],
                target_patterns=[self._bank.full_name],
                full_layer_name=self._bank.full_name,
                model=self._model,
                config=None,
                missing_keys=set(),
            )
        (result,) = values.values()
        while isinstance(result, list):
            (result,) = result
        assert isinstance(result, torch.Tensor), type(result)
        if tuple(result.shape) == (1, *self._bank.row_shape):
            result = result[0]
        assert tuple(result.shape) == self._bank.row_shape, f"they become {list(result.shape)}"
        return result

    def check(self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> None:
        """Raise CheckpointError unless sources of these shapes and dtypes, decoded, give a tensor of the bank's shape."""
        plain = [ConversionSource(source.pattern, source.stacked) for source in self._sources]
        try:
            ExpertConversion(self._bank, plain, self._operations)._computed(
                [torch.zeros(shape, dtype=dtype, device="cpu") for shape, dtype in shapes]
            )
        except (RuntimeError, ValueError, AssertionError, IndexError, KeyError) as error:
            found = ", ".join(f"{list(shape)} {dtype}" for shape, dtype in shapes)
            raise CheckpointError(
                f"The checkpoint's tensors of one expert ({found}) do not become {list(self._bank.row_shape)}, one expert of "
                f"{self._bank}: {error}. The checkpoint is not of this model, or config.json was changed."
            ) from error


class _ModelStandIn:
    """A stand-in for the model, which conversions ask for the shape of the parameter that they convert to."""

    def __init__(self, bank: BankSpec) -> None:
        self._parameter = torch.empty((1, *bank.row_shape), dtype=bank.dtype, device="meta")

    def get_parameter(self, name: str) -> torch.Tensor:
        return self._parameter


def _keeps_experts_separate(operation: Any) -> bool:
    name = type(operation).__name__
    dimensions = [getattr(operation, field) for field in ("dim", "dim0", "dim1") if hasattr(operation, field)]
    if name == "MergeModulelist":
        return dimensions == [0]
    return name in _ALONG_DIMENSIONS and bool(dimensions) and min(dimensions) > 0
