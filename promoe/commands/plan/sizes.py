"""What a model takes, as numbers, and which cache sizes fit into a machine's memory. Pure arithmetic."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from promoe.commands.model_options import cache_size
from promoe.errors import ConfigError, shown
from promoe.runtime.sizes import AUTO_RESERVE_BYTES, CacheSize, PoolPlan, plan_pools, slots_per_layer
from promoe.stores.layout import ExpertLayout
from promoe.units import ratio

# What promoe takes beside slots and the other weights, at most.
WORKSPACE_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """What one decoder layer keeps of the tokens before, for one sequence.

    Args:
        kind: "full attention", "sliding window", "state", or the name of a kind that a family brings itself.
        fixed_bytes: bytes whatever the length.
        token_bytes: bytes more for each token.
        most_tokens: tokens that are kept; None: all.
        shape: of what is kept of a token, in words: "8 heads x (64 + 64)"; empty for a state.
    """

    kind: str
    fixed_bytes: int
    token_bytes: int
    most_tokens: int | None = None
    shape: str = ""

    def nbytes(self, num_tokens: int) -> int:
        """Return the bytes after so many tokens."""
        kept = num_tokens if self.most_tokens is None else min(num_tokens, self.most_tokens)
        return self.fixed_bytes + kept * self.token_bytes


@dataclass(frozen=True)
class KvCache:
    """What a model keeps of the tokens before.

    Args:
        layers: in order; empty where it could not be found out.
        assumed: what that rests on, in words.
    """

    layers: tuple[CacheLayer, ...]
    assumed: str

    def nbytes(self, num_tokens: int) -> int | None:
        """Return the bytes of one sequence after so many tokens; None: unknown."""
        return sum(layer.nbytes(num_tokens) for layer in self.layers) if self.layers else None

    def kinds(self) -> list[str]:
        """Return the kinds of layers, each with its number: "12 x full attention, 4 heads x (48 + 48)"."""
        said = []
        order = sorted(self.layers, key=lambda layer: (layer.kind, layer.shape, layer.most_tokens or 0))
        for (kind, shape, most), alike in groupby(order, key=lambda one: (one.kind, one.shape, one.most_tokens)):
            window = f" of {most:,} tokens" if most is not None else ""
            said.append(f"{len(list(alike))} x {kind}{window}{', ' if shape else ''}{shape}")
        return said


@dataclass(frozen=True)
class ExpertsOfLayer:
    """The routed experts of one MoE layer.

    Args:
        num_experts: how many there are.
        top_k: how many a token uses.
        layout: how one lies in a slot.
        stored_bytes: bytes of one, as it lies in the files and is moved.
        chunk_bytes: bytes of each transfer that brings one, at the destination.
    """

    num_experts: int
    top_k: int
    layout: ExpertLayout
    stored_bytes: int
    chunk_bytes: tuple[int, ...]


@dataclass(frozen=True)
class ModelSizes:
    """A model as numbers.

    Args:
        name: as the user gave it.
        model_type: as Transformers calls the family.
        dtype: that it computes in: "bfloat16".
        layers: MoE layers in order.
        other_bytes: bytes of every parameter and buffer that is not a routed expert's.
        kv: the KV cache.
        found_in: what all this was read from, in words.
    """

    name: str
    model_type: str
    dtype: str
    layers: tuple[ExpertsOfLayer, ...]
    other_bytes: int
    kv: KvCache
    found_in: str

    @property
    def num_experts(self) -> int:
        """Return the number of routed experts of all layers."""
        return sum(layer.num_experts for layer in self.layers)

    @property
    def expert_bytes(self) -> int:
        """Return the bytes of all routed experts, as the model computes with them."""
        return sum(layer.num_experts * layer.layout.payload_bytes for layer in self.layers)

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of all routed experts in the files."""
        return sum(layer.num_experts * layer.stored_bytes for layer in self.layers)

    @property
    def slots_bytes(self) -> int:
        """Return the bytes of slots for all routed experts."""
        return sum(layer.num_experts * layer.layout.slot_bytes for layer in self.layers)

    @property
    def token_bytes(self) -> int:
        """Return the bytes of the routed experts that one token uses."""
        return sum(layer.top_k * layer.layout.payload_bytes for layer in self.layers)

    @property
    def stored_share(self) -> float:
        """Return the bytes in files for each byte in a slot: less than 1 where experts are quantised."""
        return ratio(self.stored_bytes, self.expert_bytes)

    @property
    def least_rate(self) -> float:
        """Return the smallest cache rate: one slot of each shape, rounded up to the four digits that are printed."""
        counts: Counter[ExpertLayout] = Counter()
        for layer in self.layers:
            counts[layer.layout] += layer.num_experts
        return _rounded_up(1 / min(counts.values()))

    def pools(self, cache: CacheSize, free_bytes: int | None = None) -> list[PoolPlan]:
        """Return the pools that an opened model would get with this cache.

        Raises:
            ConfigError: the cache is not a size, or less than one slot of each shape.
        """
        layouts, counts = [layer.layout for layer in self.layers], [layer.num_experts for layer in self.layers]
        return plan_pools(cache, layouts, counts, free_bytes)

    def slots(self, rate: float) -> Slots:
        """Return the slots at a cache rate (0..1].

        Raises:
            ConfigError: that is less than one slot of each shape.
        """
        pools = self.pools(cache_argument(rate))
        return Slots(sum(pool.spec.num_slots for pool in pools), sum(pool.nbytes for pool in pools))


class Slots(NamedTuple):
    """How many slots a cache has, and the bytes that they take."""

    num_slots: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Room:
    """Fast memory, and what is in it before the first slot.

    Args:
        where: "RAM" or the name of a GPU.
        free_bytes: that the system has left now; None: it does not tell.
        other_bytes: of the model, without its routed experts.
        kv_bytes: of the KV cache at the wanted length; None: unknown.
    """

    where: str
    free_bytes: int | None
    other_bytes: int
    kv_bytes: int | None

    @property
    def reserve_bytes(self) -> int:
        """Return what is left for KV cache and activations: as much as cache="auto" leaves, or what the KV cache needs."""
        return max(AUTO_RESERVE_BYTES, (self.kv_bytes or 0) + WORKSPACE_BYTES)

    @property
    def slots_bytes(self) -> int | None:
        """Return what slots may take; None: unknown; negative where not even the rest of the model fits."""
        return None if self.free_bytes is None else self.free_bytes - self.other_bytes - self.reserve_bytes

    def fits(self, slots: Slots) -> bool:
        """Return whether these slots fit. What is unknown is taken to fit."""
        return self.slots_bytes is None or slots.nbytes <= self.slots_bytes

    def largest_rate(self, sizes: ModelSizes) -> float:
        """Return the largest cache rate that fits, in whole per cent (or the least rate); 0: none fits."""
        if self.slots_bytes is None:
            return 1.0
        if not self.fits(sizes.slots(sizes.least_rate)):
            return 0.0
        share = min(1.0, self.slots_bytes / sizes.slots_bytes)
        return max(int(100 * share + 1e-9) / 100, sizes.least_rate)

    def rate_of(self, cache: str, sizes: ModelSizes) -> float:
        """Return the cache rate that a user asked for, as a share, a size, or "auto".

        Raises:
            ConfigError: it is none of these, or less than one slot of each shape.
        """
        if slots_per_layer(cache) is not None:
            raise ConfigError(
                "promoe plan predicts caches whose slots are shared by all layers: --cache must be a share such as 25%, a "
                f"size or auto. Got {shown(cache)} instead. Measure slots per layer with promoe bench."
            )
        free_bytes = None if self.free_bytes is None else max(0, self.free_bytes - self.other_bytes)
        return sum(pool.spec.num_slots for pool in sizes.pools(cache_size(cache), free_bytes)) / sizes.num_experts


def cache_argument(rate: float) -> str:
    """Return a cache rate as `promoe.from_pretrained` takes it, with every digit that may make a slot more or less."""
    return f"{100 * rate:.12f}%"


def rate_name(rate: float) -> str:
    """Return a cache rate in four digits, as on the command line: "12.5%". Rounded up: typed, it gives no slot less."""
    return f"{100 * _rounded_up(rate):.4g}%"


def _rounded_up(rate: float) -> float:
    """Return a share in the four digits that are printed; 0 stays 0."""
    scale = 10.0 ** (3 - math.floor(math.log10(rate))) if rate else 1.0
    return math.ceil(round(rate * scale, 6)) / scale
