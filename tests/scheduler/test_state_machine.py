"""Random operations in random order, over all policies and switches: no wrong byte, no lost slot, no endless wait."""

from __future__ import annotations

import struct
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from promoe.scheduler import ExpertKey, HotExperts, PoolSpec, SchedulerConfig

from .driven import Driven, OpenVisit

STEPS = 100_000
# More than STEPS needs: Hypothesis draws constants of all modules that are loaded, so other tests change how long examples are.
EXAMPLES = 400
MANY_EXAMPLES = 10_000
STEPS_PER_EXAMPLE = 40

numbers = st.integers(0, 2**16 - 1)
FORECASTS = ("random", "ones", "zeros", "nan", "infinite", "needed", "not needed", "past")

# Operations of a busy stretch, as often as they stand here. In a calm one the order of victims is not asked for anew.
CALM = (*["issue"] * 5, *["complete"] * 6, *["run_group"] * 3, *["admit"] * 4, "fail", "close")
DENSE = (
    *["issue"] * 5,
    *["complete"] * 6,
    *["run_group"] * 3,
    *["admit"] * 2,
    *["begin"] * 3,
    *["forecast"] * 2,
    *["hint"] * 2,
    *["close"] * 2,
    "fail",
)


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    num_layers = draw(st.integers(1, 4))
    num_experts = [draw(st.integers(1, 6)) for _ in range(num_layers)]
    chunk_bytes = [tuple(10 + i for i in range(draw(st.integers(1, 3)))) for _ in range(num_layers)]
    layers = tuple(range(num_layers))
    split = draw(st.integers(0, num_layers - 1))
    groups = [layers[:split], layers[split:]] if split else [layers]
    hot = draw(hot_experts(num_experts))
    pools = [
        PoolSpec(draw(st.integers(1, sum(count[i] for i in group))), group, hot=bool(is_hot))
        for is_hot, count in enumerate([num_experts] if hot is None else [num_experts, hot.per_layer])
        for group in groups
    ]
    return SchedulerConfig(
        num_experts=num_experts,
        chunk_bytes=chunk_bytes,
        pools=pools,
        eviction=draw(st.sampled_from(["next_use", "lru", "lfru", "static"])),
        reorder=draw(st.booleans()),
        hints=draw(st.booleans()),
        prefetch=draw(st.sampled_from([True, True, False])),
        min_probability=draw(st.sampled_from([0.5, 0.1, 0.0])),
        waste_share=draw(st.sampled_from([1.0, 0.025, 0.0])),
        calibrate=draw(st.booleans()),
        first_chunks=[draw(st.integers(0, len(chunks) - 1)) for chunks in chunk_bytes],
        strict=draw(st.booleans()),
        hot=hot,
    )


@st.composite
def hot_experts(draw: st.DrawFn, num_experts: list[int]) -> HotExperts | None:
    """Some experts of each layer with other chunks than the rest, in two of three models in which this is possible."""
    if min(num_experts) < 2 or not draw(st.integers(0, 2)):
        return None
    chunk_bytes = [tuple(20 + i for i in range(draw(st.integers(1, 3)))) for _ in num_experts]
    return HotExperts(
        experts=frozenset(
            ExpertKey(layer_idx, expert_idx)
            for layer_idx, count in enumerate(num_experts)
            for expert_idx in some_of(draw(numbers), count)[: count - 1]
        ),
        chunk_bytes=chunk_bytes,
        first_chunks=[draw(st.integers(0, len(chunks) - 1)) for chunks in chunk_bytes],
    )


def some_of(number: int, num_experts: int) -> list[int]:
    """Return a non-empty set of experts in some order, named by a number."""
    mask = number % (2**num_experts - 1) + 1
    ids = [e for e in range(num_experts) if mask >> e & 1]
    turn = number // 64 % len(ids)
    return ids[turn:] + ids[:turn]


class Storm(RuleBasedStateMachine):
    """Up to three visits, leases that come back in any order and arbitrarily late, wrong hints, hostile forecasts."""

    steps = 0  # of all examples
    seen: ClassVar[Counter[str]] = Counter()  # what happened, over all examples

    @initialize(config=configs())
    def start(self, config: SchedulerConfig) -> None:
        self.config = config
        self.driven = Driven(config)
        self.last_ids: dict[int, list[int]] = {}

    def pick_layer(self, number: int) -> int:
        return number % self.config.num_layers

    def pick_ids(self, layer_idx: int, number: int) -> list[int]:
        return some_of(number, self.config.num_experts[layer_idx])

    def pick_visit(self, number: int) -> OpenVisit:
        return self.driven.visits[number % len(self.driven.visits)]

    # -- what is needed -----------------------------------------------------------------------------------------

    @rule(which=numbers, ids=numbers)
    def hint(self, which: int, ids: int) -> None:
        layer_idx = self.pick_layer(which)
        self.last_ids[layer_idx] = self.pick_ids(layer_idx, ids)
        self.driven.hint(layer_idx, self.last_ids[layer_idx])

    @precondition(lambda self: len(self.driven.visits) < 3)
    @rule(which=numbers, ids=numbers)
    def begin(self, which: int, ids: int) -> None:
        layer_idx = self.pick_layer(which)
        experts = self.pick_ids(layer_idx, ids)
        if ids % 3 == 0:  # the hint was right
            experts = self.last_ids.get(layer_idx, experts)
        tokens = None
        if which % 5 == 0:
            tokens = [[experts[i % len(experts)], experts[0]] for i in range(ids % 4)]
        opened = self.driven.begin(layer_idx, experts, tokens, num_sequences=1 + which % 7 // 5)
        if which % 8:
            self.driven.admit(opened)

    @precondition(lambda self: self.driven.visits)
    @rule(which=numbers)
    def admit(self, which: int) -> None:
        self.driven.admit(self.pick_visit(which))

    @precondition(lambda self: self.driven.visits)
    @rule(which=numbers, limit=st.sampled_from([None, None, 1, 0]))
    def run_group(self, which: int, limit: int | None) -> None:
        opened = self.pick_visit(which)
        self.seen["begun"] += len(opened.begun)
        if self.driven.run_group(opened, limit):
            self.seen["ran"] += 1
            if opened.remaining and not opened.visit.holds_grants:
                self.seen["wave"] += 1

    @precondition(lambda self: self.driven.visits)
    @rule(which=numbers)
    def close(self, which: int) -> None:
        ended = [v for v in self.driven.visits if v.visit.finished or v.visit.failed()]
        opened = ended[which % len(ended)] if ended else self.pick_visit(which)
        if ended or which % 4 == 0:
            self.seen["finished" if opened.visit.finished else "failed visit" if ended else "given up"] += 1
            self.driven.close(opened)

    # -- forecasts ----------------------------------------------------------------------------------------------

    @rule(which=numbers, kind=st.sampled_from(FORECASTS), steps_ahead=st.integers(-1, 5))
    def forecast(self, which: int, kind: str, steps_ahead: int) -> None:
        layer_idx = self.pick_layer(which)
        num_experts = self.config.num_experts[layer_idx]
        rng = np.random.default_rng(which)
        p = rng.random(num_experts)
        needed = np.isin(np.arange(num_experts), self.last_ids.get(layer_idx, []))
        if kind == "ones":
            p[:] = 1.0
        elif kind == "zeros":
            p[:] = 0.0
        elif kind == "nan":
            p[p < 0.6] = np.nan
        elif kind == "infinite":
            p[:] = rng.choice([np.inf, -np.inf, 7.0, -7.0], num_experts)
        elif kind == "needed":
            p = needed * 1.0
        elif kind == "not needed":
            p = 1.0 - needed
        elif kind == "past":
            steps_ahead = 0
        self.driven.forecast(steps_ahead, layer_idx, p)

    @rule(which=numbers)
    def withdraw(self, which: int) -> None:
        if which % 4 == 0:
            self.driven.withdraw()

    # -- the link -----------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 5))
    def issue(self, count: int) -> None:
        self.driven.issue(count)

    @precondition(lambda self: self.driven.outstanding)
    @rule(which=numbers)
    def complete(self, which: int) -> None:
        self.driven.complete(self.driven.outstanding[which % len(self.driven.outstanding)])

    @precondition(lambda self: self.driven.outstanding)
    @rule(which=numbers)
    def fail(self, which: int) -> None:
        self.driven.fail(self.driven.outstanding[which % len(self.driven.outstanding)])

    @precondition(lambda self: self.driven.returned)
    @rule(which=numbers, failed=st.booleans())
    def report_again(self, which: int, failed: bool) -> None:
        self.driven.report_again(self.driven.returned[which % len(self.driven.returned)], failed)

    @rule(which=numbers)
    def warm(self, which: int) -> None:
        if which % 4 == 0:
            layer_idx = self.pick_layer(which // 4)
            self.driven.warm([ExpertKey(layer_idx, e) for e in self.pick_ids(layer_idx, which)])

    @precondition(lambda self: not self.driven.outstanding and not self.driven.visits)
    @rule(which=numbers)
    def resize(self, which: int) -> None:
        self.driven.resize(which % len(self.driven.memory), 1 + which // 4 % 8)

    # -- many at once -------------------------------------------------------------------------------------------

    @rule(orders=st.binary(min_size=160, max_size=480))
    def busy_stretch(self, orders: bytes) -> None:
        """Run the operations above, four bytes each; what they do, if anything, depends on the state."""
        table = CALM if orders[0] % 4 == 0 else DENSE
        for (order,) in struct.iter_unpack("<I", orders[: len(orders) // 4 * 4]):
            # Drawn bytes are often alike; spread them.
            which, pick = divmod(order * 0x9E3779B1 % 2**32, len(table))
            name = table[pick]
            if name in ("hint", "begin"):
                if name == "hint" or len(self.driven.visits) < 3:
                    getattr(self, name)(which=which, ids=which >> 8)
            elif name == "forecast":
                self.forecast(which=which, kind=FORECASTS[which // 4 % len(FORECASTS)], steps_ahead=1 + which % 4)
            elif name == "issue":
                self.issue(count=1 + which % 3)
            elif name in ("complete", "fail"):
                if self.driven.outstanding:
                    getattr(self, name)(which=which)
            elif self.driven.visits:
                if name == "run_group":
                    self.run_group(which=which, limit=None if which % 2 else 1)
                else:
                    getattr(self, name)(which=which)

    # -- the end ------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "driven"):
            return
        self.driven.end_all()
        self.driven.drain()
        for pool_idx, slots in enumerate(self.driven.memory):
            self.driven.resize(pool_idx, -(-len(slots) // 2))
            self.driven.resize(pool_idx, len(slots) + 1)
        for layer_idx, num_experts in enumerate(self.config.num_experts):
            self.driven.begin(layer_idx, range(num_experts))
        self.driven.end_all()
        self.driven.drain()
        self.seen["moved"] += self.driven.num_moved
        self.seen.update(self.driven.causes)
        self.seen[self.config.eviction] += 1
        self.seen["hot"] += self.config.hot is not None
        self.seen["in id order"] += not self.config.reorder
        self.seen.update({f"failed {cause}": n for cause, n in self.driven.tally.failures.items()})
        self.seen.update(stale=self.driven.tally.stale, evictions=self.driven.tally.evictions)
        Storm.steps += self.driven.steps


@pytest.mark.parametrize("examples", [EXAMPLES, pytest.param(MANY_EXAMPLES, marks=pytest.mark.slow)])
def test_a_storm_of_operations_breaks_nothing(examples: int) -> None:
    Storm.steps = 0
    Storm.seen = Counter()
    run_state_machine_as_test(
        Storm,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS_PER_EXAMPLE,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )

    assert Storm.steps >= STEPS
    assert set(+Storm.seen) >= {"lru", "lfru", "static", "next_use", "in id order", "hot"}, Storm.seen
    assert set(+Storm.seen) >= {
        "demand",
        "prefetch",
        "begun",
        "ran",
        "wave",
        "finished",
        "failed visit",
        "evictions",
        "moved",
        "stale",
    }, Storm.seen
