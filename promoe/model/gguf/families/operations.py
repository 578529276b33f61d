"""What llama.cpp's converter does to weights other than experts, undone: operations of Transformers' conversions.

They have the interface of `transformers.core_model_loading.ConversionOps`, which is not imported for their sake.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

Sources: TypeAlias = Mapping[str, "torch.Tensor | list[torch.Tensor]"]


def _tensor(sources: Sources, pattern: str) -> torch.Tensor:
    value = sources[pattern]
    return value[0] if isinstance(value, list) else value


class PairsToHalves:
    """Puts a head's rotated rows in halves, as Transformers has them. llama.cpp's `llama` has the pairs side by side.

    Args:
        num_heads: of the weight, or bias.
    """

    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads

    def convert(
        self, input_dict: Sources, source_patterns: Sequence[str], target_patterns: Sequence[str], **_: Any
    ) -> dict[str, torch.Tensor]:
        """Return the reordered weight `[heads * size, ...]`."""
        weight = _tensor(input_dict, source_patterns[0])
        pairs = weight.unflatten(0, (self.num_heads, -1, 2))
        return {target_patterns[0]: pairs.transpose(1, 2).reshape(weight.shape)}


class JoinKeysAndValues:
    """Joins the keys `[heads, rank, size]` and values `[heads, size, rank]` of latent attention to one projection."""

    def convert(
        self, input_dict: Sources, source_patterns: Sequence[str], target_patterns: Sequence[str], **_: Any
    ) -> dict[str, torch.Tensor]:
        """Return the weight `[heads * (key size + value size), rank]`."""
        keys, values = (_tensor(input_dict, pattern) for pattern in source_patterns)
        return {target_patterns[0]: torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)}


class AsRow:
    """Makes a vector a matrix of one row."""

    def convert(
        self, input_dict: Sources, source_patterns: Sequence[str], target_patterns: Sequence[str], **_: Any
    ) -> dict[str, torch.Tensor]:
        """Return the weight `[1, size]`."""
        return {target_patterns[0]: _tensor(input_dict, source_patterns[0]).reshape(1, -1)}
