"""Turn the size of the cache into numbers of slots."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from promoe.errors import ConfigError, shown
from promoe.scheduler import PoolSpec
from promoe.stores.base import HotLayouts
from promoe.stores.layout import ExpertLayout
from promoe.units import format_memory

UNIT_BYTES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
CacheSize = str | int


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """A pool to be made, for the experts that have this layout."""

    layout: ExpertLayout
    spec: PoolSpec

    @property
    def nbytes(self) -> int:
        """Memory that the pool's slots take, in bytes."""
        return self.layout.slot_bytes * self.spec.num_slots


# Memory that cache="auto" leaves free for the KV cache and activations.
AUTO_RESERVE_BYTES = 2 * 2**30


def plan_pools(
    cache: CacheSize,
    layouts: Sequence[ExpertLayout],
    num_experts: Sequence[int],
    free_bytes: int | None = None,
    hot: HotLayouts | None = None,
) -> list[PoolPlan]:
    """Plan one pool for each distinct layout, in order of first appearance; or one for each layer.

    Every pool gets slots for the same share of its experts. Slots that are given per layer belong to that layer: each
    layer has a pool of its own.

    Args:
        cache: "6GiB", "50%" of the routed experts, a number of bytes, "auto" (all free memory except 2 GiB, which is for
            the KV cache), or "2 per layer" (slots; no more than the layer has experts).
        layouts: the layout of each MoE layer's experts.
        num_experts: the number of experts of each MoE layer.
        free_bytes: fast memory that is free now, for "auto"; None: unknown.
        hot: experts that have other layouts, and so pools of their own.

    Raises:
        ConfigError: `cache` is malformed, or too small for one expert of each layout; or slots per layer were asked for
            where experts of a layer have different layouts.
    """
    if (each := slots_per_layer(cache)) is not None:
        if hot is not None:
            raise ConfigError(
                "Slots per layer are for experts of one size, and here some of each layer are in more bits than the others. "
                f'Got {shown(cache)}. Give a size or a share, such as "50%".'
            )
        return [
            PoolPlan(layout, PoolSpec(min(each, count), (layer_idx,)))
            for layer_idx, (layout, count) in enumerate(zip(layouts, num_experts, strict=True))
        ]
    groups = _groups(layouts, num_experts, hot)
    experts = [sum(layers.values()) for layers in groups.values()]
    total_bytes = sum(layout.slot_bytes * count for (layout, _), count in zip(groups, experts, strict=True))
    share = _share(_auto_bytes(free_bytes) if cache == "auto" else cache, total_bytes)
    slots = [int(share * count + 1e-9) for count in experts]
    if min(slots) < 1:
        least_bytes = -(-total_bytes // min(experts))
        percent = -(-100 // min(experts))
        raise ConfigError(
            f"The 'cache' argument must be at least {_mib(least_bytes)} = {least_bytes} bytes (one expert of each shape). "
            f"Got {shown(cache)} = {_mib(share * total_bytes)} instead. "
            f'Try cache="{percent}%" ({_mib(total_bytes * percent / 100)}) or more.'
        )
    return [
        PoolPlan(layout, PoolSpec(num_slots, tuple(layers), hot=is_hot))
        for ((layout, is_hot), layers), num_slots in zip(groups.items(), slots, strict=True)
    ]


def _groups(
    layouts: Sequence[ExpertLayout], num_experts: Sequence[int], hot: HotLayouts | None
) -> dict[tuple[ExpertLayout, bool], dict[int, int]]:
    """Return the experts that share a pool: how many of each layer, by layout and whether they are hot."""
    groups: dict[tuple[ExpertLayout, bool], dict[int, int]] = {}
    num_hot = Counter[int]() if hot is None else hot.per_layer
    for layer_idx, layout in enumerate(layouts):
        groups.setdefault((layout, False), {})[layer_idx] = num_experts[layer_idx] - num_hot[layer_idx]
    for layer_idx, layout in enumerate(() if hot is None else hot.layouts):
        groups.setdefault((layout, True), {})[layer_idx] = num_hot[layer_idx]
    return groups


def check_cache(cache: CacheSize) -> None:
    """Raise ConfigError if `cache` is not a size. Whether it is large enough depends on the model."""
    if cache != "auto" and slots_per_layer(cache) is None:
        _share(cache, 1)


def slots_per_layer(cache: CacheSize) -> int | None:
    """Return how many slots each layer has for itself, where `cache` says that ("2 per layer"); else None."""
    match = re.fullmatch(r"\s*([1-9][0-9]{0,8})\s+per\s+layer\s*", cache) if isinstance(cache, str) else None
    return None if match is None else int(match[1])


def fixed_bytes(size: str) -> int:
    """Return the number of bytes that a size such as "6GiB" stands for.

    Raises:
        ConfigError: it is "auto", a share such as "50%", a number of slots per layer, or not a size.
    """
    check_cache(size)
    if size == "auto" or "%" in size or slots_per_layer(size) is not None:
        raise ConfigError(f'A size such as "128MiB" is needed. Got {shown(size)} instead.')
    return round(_share(size, UNIT_BYTES["TIB"]) * UNIT_BYTES["TIB"])


def _auto_bytes(free_bytes: int | None) -> int:
    if free_bytes is None:
        raise ConfigError(
            'cache="auto" needs to know how much memory is free, which this system does not report. Give a size.'
        )
    if free_bytes <= AUTO_RESERVE_BYTES:
        raise ConfigError(
            f'cache="auto" leaves {_mib(AUTO_RESERVE_BYTES)} free for the KV cache, but only {_mib(free_bytes)} are free. '
            "Free some memory, or give a size."
        )
    return free_bytes - AUTO_RESERVE_BYTES


def _mib(nbytes: float) -> str:
    return format_memory(round(nbytes))


def _share(cache: CacheSize, total_bytes: int) -> float:
    """Return the share of all routed experts that the cache has room for, at most 1."""
    if isinstance(cache, bool) or not isinstance(cache, str | int):
        raise _malformed(cache)
    if isinstance(cache, int):
        if cache <= 0:
            raise _malformed(cache)
        return min(cache, total_bytes) / total_bytes
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(%|[A-Za-z]+)\s*", cache)
    if match is None:
        raise _malformed(cache)
    number, unit = float(match[1]), match[2].upper()
    if unit == "%":
        if not 0 < number <= 100:
            raise _malformed(cache)
        return number / 100
    if unit not in UNIT_BYTES or number <= 0:
        raise _malformed(cache)
    return min(number * UNIT_BYTES[unit] / total_bytes, 1.0)


def _malformed(cache: object) -> ConfigError:
    return ConfigError(
        'The \'cache\' argument must be a size such as "6GiB", a share of the routed experts such as "50%" '
        f'(more than 0, at most 100%), slots for each layer such as "2 per layer", or a positive number of bytes. '
        f"Got {shown(cache)} instead."
    )
