"""Computes experts from the checkpoint's tensors as they arrive, by Transformers' own conversion, one at a time.

Some checkpoints do not hold experts in the form that the model computes with: they are quantised (FP8 with scales,
MXFP4), transposed, or have interleaved rows. They are stored and moved as they are in the files. The conversion that
Transformers would apply to all experts of a layer when loading is applied to each one when it arrives, with the same
result bit for bit. This works for conversions that treat each expert separately; all others are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from promoe.errors import CheckpointError
from promoe.stores.checkpoint_names import BankSpec

# Operations that treat each expert separately, whatever their arguments.
_PER_EXPERT = ("Fp8Dequantize", "Mxfp4Dequantize")
# Operations that do so unless they work along the dimension of the experts.
_ALONG_DIMENSIONS = ("Concatenate", "Interleave", "Transpose", "MergeModulelist")


class ExpertConversion:
    """Computes one tensor of an expert from the expert's part of the checkpoint's tensors.

    Args:
        bank: the tensor to compute.
        patterns: the patterns of the source tensors in the conversion.
        stacked: per source, whether the checkpoint has all experts of it in one tensor.
        operations: Transformers' operations.

    Raises:
        CheckpointError: one of the operations does not treat each expert separately.
    """

    def __init__(
        self, bank: BankSpec, patterns: Sequence[str], stacked: Sequence[bool], operations: Sequence[Any]
    ) -> None:
        for operation in operations:
            if not _keeps_experts_separate(operation):
                raise CheckpointError(
                    f"The experts of {bank} would have to be computed from {patterns[0]!r} by {operation!r}, which does not "
                    "treat one expert at a time: load the model with Transformers, save it with "
                    "model.save_pretrained(folder, save_original_format=False), and open that folder."
                )
        self._bank = bank
        self._patterns = list(patterns)
        self._stacked = list(stacked)
        self._operations = list(operations)
        self._model = _ModelStandIn(bank)

    def __call__(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the expert's tensor `row_shape`, given its part of each source in the order of the patterns."""
        values: dict[str, Any] = {}
        for pattern, stacked, tensor in zip(self._patterns, self._stacked, sources, strict=True):
            values.setdefault(pattern, []).append(tensor.unsqueeze(0) if stacked else tensor)
        for operation in self._operations:
            values = operation.convert(
                values,
                source_patterns=self._patterns,
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
        return result.to(self._bank.dtype)

    def check(self, sources: Sequence[torch.Tensor]) -> None:
        """Raise CheckpointError unless sources of these shapes and dtypes give a tensor of the bank's shape."""
        try:
            self([torch.zeros_like(source) for source in sources])
        except (RuntimeError, ValueError, AssertionError, IndexError, KeyError) as error:
            shapes = ", ".join(f"{list(source.shape)} {source.dtype}" for source in sources)
            raise CheckpointError(
                f"The checkpoint's tensors of one expert ({shapes}) do not become {list(self._bank.row_shape)}, one expert of "
                f"{self._bank}: {error}. The checkpoint is not of this model, or config.json was changed."
            ) from error


class _ModelStandIn:
    """A stand-in for the model, which conversions ask for dtype and shape of the parameter that they convert to."""

    def __init__(self, bank: BankSpec) -> None:
        self._parameter = torch.empty((1, *bank.row_shape), dtype=bank.dtype, device="meta")

    def get_submodule(self, name: str) -> _ModelStandIn:
        return self

    def get_parameter(self, name: str) -> torch.Tensor:
        return self._parameter

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._parameter


def _keeps_experts_separate(operation: Any) -> bool:
    name = type(operation).__name__
    if name in _PER_EXPERT:
        return True
    dimensions = [getattr(operation, field) for field in ("dim", "dim0", "dim1") if hasattr(operation, field)]
    if name == "MergeModulelist":
        return dimensions == [0]
    return name in _ALONG_DIMENSIONS and bool(dimensions) and min(dimensions) > 0
