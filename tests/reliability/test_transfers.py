"""Transfers that fail: the forward that needed the bytes raises, and the next one is right."""

from __future__ import annotations

import itertools
import threading

import pytest
from served import PROMPTS, greedy
from waiting import WAIT_S

import promoe
from promoe.errors import EngineStalledError, ExpertLoadError
from promoe.transfer.links import Fault
from promoe.transfer.links.faults import FaultKind, seeded
from promoe.transfer.memory import POISON_BYTE

from .support import (
    STALL_S,
    WAYS,
    WORKERS,
    always,
    assert_refuses,
    assert_right,
    assert_told,
    faulty,
    impatient,
    never,
    only,
)

LOAD = r"Expert \d of MoE layer \d could not be fetched \(.*offset \d+\): .*"


def assert_forgotten(way: str, kind: FaultKind, match: str) -> None:
    """Let one transfer fail, and check that its forward raises `match` and the next ones answer right.

    Of what a visit has asked for: what fails between a gate and its experts' forward (hinted or streamed) is fetched
    once more, and nobody told.
    """
    with faulty(way, only(5, kind), predictor=None, early_preemption=False, stream=False) as (model, link):
        assert_told(model, ExpertLoadError, LOAD + match + ".*start the generation again")
        assert link.injected == {kind: 1}
        assert_right(model)
        assert_right(model, "padded")


@pytest.mark.parametrize("way", WAYS)
def test_failed_read(way: str) -> None:
    assert_forgotten(way, "failed", "Input/output error")


@pytest.mark.parametrize("way", WAYS)
def test_short_read(way: str) -> None:
    assert_forgotten(way, "short", "File ends early")


@pytest.mark.parametrize("way", WAYS)
def test_torn_read(way: str) -> None:
    assert_forgotten(way, "torn", "Input/output error")


@pytest.mark.parametrize("way", WAYS)
def test_no_memory_for_a_read(way: str) -> None:
    assert_forgotten(way, "no_memory", "injected")


@pytest.mark.parametrize("way", WAYS)
def test_bug_in_a_link(way: str) -> None:
    assert_forgotten(way, "bug", "injected")


@pytest.mark.parametrize("way", WAYS)
def test_slow_reads(way: str) -> None:
    with faulty(way, seeded(0, {"slow": 0.5}, 2e-3)) as (model, link):
        assert_right(model)
        assert link.injected["slow"] > 10


@pytest.mark.parametrize("way", WAYS)
def test_vanished_disk(way: str) -> None:
    with faulty(way, only(5, "gone"), predictor=None) as (model, link):
        for _ in range(3):
            assert_told(model, ExpertLoadError, LOAD + "No such device")
        link.mend()
        assert_right(model)


@pytest.mark.parametrize("way", WAYS)
def test_vanished_disk_and_close(way: str) -> None:
    """Closing does not wait for the disk."""
    with faulty(way, always("gone")) as (model, _):
        assert_told(model, ExpertLoadError, "No such device")
        model.promoe.close()
        assert_refuses(model, "after its engine was closed")


@pytest.mark.parametrize("way", WORKERS)
def test_stuck_read(way: str) -> None:
    with faulty(way, only(5, "stuck"), predictor=None) as (model, link):
        impatient(model, link)
        state = r"no chunk completed for \d+\.\d s \(stall_timeout_s=0\.3\)\. State: step .*Check the disk"
        for _ in range(2):  # the second waits for the same read
            assert_told(model, EngineStalledError, state)
        link.release.set()
        model.promoe.runtime.engine.stall_timeout_s = WAIT_S
        assert_right(model)


@pytest.mark.parametrize("way", WORKERS)
def test_stuck_read_and_close(way: str, caplog: pytest.LogCaptureFixture) -> None:
    with faulty(way, only(5, "stuck"), predictor=None) as (model, link):
        impatient(model, link)
        assert_told(model, EngineStalledError, "no chunk completed")
        model.promoe.close()
        assert f"still in a transfer after {STALL_S} s; left behind" in caplog.text
        assert_refuses(model, "after its engine was closed")


@pytest.mark.parametrize("way", WORKERS)
def test_dead_worker(way: str, caplog: pytest.LogCaptureFixture) -> None:
    with faulty(way, only(5, "exit"), predictor=None) as (model, _):
        assert_refuses(model, r"A link worker died: SystemExit\(.*call promoe\.unpatch")
        promoe.unpatch(model)
        model.set_experts_implementation("grouped_mm")
        assert_right(model)
    assert "died" in caplog.text


@pytest.mark.parametrize("kind", ["failed", "short", "torn", "no_memory", "bug"])
@pytest.mark.parametrize("way", WAYS)
def test_failed_prefetch(way: str, kind: FaultKind) -> None:
    """Nobody needed it yet, so it is fetched on demand, and no forward fails."""
    prefetching = threading.local()

    with faulty(way, never, min_probability=0.01) as (model, link):
        engine = model.promoe.runtime.engine
        plain = engine._transfer

        def transfer(lease: object, worker_idx: int) -> object:
            prefetching.now = lease.cause == "prefetch"  # type: ignore[attr-defined]
            return plain(lease, worker_idx)

        engine._transfer = transfer
        fault = always(kind)
        link._plan = lambda number, chunk: fault(number, chunk) if prefetching.now else None
        for _ in range(3):
            try:
                greedy(model, PROMPTS["short"])
            except ExpertLoadError:  # a forward came to need it while it was on its way
                continue
        link.mend()
        assert_right(model)
        stats = model.promoe.stats()
        assert link.injected[kind] == stats.total.failures_prefetch + stats.total.failures_demand > 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("way", WAYS)
def test_faults_of_all_kinds(way: str, seed: int) -> None:
    """Each answer is right or an error, and the last one is right.

    How many transfers a prompt takes is up to the threads, and so is which of them fail and whether anyone waits for
    those: prompts are asked over a good link and a bad one in turn until enough of both have been seen.
    """
    kinds: tuple[FaultKind, ...] = ("failed", "short", "torn", "bug", "no_memory", "slow")
    good, bad = (seeded(seed, dict.fromkeys(kinds, share)) for share in (2e-4, 2e-2))
    with faulty(way, good) as (model, link):
        answered = told = 0
        prompts = itertools.cycle(("one", "short", "padded"))
        for plan, prompt in itertools.islice(zip(itertools.cycle((good, bad)), prompts, strict=False), 100):
            link._plan = plan
            try:
                assert_right(model, prompt)
                answered += 1
            except ExpertLoadError:
                told += 1
            if answered >= 4 and told >= 4 and len(link.injected) >= 3:
                break
        else:
            pytest.fail(f"after 100 prompts: {answered} answered, {told} told, {dict(link.injected)}")
        link.mend()
        assert_right(model)


def test_garbage_of_a_failed_read_is_never_used() -> None:
    """Every slot holds NaN except for experts that arrived whole. An answer without NaN has read only those."""
    with faulty("RAM, workers", lambda number, chunk: Fault("torn") if number % 7 == 3 else None) as (model, link):
        pool = model.promoe.runtime.engine.pools[0]
        told = 0
        for _ in range(10):  # which chunks fall to a prefetch, whose failure is not told, differs from run to run
            try:
                assert_right(model, "one")
            except ExpertLoadError:
                told += 1
        assert told
        assert any(POISON_BYTE in pool.slot(idx) for idx in range(pool.num_slots))
        link.mend()
        assert_right(model)


def test_errors_in_one_thread_leave_the_others_alone() -> None:
    """Two threads run forwards. Those that need a failed expert raise, and the others are right."""
    with faulty("RAM, workers", seeded(1, {"torn": 0.01}), predictor=None) as (model, link):
        outcomes: list[str] = []

        def work() -> None:
            for _ in range(6):
                try:
                    assert_right(model, "short")
                    outcomes.append("right")
                except ExpertLoadError:
                    outcomes.append("told")

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert len(outcomes) == 12, outcomes
        assert "right" in outcomes
        link.mend()
        assert_right(model)
