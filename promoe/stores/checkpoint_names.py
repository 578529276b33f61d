"""Finds which tensors of a checkpoint become which parameter of the model.

A checkpoint has other names and shapes than the model: one tensor per linear layer and expert, or all experts stacked.
Transformers' conversion mapping says how one becomes the other. Here, the mapping is applied to names and shapes only.
So conversions that only put bytes side by side become byte ranges, and all others are known by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from promoe.errors import CheckpointError
from promoe.stores.encodings.base import StoredTensor

if TYPE_CHECKING:
    from transformers.core_model_loading import WeightTransform


@dataclass(frozen=True, slots=True)
class BankSpec:
    """One tensor that each expert of a layer has, and the parameters of the model that hold it for all experts."""

    name: str
    """The tensor's name, for example `gate_up_proj`."""
    full_names: tuple[str, ...]
    """The names of the parameters: a stack of all experts, `model.layers.0.mlp.experts.gate_up_proj`, or one per expert."""
    num_experts: int
    row_shape: tuple[int, ...]
    """The shape of one expert's tensor."""
    dtype: torch.dtype
    stack_shape: tuple[int, ...]
    """The shape of each parameter; that of a stack is usually `[num_experts, *row_shape]`."""

    @property
    def full_name(self) -> str:
        """The name of the stack, or of the first expert's parameter."""
        return self.full_names[0]

    def __str__(self) -> str:
        return f"{self.full_name} {list(self.stack_shape)} {self.dtype}"


@dataclass(frozen=True, slots=True)
class BankSources:
    """The tensors of a checkpoint that a bank comes from."""

    bank: BankSpec
    patterns: list[str]
    """The source patterns of the conversion; empty for a plain rename."""
    tensors: list[list[StoredTensor]]
    """The tensors of each pattern, in the order of experts."""
    operations: list[Any]
    """Transformers' operations that make the bank out of them; empty for a plain rename."""

    @property
    def are_per_expert(self) -> bool | None:
        """Whether each expert has tensors of its own, or all are stacked; None: it has to be computed from them."""
        from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

        first, rest = self.tensors[0], list(self.operations)
        if rest and type(rest[0]) is Transpose and rest[0].check_dims and first[0].shape == self.bank.stack_shape:
            rest.pop(0)  # it transposes only if shapes differ
        per_expert = bool(rest) and type(rest[0]) is MergeModulelist and rest[0].dim == 0
        if per_expert:
            rest.pop(0)
        if rest and type(rest[0]) is Concatenate and rest[0].dim == 1:
            rest.pop(0)
        elif not rest and (len(self.tensors) > 1 or (not per_expert and len(first) > 1)):
            return None
        return None if rest else per_expert


class CheckpointNames:
    """Finds which tensors become which parameter, by which operations, as Transformers does when it loads a model."""

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor],
        conversions: Sequence[WeightTransform],
        parameter_names: Collection[str],
        base_model_prefix: str,
    ) -> None:
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        known = self._known = dict.fromkeys(parameter_names, True)
        self.tensors = tensors
        self._converters = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        # The converters whose source is one list with experts of two kinds (text and vision).
        self._several_targets = [
            entry
            for entry in converters
            if [type(operation).__name__ for operation in entry.operations] == ["ErnieFuseAndSplitTextVisionExperts"]
        ]
        self._by_parameter: dict[str, dict[str | None, list[StoredTensor]]] = defaultdict(lambda: defaultdict(list))
        # In this order, a list of tensors is in the order of experts, because `*` stands for their index.
        for name in sorted(tensors, key=dot_natural_key):
            parameter, pattern = rename_source_key(name, renamings, converters, base_model_prefix, known)
            if parameter not in known and name in known:
                parameter, pattern = rename_source_key(name, [], [], base_model_prefix, known)
            self._by_parameter[parameter][pattern].append(tensors[name])

    def as_they_are(self) -> dict[str, StoredTensor]:
        """Return the tensors that become a parameter without any change, by the parameter's name."""
        return {
            parameter: tensors[0]
            for parameter, by_pattern in self._by_parameter.items()
            if parameter in self._known and list(by_pattern) == [None] and len(tensors := by_pattern[None]) == 1
        }

    def of_parameters(self) -> Iterator[tuple[str, StoredTensor]]:
        """Yield each parameter with each tensor that it comes from."""
        for parameter, by_pattern in self._by_parameter.items():
            if parameter in self._known:
                yield from ((parameter, tensor) for tensors in by_pattern.values() for tensor in tensors)

    def unused(self) -> Iterator[str]:
        """Yield the names of tensors that become no parameter, such as those of layers for multi-token prediction."""
        for parameter, by_pattern in self._by_parameter.items():
            if parameter not in self._known:
                yield from (tensor.name for tensors in by_pattern.values() for tensor in tensors)

    def names(self, bank: BankSpec) -> Iterator[str]:
        """Yield the names of all tensors in the files that belong to `bank`."""
        for parameter in bank.full_names:
            for tensors in self._by_parameter[self._source_of(parameter)[0]].values():
                yield from (tensor.name for tensor in tensors)

    def sources(self, bank: BankSpec, parameter: str | None = None) -> BankSources:
        """Return the tensors that a bank, or one of its parameters, comes from.

        Args:
            bank: the bank.
            parameter: one of its `full_names`; the first if None.

        Raises:
            CheckpointError: tensors are missing, or there are two sets of them.
        """
        name, share, num_shares = self._source_of(parameter or bank.full_name)
        by_pattern = self._by_parameter.get(name)
        if not by_pattern:
            raise CheckpointError(self._missing(bank))
        converter = self._converters.get(next(iter(by_pattern)) or "")
        if not set(by_pattern) <= set(converter.source_patterns if converter else [None]):
            names = [tensors[0].name for tensors in by_pattern.values()]
            raise CheckpointError(
                f"The checkpoint has {bank} in two ways: {', '.join(map(repr, names))}. Remove the files of one of "
                "them from the folder."
            )
        if converter is None:
            return BankSources(bank, [], [by_pattern[None][:1]], [])
        patterns = list(converter.source_patterns)
        lists = [by_pattern.get(pattern, []) for pattern in patterns]
        for pattern, tensors in zip(patterns, lists, strict=True):
            if not tensors:
                raise CheckpointError(
                    f"The checkpoint has no tensors {pattern!r} for {bank}, though it has others of that parameter. A file is "
                    "missing: compare the files with the original checkpoint."
                )
        if num_shares > 1:
            lists = [_share(tensors, share, num_shares) for tensors in lists]
            return BankSources(bank, patterns, lists, _stacking(len(lists)))
        return BankSources(bank, patterns, lists, list(converter.operations))

    def _source_of(self, parameter: str) -> tuple[str, int, int]:
        """Return under which name the parameter's tensors were collected, and which share of how many it has of them."""
        for converter in self._several_targets:
            for share, target in enumerate(converter.target_patterns):
                if parameter.endswith(target):
                    first = parameter.removesuffix(target) + converter.target_patterns[0]
                    return first, share, len(converter.target_patterns)
        return parameter, 0, 1

    def _missing(self, bank: BankSpec) -> str:
        prefix = bank.full_name.rpartition(".")[0] + "."
        similar = [tensor for tensor in self.tensors.values() if prefix in tensor.name]
        # Quantised forms of this parameter come first.
        similar.sort(
            key=lambda tensor: (bank.full_name not in tensor.name, tensor.dtype_name in ("F32", "BF16", "F16"))
        )
        examples = ", ".join(f"{tensor.name} ({tensor.dtype_name})" for tensor in similar[:3])
        return (
            f"The checkpoint has no tensors for {bank}. Found {examples or 'nothing'} under {prefix!r}. "
            "A file is missing, it is a checkpoint of another model, or it is quantised in a way that cannot be read."
        )


def _share(tensors: list[StoredTensor], share: int, num_shares: int) -> list[StoredTensor]:
    size = -(-len(tensors) // num_shares)
    return tensors[share * size : (share + 1) * size]


def _stacking(num_parts: int) -> list[Any]:
    """Return the operations on one share of the tensors: stack them, and put the parts side by side."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    return [MergeModulelist(dim=0), *([Concatenate(dim=1)] if num_parts > 1 else [])]
