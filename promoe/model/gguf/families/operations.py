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


class GroupHeads:
    """Puts value heads that share a key head beside each other. llama.cpp has the first of each key head, then the second.

    Args:
        num_keys: key heads.
        num_values: value heads.
        dim: the dimension of the heads.
        offset: of the first value head in that dimension.
    """

    def __init__(self, num_keys: int, num_values: int, dim: int = 0, offset: int = 0) -> None:
        self.num_keys, self.per_key = num_keys, num_values // max(num_keys, 1)
        self.dim, self.offset = dim, offset

    def convert(
        self, input_dict: Sources, source_patterns: Sequence[str], target_patterns: Sequence[str], **_: Any
    ) -> dict[str, torch.Tensor]:
        """Return the reordered weight."""
        (pattern,) = input_dict
        weight, dim = _tensor(input_dict, pattern), self.dim
        others, values = weight.tensor_split((self.offset,), dim)
        tiled = values.unflatten(dim, (self.per_key, self.num_keys, -1))
        return {target_patterns[0]: torch.cat((others, tiled.transpose(dim, dim + 1).flatten(dim, dim + 2)), dim)}


class JoinByKeyHead:
    """Joins queries, keys and values, and gates of linear attention to one projection, key head by key head.

    Args:
        num_keys: key heads.
        key_size: elements of a key, or query.
    """

    def __init__(self, num_keys: int, key_size: int) -> None:
        self.num_keys, self.key_size = num_keys, key_size

    def convert(
        self, input_dict: Sources, source_patterns: Sequence[str], target_patterns: Sequence[str], **_: Any
    ) -> dict[str, torch.Tensor]:
        """Return the joined weight."""
        mixed, gates = (_tensor(input_dict, pattern) for pattern in source_patterns)
        rows = self.num_keys * self.key_size
        parts = (*mixed.tensor_split((rows, 2 * rows)), gates)
        by_head = [part.unflatten(0, (self.num_keys, -1)) for part in parts]
        return {target_patterns[0]: torch.cat(by_head, 1).flatten(0, 1)}


class AsChannels:
    """Adds the dimension of size one that the kernel of a convolution over single channels has."""

    def convert(
        self, input_dict: Sources, source_patterns: Sequence[str], target_patterns: Sequence[str], **_: Any
    ) -> dict[str, torch.Tensor]:
        """Return the kernel `[channels, 1, width]`."""
        (pattern,) = input_dict
        kernel = _tensor(input_dict, pattern)
        return {target_patterns[0]: kernel.reshape(kernel.shape[0], 1, -1)}


class Flat:
    """Makes a weight a vector."""

    def convert(
        self, input_dict: Sources, source_patterns: Sequence[str], target_patterns: Sequence[str], **_: Any
    ) -> dict[str, torch.Tensor]:
        """Return the weight `[size]`."""
        return {target_patterns[0]: _tensor(input_dict, source_patterns[0]).reshape(-1)}


class AsRow:
    """Makes a vector a matrix of one row."""

    def convert(
        self, input_dict: Sources, source_patterns: Sequence[str], target_patterns: Sequence[str], **_: Any
    ) -> dict[str, torch.Tensor]:
        """Return the weight `[1, size]`."""
        return {target_patterns[0]: _tensor(input_dict, source_patterns[0]).reshape(1, -1)}
