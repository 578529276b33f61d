"""Expected throughput of many prompts: the roofs of a step, what fits, and which setting is chosen."""

from __future__ import annotations

from dataclasses import replace
from itertools import starmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands.plan.planned import MIB, sizes
from promoe.commands.plan.throughput import (
    BatchMachine,
    BatchModel,
    BatchWork,
    Setting,
    Step,
    StepCost,
    Wanted,
    memory_rows,
    workspace_bytes,
)
from promoe.commands.plan.time_model import Curve

EXACT, FAST = Curve(((1, 0.001), (8, 0.001), (64, 0.008))), Curve(((1, 0.001), (8, 0.001), (64, 0.002)))
WORK = BatchWork(1000, 100.0, 50.0, 200)


def machine(bytes_per_s: float = 1e9, **fields: object) -> BatchMachine:
    """Of two layers of 8 experts, of which tokens use 2, all as often."""
    made = BatchMachine(
        others=StepCost(0.001, 0.0, 0.0001, 1e-9),
        experts={"exact": EXACT, "fast": FAST},
        expert_bytes=4 * MIB,
        bytes_per_s=bytes_per_s,
        slowdown=1.0,
        group_s=0.0,
        usage=(np.full(8, 0.25),) * 2,
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def batch_model(work: BatchWork = WORK, **fields: object) -> BatchModel:
    return BatchModel(sizes(), machine(**fields), work)  # type: ignore[arg-type]


def setting(at_once: int = 32, rate: float = 0.5, kernels: str = "exact") -> Setting:
    return Setting(at_once, 256, 16384, rate, kernels)


@given(
    fixed=st.floats(1e-4, 1e-2),
    sequence=st.floats(1e-5, 1e-3),
    token=st.floats(1e-5, 1e-3),
    pair=st.floats(1e-9, 1e-7),
    noise=st.floats(0.99, 1.01),
)
def test_a_cost_is_found_from_steps(fixed: float, sequence: float, token: float, pair: float, noise: float) -> None:
    known = StepCost(fixed, sequence, token, pair)
    sizes = ((2, 2, 64), (8, 512, 512), (24, 24, 1536), (2, 128, 0), (4, 256, 900), (4, 4, 1500))
    steps = [(step, known(step)) for step in starmap(Step, sizes)]
    found = StepCost.fitted(steps)
    for step in (Step(1, 1, 0), Step(64, 64, 6400), Step(8, 512, 3000)):
        assert found(step) == pytest.approx(known(step), rel=1e-3)
    found = StepCost.fitted([(step, seconds * (noise if idx else 1)) for idx, (step, seconds) in enumerate(steps)])
    assert min(found.fixed_s, found.sequence_s, found.token_s, found.pair_s) >= 0


def test_a_step_is_the_sum_of_its_parts_where_nothing_is_fetched() -> None:
    model = batch_model()
    found = model.step(Step(64, 64, 1000), setting(rate=1.0))
    used = 8 * (1 - 0.75**64)
    assert found.link_s == 0
    assert found.others_s == pytest.approx(0.001 + 64 * (0.0001 + 1e-6))
    assert found.products_s == pytest.approx(2 * used * EXACT(64 * 2 / used))
    assert found.memory_s == 0
    assert found.total_s == pytest.approx(found.compute_s)
    alone = model.step(Step(1, 1, 0), setting(rate=1.0))
    assert (alone.products_s, alone.memory_s) == (0, pytest.approx(2 * 2 * 0.001))


def test_what_has_no_slot_comes_over_the_link() -> None:
    model = batch_model()
    found = model.step(Step(64, 64, 0), setting(rate=0.25))
    assert found.link_s == pytest.approx(2 * (8 * (1 - 0.75**64) - 2 * (1 - 0.75**64)) * 4 * MIB / 1e9)
    assert found.total_s == pytest.approx(max(found.link_s, found.compute_s)), "it overlaps"
    slowed = batch_model(slowdown=2.0).step(Step(64, 64, 0), setting(rate=0.25))
    assert slowed.total_s == pytest.approx(found.link_s + max(0, found.compute_s - found.link_s / 2))


def test_with_few_slots_experts_run_by_themselves() -> None:
    model = batch_model(group_s=0.01)
    active = 8 * (1 - 0.75**64)
    for rate, share in ((1.0, 0.0), (0.5, 1 - 8 / (2 * active)), (0.125, 1 - 2 / (2 * active))):
        found = model.step(Step(64, 64, 0), setting(rate=rate))
        assert found.groups_s == pytest.approx(2 * active * share * 0.01)
        assert found.total_s == pytest.approx(max(found.link_s, found.compute_s))


def test_experts_that_are_used_most_have_the_slots() -> None:
    usage = np.array([0.9, 0.9, 0.05, 0.05, 0.025, 0.025, 0.025, 0.025])
    skewed, even = batch_model(usage=(usage,) * 2), batch_model()
    assert (
        skewed.step(Step(1, 1, 0), setting(rate=0.25)).link_s < even.step(Step(1, 1, 0), setting(rate=0.25)).link_s / 2
    )


def test_the_limit_is_named() -> None:
    assert batch_model(bytes_per_s=1e6).expected(setting()).limit == "the link"
    assert batch_model().expected(setting(rate=1.0)).limit == "products"
    assert batch_model().expected(setting(1, rate=1.0)).limit == "memory"
    slow = StepCost(1.0, 0.0, 0.0, 0.0)
    assert batch_model(others=slow).expected(setting()).limit == "attention and the rest"
    assert batch_model(group_s=1.0).expected(setting(rate=0.125)).limit == "few slots"


def test_expected_throughput_counts_prompts_and_answers() -> None:
    model = batch_model(BatchWork(64, 128.0, 11.0, 139))
    found = model.expected(setting(32, 1.0))
    reading = model.step(Step(2, 256, 32 * 64), setting(32, 1.0))
    writing = model.step(Step(32, 32, 32 * 133.5), setting(32, 1.0))
    assert found.spent.total_s == pytest.approx(2 * (16 * reading.total_s + 10 * writing.total_s))
    assert found.tokens_per_s == pytest.approx(64 * 11 / found.spent.total_s)


def test_a_small_kv_cache_computes_fewer_sequences_together() -> None:
    model = batch_model(BatchWork(640, 50.0, 14.0, 64))
    few = replace(setting(32, 1.0), kv_tokens=8 * (64 + 16) + 16)  # half a page of each is empty
    assert model.expected(few).spent == model.expected(setting(8, 1.0)).spent


@given(
    bytes_per_s=st.floats(1e6, 1e11),
    rate=st.sampled_from([0.125, 0.25, 0.5, 0.75, 1.0]),
    kernels=st.sampled_from(["exact", "fast"]),
)
def test_from_where_on_loading_is_hidden(bytes_per_s: float, rate: float, kernels: str) -> None:
    """The turning point of the link's roof, beside a search among all numbers."""
    model = batch_model(bytes_per_s=bytes_per_s)
    found = model.hidden_from(setting(rate=rate, kernels=kernels))

    def hidden(number: int) -> bool:
        step = model.step(Step(number, number, number * 125.0), setting(rate=rate, kernels=kernels))
        return step.link_s <= step.products_s + step.memory_s + step.others_s

    numbers = [number for number in range(1, 4097) if hidden(number)] if found is None else range(1, found + 1)
    assert [number for number in numbers if hidden(number)] == ([] if found is None else [found])


@given(first=st.floats(1e-5, 1e-2), slope=st.floats(1e-7, 1e-3))
def test_where_the_roofs_of_memory_and_products_meet(first: float, slope: float) -> None:
    rows = [1, 4, 16, 64, 256, 1024, 4096]
    curve = Curve(tuple((float(one), max(first, slope * one)) for one in rows))
    expected = max(1.0, first / slope)
    if expected > 1024:  # then what was measured shows no more than the beginning of it
        assert memory_rows(curve) > 1024
    else:
        assert memory_rows(curve) == pytest.approx(expected)


@given(
    memory_mib=st.integers(1, 400),
    answers=st.integers(1, 2000),
    bytes_per_s=st.floats(1e7, 1e10),
    kernels=st.sampled_from([("exact",), ("exact", "fast")]),
)
def test_the_best_is_the_best_of_all_that_fit(
    memory_mib: int, answers: int, bytes_per_s: float, kernels: tuple[str, ...]
) -> None:
    model = batch_model(BatchWork(answers, 100.0, 50.0, 200), bytes_per_s=bytes_per_s)
    memory_bytes, wanted = memory_mib * MIB, Wanted(kernels=kernels)
    fitting = list(model.settings(memory_bytes, wanted))
    for one in fitting:
        taken = sizes().slots(one.rate).nbytes + model.kv_bytes(one.kv_tokens) + sizes().other_bytes
        assert taken + workspace_bytes(one.step_tokens, one.kv_tokens) <= memory_bytes
        assert one.kv_tokens >= max(200, one.at_once * 150)
        assert one.at_once <= min(answers, 512, one.step_tokens)
    best = model.best(memory_bytes, wanted)
    if not fitting:
        assert best is None
        return
    assert best is not None
    assert best.tokens_per_s >= max(model.expected(one).tokens_per_s for one in fitting) / 1.01**20
    assert best.setting in fitting


def test_what_is_wanted_is_kept() -> None:
    model = batch_model()
    wanted = Wanted(at_once=7, step_tokens=33, kv_tokens=999, rate=0.375, kernels=("fast",))
    assert list(model.settings(1000 * MIB, wanted)) == [Setting(7, 33, 999, 0.375, "fast")]
    assert list(model.settings(100 * MIB, wanted)) == [], "slots of three eighths do not fit"
    assert next(model.settings(None, Wanted())).rate == 1.0


def test_more_memory_and_faster_products_are_never_slower() -> None:
    model = batch_model()
    speeds = [found.tokens_per_s for mib in (180, 200, 230) if (found := model.best(mib * MIB, Wanted())) is not None]
    assert len(speeds) == 3
    assert speeds == sorted(speeds)
    exact, fast = (model.best(230 * MIB, Wanted(kernels=(kernels,))) for kernels in ("exact", "fast"))
    assert exact is not None
    assert fast is not None
    assert fast.tokens_per_s > 2 * exact.tokens_per_s
