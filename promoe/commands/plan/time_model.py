"""Predicts how fast a model would be with a cache: its sizes, what was measured, and routing, through the simulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from promoe.commands.plan.routing import Routing
from promoe.commands.plan.sizes import ModelSizes, cache_argument
from promoe.commands.simulate.answers import AnswerTimes, simulate_answers
from promoe.config import PromoeConfig
from promoe.scheduler import SchedulerConfig
from promoe.transfer.link_timetable import Wire
from promoe.units import ratio


@dataclass(frozen=True)
class Curve:
    """Seconds measured at some numbers of rows: linear between them, and beyond the last as between the last two.

    Args:
        points: `(rows, seconds)` by ascending rows, at least one.
    """

    points: tuple[tuple[float, float], ...]

    def __call__(self, rows: float) -> float:
        """Return the seconds for so many rows; never less than for the fewest that were measured."""
        counts, seconds = zip(*self.points, strict=True)
        if len(counts) > 1 and rows > counts[-1]:
            slope = max(0.0, (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2]))
            return float(seconds[-1] + slope * (rows - counts[-1]))
        return float(np.interp(rows, counts, seconds))

    def quicker(self, other: Curve) -> Curve:
        """Return the shorter time of two curves at each point of this one."""
        return Curve(tuple((rows, min(seconds, other(rows))) for rows, seconds in self.points))


@dataclass(frozen=True)
class ComputeTimes:
    """What a pass takes where nothing has to be fetched.

    Args:
        layer: tokens of a pass -> seconds of everything but routed experts, for each MoE layer.
        expert: rows of an expert -> its seconds.
        expert_bytes: bytes of the expert that was measured.
        group_s: seconds that it costs to run experts that arrive during a visit by themselves, however few they are.
        how: how this was measured, in words.
    """

    layer: Curve
    expert: Curve
    expert_bytes: int
    group_s: float
    how: str

    def quicker(self, other: ComputeTimes) -> ComputeTimes:
        """Return the shorter times of two measurements: what else runs on a machine only ever adds to them."""
        return replace(
            self,
            layer=self.layer.quicker(other.layer),
            expert=self.expert.quicker(other.expert),
            group_s=min(self.group_s, other.group_s),
        )


@dataclass(frozen=True)
class LinkSpeed:
    """What experts come over.

    Args:
        name: "O_DIRECT", "page cache" or "pinned RAM".
        alone_bytes_per_s: while nothing computes.
        bytes_per_s: while the model computes.
        slowdown: how many times as long computing takes meanwhile, at least 1.
        convert_s: seconds to dequantise one expert when it has come, beside the reads; 0: as it is stored.
        how: what was read, in words.
    """

    name: str
    alone_bytes_per_s: float
    bytes_per_s: float
    slowdown: float
    convert_s: float
    how: str


@dataclass(frozen=True)
class Speed(AnswerTimes):
    """What one kind of routing gives. TTFT is for slots that another prompt has filled before.

    Args:
        routing: its name.
        compute_s: C, seconds per decoded token with everything in memory.
        transfer_s: seconds of `bytes_per_token` alone over the link while nothing computes.
    """

    routing: str
    compute_s: float
    transfer_s: float

    @property
    def tokens_per_s(self) -> float:
        """Return the decoded tokens per second."""
        return ratio(1.0, self.tpot_s)


@dataclass(frozen=True)
class Prediction:
    """What a cache rate gives.

    Args:
        rate: slots over routed experts.
        slots: the slots of all layers.
        slots_bytes: the bytes that they take.
        speeds: for each kind of routing, slowest first.
    """

    rate: float
    slots: int
    slots_bytes: int
    speeds: tuple[Speed, ...]

    @property
    def slowest(self) -> Speed:
        """Return the speed that may be relied on."""
        return self.speeds[0]


class TimeModel:
    """Predicts one model on one machine, for as many cache rates as are asked; remembers what it said.

    Args:
        sizes: the model's.
        compute: measured.
        link_at: cache rate -> the link that experts come over with such a cache, measured.
        routings: the kinds of routing that are possible.
    """

    def __init__(
        self,
        sizes: ModelSizes,
        compute: ComputeTimes,
        link_at: Callable[[float], LinkSpeed],
        routings: Sequence[Routing],
    ) -> None:
        self.sizes, self.compute, self.link_at, self.routings = sizes, compute, link_at, tuple(routings)
        self._known: dict[float, Prediction] = {}

    def __call__(self, rate: float) -> Prediction:
        """Return what a cache rate gives.

        Raises:
            ConfigError: it is less than one slot of each shape.
        """
        if rate not in self._known:
            slots = self.sizes.slots(rate)
            speeds = sorted((self.speed(rate, one) for one in self.routings), key=lambda one: -one.tpot_s)
            self._known[rate] = Prediction(rate, slots.num_slots, slots.nbytes, tuple(speeds))
        return self._known[rate]

    def speed(self, rate: float, routing: Routing) -> Speed:
        """Return what a cache rate gives with one kind of routing."""
        config = self._config(rate)
        if sum(pool.num_slots for pool in config.pools) == self.sizes.num_experts:
            # Every expert was loaded when the model was opened: as if all came at once, and at no cost.
            found = simulate_answers(config, routing.answers, Wire(math.inf, 0.0), self._work)
            found = replace(found, hit_rate=1.0, bytes_per_token=0.0, stall_s=0.0)
            return Speed(**asdict(found), routing=routing.name, compute_s=self.compute_s, transfer_s=0.0)
        link = self.link_at(rate)
        wire = Wire(into_slots(self.sizes, link, link.bytes_per_s), 0.0)
        found = simulate_answers(config, routing.answers, wire, self._work, link.slowdown, self.compute.group_s)
        transfer_s = found.bytes_per_token / into_slots(self.sizes, link, link.alone_bytes_per_s)
        return Speed(**asdict(found), routing=routing.name, compute_s=self.compute_s, transfer_s=transfer_s)

    @property
    def compute_s(self) -> float:
        """Return C: seconds per decoded token with everything in memory."""
        return sum(
            layer_s + layer.top_k * expert_s
            for idx, layer in enumerate(self.sizes.layers)
            for layer_s, expert_s in [self._work(idx, 1, layer.top_k)]
        )

    def _work(self, layer_idx: int, num_tokens: int, num_used: int) -> tuple[float, float]:
        layer, compute = self.sizes.layers[layer_idx], self.compute
        scale = layer.layout.payload_bytes / compute.expert_bytes
        rows = num_tokens * layer.top_k / max(1, num_used)
        return compute.layer(num_tokens), scale * compute.expert(rows)

    def _config(self, rate: float) -> SchedulerConfig:
        settings, layers = PromoeConfig(), self.sizes.layers
        return SchedulerConfig(
            num_experts=[layer.num_experts for layer in layers],
            chunk_bytes=[layer.chunk_bytes for layer in layers],
            pools=[plan.spec for plan in self.sizes.pools(cache_argument(rate))],
            eviction=settings.eviction,
            reorder=settings.ablation.reorder,
            hints=settings.ablation.early_preemption,
            prefetch=False,
        )


def into_slots(sizes: ModelSizes, link: LinkSpeed, stored_bytes_per_s: float) -> float:
    """Return the bytes in slots per second, conversion included; each worker reads, then converts."""
    per_byte_s = sizes.stored_share / stored_bytes_per_s
    convert_s = link.convert_s / sizes.layers[0].layout.payload_bytes
    return 1 / (per_byte_s + convert_s / PromoeConfig().workers)
