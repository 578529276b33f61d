"""How fast a model would be with a cache: its sizes, what was measured, and routing, through the simulator. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from promoe.commands.plan.fits import pools, slots_bytes
from promoe.commands.plan.routing import Routing
from promoe.commands.plan.sizes import ModelSizes
from promoe.commands.plan.times import ComputeTimes, LinkSpeed
from promoe.commands.simulate.answers import simulate_answers
from promoe.config import PromoeConfig
from promoe.scheduler import SchedulerConfig
from promoe.transfer.link_timetable import Wire
from promoe.units import ratio


@dataclass(frozen=True)
class Speed:
    """What one kind of routing gives.

    Args:
        routing: its name.
        ttft_s: to read a prompt, the slots being filled by another one before.
        tpot_s: per decoded token.
        hit_rate: experts that were in a slot when the gate had chosen.
        bytes_per_token: moved.
        stall_s: of `tpot_s`, waiting for experts.
        compute_s: C, per decoded token with everything in memory.
        transfer_s: of `bytes_per_token` alone over the link while nothing computes.
    """

    routing: str
    ttft_s: float
    tpot_s: float
    hit_rate: float
    bytes_per_token: float
    stall_s: float
    compute_s: float
    transfer_s: float

    @property
    def tokens_per_s(self) -> float:
        """The reciprocal."""
        return ratio(1.0, self.tpot_s)


@dataclass(frozen=True)
class Prediction:
    """What a cache rate gives.

    Args:
        rate: slots over routed experts.
        slots: of all layers.
        slots_bytes: that they take.
        speeds: for each kind of routing, slowest first.
    """

    rate: float
    slots: int
    slots_bytes: int
    speeds: tuple[Speed, ...]

    @property
    def slowest(self) -> Speed:
        """What may be relied on."""
        return self.speeds[0]


class TimeModel:
    """Predicts one model on one machine, for as many cache rates as are asked; remembers what it said.

    Args:
        sizes: of the model.
        compute: measured.
        link_at: cache rate -> the link that experts come over with such a cache, measured.
        routings: that are possible.
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
        """What a cache rate gives.

        Raises:
            ConfigError: it is less than one slot of each shape.
        """
        if rate not in self._known:
            plans = pools(self.sizes, rate)
            speeds = sorted((self.speed(rate, one) for one in self.routings), key=lambda one: -one.tpot_s)
            slots = sum(plan.spec.num_slots for plan in plans)
            self._known[rate] = Prediction(rate, slots, slots_bytes(plans), tuple(speeds))
        return self._known[rate]

    def speed(self, rate: float, routing: Routing) -> Speed:
        """The same for one kind of routing."""
        config = self._config(rate)
        if sum(pool.num_slots for pool in config.pools) == self.sizes.num_experts:
            # Every expert was loaded when the model was opened: as if all came at once, and at no cost.
            found = simulate_answers(config, routing.answers, Wire(math.inf, 0.0), self._work)
            return Speed(routing.name, found.ttft_s, found.tpot_s, 1.0, 0.0, 0.0, self.compute_s, 0.0)
        link = self.link_at(rate)
        wire, group_s = Wire(self._into_slots(link, link.bytes_per_s), 0.0), self.compute.group_s
        found = simulate_answers(config, routing.answers, wire, self._work, link.slowdown, group_s)
        return Speed(
            routing.name,
            found.ttft_s,
            found.tpot_s,
            found.hit_rate,
            found.bytes_per_token,
            found.stall_s,
            self.compute_s,
            found.bytes_per_token / self._into_slots(link, link.alone_bytes_per_s),
        )

    @property
    def compute_s(self) -> float:
        """C: seconds per decoded token with everything in memory."""
        return sum(
            layer_s + layer.top_k * expert_s
            for idx, layer in enumerate(self.sizes.layers)
            for layer_s, expert_s in [self._work(idx, 1, layer.top_k)]
        )

    def _into_slots(self, link: LinkSpeed, stored_bytes_per_s: float) -> float:
        """Bytes in slots per second, with what conversion takes counted in; each worker reads, then converts."""
        per_byte_s = self.sizes.stored_share / stored_bytes_per_s
        convert_s = link.convert_s / self.sizes.layers[0].layout.payload_bytes
        return 1 / (per_byte_s + convert_s / PromoeConfig().workers)

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
            pools=[plan.spec for plan in pools(self.sizes, rate)],
            eviction=settings.eviction,
            reorder=settings.reorder,
            hints=settings.early_preemption,
            prefetch=False,
        )
