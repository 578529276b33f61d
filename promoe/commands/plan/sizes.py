"""What a model takes, as numbers: experts in slots and in files, everything else, the KV cache. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby

from promoe.stores.layout import ExpertLayout
from promoe.units import ratio


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """What one decoder layer keeps of the tokens before, for one sequence.

    Args:
        kind: "full attention", "sliding window", "state", or, where it is a family's own, its name.
        fixed_bytes: whatever the length.
        token_bytes: more for each token.
        most_tokens: that are kept; None: all.
        shape: of what is kept of a token, in words: "8 heads x (64 + 64)"; empty for a state.
    """

    kind: str
    fixed_bytes: int
    token_bytes: int
    most_tokens: int | None = None
    shape: str = ""

    def nbytes(self, num_tokens: int) -> int:
        """After so many tokens."""
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
        """Of one sequence after so many tokens; None: unknown."""
        return sum(layer.nbytes(num_tokens) for layer in self.layers) if self.layers else None

    def kinds(self) -> list[str]:
        """Kinds of layers, each with how many there are: "12 x full attention, 4 heads x (48 + 48)"."""
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
        num_experts: of them.
        top_k: that a token uses.
        layout: of one in a slot.
        stored_bytes: of one, as it lies in the files and is moved.
        chunk_bytes: of the transfers that bring one, at the destination.
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
        other_bytes: of every parameter and buffer that is no routed expert's.
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
        """Of all layers."""
        return sum(layer.num_experts for layer in self.layers)

    @property
    def expert_bytes(self) -> int:
        """Of all routed experts, as the model computes with them."""
        return sum(layer.num_experts * layer.layout.payload_bytes for layer in self.layers)

    @property
    def stored_bytes(self) -> int:
        """Of all routed experts in the files."""
        return sum(layer.num_experts * layer.stored_bytes for layer in self.layers)

    @property
    def slots_bytes(self) -> int:
        """Of slots for all of them."""
        return sum(layer.num_experts * layer.layout.slot_bytes for layer in self.layers)

    @property
    def token_bytes(self) -> int:
        """Of the routed experts that one token uses."""
        return sum(layer.top_k * layer.layout.payload_bytes for layer in self.layers)

    @property
    def stored_share(self) -> float:
        """Bytes in files for each byte in a slot: less than 1 where experts are quantised."""
        return ratio(self.stored_bytes, self.expert_bytes)

    @property
    def least_rate(self) -> float:
        """The smallest cache: one slot of each shape, rounded up to the four digits that are printed to be typed."""
        counts: dict[ExpertLayout, int] = {}
        for layer in self.layers:
            counts[layer.layout] = counts.get(layer.layout, 0) + layer.num_experts
        return rounded_up(1 / min(counts.values()))


def rounded_up(rate: float) -> float:
    """A share to the four digits that are printed; 0 stays 0."""
    scale = 10.0 ** (3 - math.floor(math.log10(rate))) if rate else 1.0
    return math.ceil(round(rate * scale, 6)) / scale
