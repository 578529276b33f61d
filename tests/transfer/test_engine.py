"""The engine under failing, blocking and reordering links; experts are rows of numbers that say which they are."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from waiting import WAIT_S, settle, until

from promoe.errors import (
    ConfigError,
    EngineClosedError,
    EngineError,
    EngineStalledError,
    ExpertLoadError,
    PatchStateError,
)
from promoe.scheduler import ExpertKey, PoolSpec, Scheduler, SchedulerConfig
from promoe.stats.recorder import Recorder
from promoe.stores import Chunk, HostStore
from promoe.transfer.engine import Engine
from promoe.transfer.engine import waiter as waiter_module
from promoe.transfer.links import Fault, FaultyLink, HostLink, Link
from promoe.transfer.memory import SlotPool

LAYERS, EXPERTS, WIDTH = 3, 6, 4096
CHUNKS = WIDTH * 4 // 4096


def value(layer_idx: int, expert_idx: int) -> float:
    return 100.0 * layer_idx + expert_idx


def bank(layer_idx: int) -> dict[str, torch.Tensor]:
    values = torch.tensor([value(layer_idx, expert_idx) for expert_idx in range(EXPERTS)])
    return {"w": values.unsqueeze(1).expand(EXPERTS, WIDTH).contiguous()}


class Recording(Link):
    """A link that notes (expert, chunk) of each transfer as it starts; chunks may be held back until `release`."""

    copies_from_ram = False

    def __init__(self, link: Link, held: Callable[[ExpertKey, int], bool] = lambda key, chunk_idx: False) -> None:
        self.workers = link.workers
        self.started: list[tuple[ExpertKey, int]] = []
        self.open = threading.Event()
        self.running = self.most_running = 0
        self._link, self._held = link, held
        self._lock = threading.Lock()

    def transfer(self, chunk: Chunk, destination: memoryview, address: int) -> None:
        expert_idx, offset_bytes = divmod(chunk.source_offset_bytes, WIDTH * 4)
        key, chunk_idx = ExpertKey(chunk.source_idx, expert_idx), offset_bytes // 4096
        with self._lock:
            self.started.append((key, chunk_idx))
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        if self._held(key, chunk_idx):
            assert self.open.wait(WAIT_S)
        self._link.transfer(chunk, destination, address)
        with self._lock:
            self.running -= 1

    @property
    def experts(self) -> list[int]:
        """Experts in the order in which their first chunks were started."""
        return list(dict.fromkeys(key.expert_idx for key, _ in self.started))

    def describe(self) -> str:
        return "a link under test"

    def close(self) -> None:
        self.open.set()
        self._link.close()


@contextmanager
def running(
    make_link: Callable[[Link], Any] = Recording,
    *,
    slots: int = 3,
    workers: int = 1,
    stall_timeout_s: float = 30.0,
    clock: Callable[[], float] = time.perf_counter,
    make_bank: Callable[[int], dict[str, torch.Tensor]] = bank,
    num_chunks: int = CHUNKS,
    pools: Sequence[PoolSpec] = (),
    **fields: Any,
) -> Iterator[tuple[Engine, Any]]:
    """An engine over LAYERS layers of EXPERTS experts of so many chunks each, with its link."""
    store = HostStore([make_bank(layer_idx) for layer_idx in range(LAYERS)], chunk_bytes=4096)
    settings = SchedulerConfig(
        num_experts=[EXPERTS] * LAYERS,
        chunk_bytes=[store.chunk_bytes(layer_idx) for layer_idx in range(LAYERS)],
        pools=pools or [PoolSpec(slots, tuple(range(LAYERS)))],
        **({"eviction": "lru", "calibrate": False, "strict": True} | fields),
    )
    assert all(len(chunks) == num_chunks for chunks in settings.chunk_bytes)
    recorder = Recorder(settings.num_experts, settings.expert_bytes)
    link = make_link(HostLink(store, workers))
    memory = [SlotPool(store.layouts[0], spec.num_slots) for spec in settings.pools]
    engine = Engine(Scheduler(settings, recorder), store, link, memory, recorder, stall_timeout_s, clock)
    engine.start()
    try:
        yield engine, link
        with engine.lock:
            engine.scheduler.check_integrity()
            assert not any(cache.num_pinned for cache in engine.scheduler._caches)
    finally:
        if isinstance(link, Recording):
            link.open.set()
        engine.close()


def visit(engine: Engine, layer_idx: int, ids: list[int]) -> list[int]:
    """Run a visit; every weight is looked at. Returns the experts in order of execution."""
    order: list[int] = []
    with engine.visit(layer_idx, ids) as layer_visit:
        for rows in layer_visit.groups():
            for expert_idx, tensors in rows.items():
                assert (tensors["w"] == value(layer_idx, expert_idx)).all(), (layer_idx, expert_idx, tensors["w"])
                order.append(expert_idx)
    assert sorted(order) == sorted(ids)
    return order


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.looked = threading.Event()

    def __call__(self) -> float:
        self.looked.set()
        return self.now_s

    def advance(self, engine: Engine, seconds: float) -> None:
        """Let it pass, and every waiting forward see that it has."""
        self.looked.clear()
        self.now_s += seconds
        with engine.lock:
            engine.notify_waiters()
        assert self.looked.wait(WAIT_S)


def resident(engine: Engine) -> set[ExpertKey]:
    with engine.lock:
        return set(engine.scheduler.resident())


# -- what arrives, and in which order ---------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("slots", [1, 2, EXPERTS * LAYERS])
@pytest.mark.parametrize("reorder", [True, False])
def test_every_expert_arrives_whole(slots: int, workers: int, reorder: bool) -> None:
    with running(slots=slots, workers=workers, reorder=reorder) as (engine, _):
        for turn in range(3):
            for layer_idx in range(LAYERS):
                visit(engine, layer_idx, [turn, 5, 3] if turn != 3 else [0])


def test_all_rows_is_there_only_when_everything_is() -> None:
    with running() as (engine, _):
        with engine.visit(0, [1, 2]) as first:
            assert first.all_rows() is None
            assert [sorted(rows) for rows in first.groups()]
        with engine.visit(0, [1, 2]) as second:
            rows = second.all_rows()
            assert rows is not None
            assert sorted(rows) == [1, 2]


class Copying(Recording):
    """A link whose short chunks the forward copies itself; notes the threads that do."""

    copies_from_ram = True

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self.threads: list[str] = []

    def transfer(self, chunk: Chunk, destination: memoryview, address: int) -> None:
        self.threads.append(threading.current_thread().name)
        super().transfer(chunk, destination, address)


def test_a_forward_copies_short_chunks_itself() -> None:
    with running(Copying, slots=4, workers=2) as (engine, link):
        mine = threading.current_thread().name
        assert engine.hint(0, [1, 2, 5]) == 0
        assert link.started == []  # microseconds of work: the forward will be here before another thread is
        with engine.visit(0, [1, 2, 5]) as layer_visit:
            rows = layer_visit.all_rows()
            assert rows is not None
            assert {e: tensors["w"].unique().item() for e, tensors in rows.items()} == {
                e: value(0, e) for e in (1, 2, 5)
            }
        assert link.started == [(ExpertKey(0, expert_idx), idx) for expert_idx in (1, 2, 5) for idx in range(CHUNKS)]
        assert set(link.threads) == {mine}
        stats = engine.recorder.phase_stats("prefill")
        assert (stats.needed, stats.hits, stats.ready) == (3, 0, 0)
        assert stats.stall_s > 0


@pytest.mark.parametrize("reorder", [True, False])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_forward_copies_in_waves(slots: int, reorder: bool) -> None:
    with running(Copying, slots=slots, workers=2, reorder=reorder) as (engine, link):
        for turn in range(4):
            for layer_idx in range(LAYERS):
                visit(engine, layer_idx, [turn, 4, 5] if turn < 4 else [0])
        assert set(link.threads) == {threading.current_thread().name}


def test_speculation_is_left_to_the_workers() -> None:
    with running(Copying, slots=6) as (engine, link):
        assert engine.forecast(engine.scheduler.step, 1, 1, [1.0, 1.0] + [0.0] * 4)
        settle(engine)
        assert resident(engine) == {(1, 0), (1, 1)}
        assert set(link.threads) == {"promoe-link-0"}


def test_forwards_that_copy_share_one_slot() -> None:
    with running(Copying, slots=1, workers=2) as (engine, _), ThreadPoolExecutor(3) as threads:

        def work(layer_idx: int) -> None:
            for turn in range(30):
                visit(engine, layer_idx, [turn % EXPERTS, (turn + 1) % EXPERTS])

        for result in [threads.submit(work, layer_idx % LAYERS) for layer_idx in range(3)]:
            result.result(WAIT_S)


class Queueing(Copying):
    """A link that takes several chunks at once from who needs them; notes how many."""

    copies_from_ram = False
    queues = True

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self.at_once: list[int] = []

    def transfer_all(self, transfers: Sequence[tuple[Chunk, memoryview]]) -> None:
        self.at_once.append(len(transfers))
        for chunk, destination in transfers:
            self.transfer(chunk, destination, 0)


def test_a_gate_puts_the_copies_of_what_is_missing_into_the_queue() -> None:
    with running(Queueing, slots=4, workers=2) as (engine, link):
        assert engine.hint(0, [1, 2, 5]) == 0
        assert link.at_once == [3 * CHUNKS]
        assert set(link.threads) == {threading.current_thread().name}
        assert resident(engine) == {(0, 1), (0, 2), (0, 5)}
        with engine.visit(0, [1, 2, 5]) as layer_visit:
            rows = layer_visit.all_rows()
            assert rows is not None
            assert {idx: tensors["w"].unique().item() for idx, tensors in rows.items()} == {
                idx: value(0, idx) for idx in (1, 2, 5)
            }
        assert engine.hint(0, [1, 2, 4]) == 2
        assert link.at_once == [3 * CHUNKS, CHUNKS]


@pytest.mark.parametrize("reorder", [True, False])
@pytest.mark.parametrize("hints", [True, False])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_copies_are_queued_in_waves(slots: int, hints: bool, reorder: bool) -> None:
    with running(Queueing, slots=slots, workers=2, reorder=reorder, hints=hints) as (engine, link):
        for turn in range(4):
            for layer_idx in range(LAYERS):
                engine.hint(layer_idx, [turn, 4, 5])
                assert sorted(visit(engine, layer_idx, [turn, 4, 5] if turn < 4 else [0])) == sorted({turn, 4, 5})
        assert set(link.threads) == {threading.current_thread().name}


def test_forwards_that_queue_share_slots_with_each_other_and_with_speculation() -> None:
    with running(Queueing, slots=2, workers=2) as (engine, _), ThreadPoolExecutor(3) as threads:

        def work(layer_idx: int) -> None:
            for turn in range(30):
                ids = [turn % EXPERTS, (turn + 1) % EXPERTS]
                engine.forecast(engine.scheduler.step, 1, layer_idx, [0.9] * EXPERTS)
                engine.hint(layer_idx, ids)
                visit(engine, layer_idx, ids)

        for result in [threads.submit(work, layer_idx % LAYERS) for layer_idx in range(3)]:
            result.result(WAIT_S)


@pytest.mark.parametrize("hinted", [True, False])
@pytest.mark.parametrize("error", [OSError(5, "torn"), KeyboardInterrupt()])
def test_a_queue_that_fails_or_is_interrupted_leaves_nothing_behind(error: BaseException, hinted: bool) -> None:
    class Torn(Queueing):
        failures = 2

        def transfer_all(self, transfers: Sequence[tuple[Chunk, memoryview]]) -> None:
            if self.failures:
                self.failures -= 1
                raise error
            super().transfer_all(transfers)

    def needs_them() -> None:
        if hinted:
            engine.hint(0, [0, 1])
        visit(engine, 0, [0, 1])

    with running(Torn, slots=3) as (engine, link):
        if isinstance(error, KeyboardInterrupt):  # of the gate, or of the visit; the copies made again fail, too
            with pytest.raises(KeyboardInterrupt):
                needs_them()
        elif hinted:  # tried once more by the visit, which then says so
            with pytest.raises(ExpertLoadError, match="torn"):
                needs_them()
        else:
            for _ in range(2):
                with pytest.raises(ExpertLoadError, match="torn"):
                    needs_them()
        assert link.failures == 0
        with engine.lock:
            engine.scheduler.check_integrity()
        needs_them()
        assert resident(engine) == {(0, 0), (0, 1)}


def test_copies_that_are_interrupted_once_are_put_into_the_queue_again() -> None:
    class Interrupted(Queueing):
        armed = True

        def transfer_all(self, transfers: Sequence[tuple[Chunk, memoryview]]) -> None:
            super().transfer_all(transfers)
            if self.armed:
                self.armed = False
                raise KeyboardInterrupt

    with running(Interrupted, slots=3) as (engine, link):
        with pytest.raises(KeyboardInterrupt):
            engine.hint(0, [0, 1])
        assert link.at_once == [2 * CHUNKS] * 2
        assert resident(engine) == {(0, 0), (0, 1)}
        assert visit(engine, 0, [0, 1]) == [0, 1]


def see_all(engine: Engine, look_first: bool) -> None:
    with engine.visit(0, [0, 1]) as layer_visit:
        if look_first:
            assert layer_visit.all_rows() is None
        list(layer_visit.groups())


@pytest.mark.parametrize("error", [OSError(5, "torn"), KeyboardInterrupt()])
def test_a_copy_that_fails_or_is_interrupted_leaves_nothing_behind(error: BaseException) -> None:
    class Torn(Copying):
        broken = True

        def transfer(self, chunk: Chunk, destination: memoryview, address: int) -> None:
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is not threading.main_thread():
                # Ctrl-C does not come to workers, and one may be given a chunk meanwhile.
                until(lambda: not self.broken)
            if self.broken:
                raise error
            super().transfer(chunk, destination, address)

    wanted = ExpertLoadError if isinstance(error, OSError) else KeyboardInterrupt
    with running(Torn, slots=3) as (engine, link):
        for look_first in (True, False):
            with pytest.raises(wanted):
                see_all(engine, look_first)
        link.broken = False
        visit(engine, 0, [0, 1])


def test_a_copy_that_is_interrupted_once_is_made_for_whoever_else_needs_it() -> None:
    """Ctrl-C ends one forward, and no other."""

    class Interrupted(Copying):
        armed = True

        def transfer(self, chunk: Chunk, destination: memoryview, address: int) -> None:
            if self.armed and threading.current_thread() is threading.main_thread():
                self.armed = False
                waiting.append(thread.submit(visit, engine, 0, [0, 1]))
                until(lambda: engine.waiters)  # for the chunk under way: it has fetched all else
                raise KeyboardInterrupt
            super().transfer(chunk, destination, address)

    waiting: list[Any] = []
    with running(Interrupted, slots=3) as (engine, _), ThreadPoolExecutor(1) as thread:
        with pytest.raises(KeyboardInterrupt):
            visit(engine, 0, [0])
        assert waiting[0].result(WAIT_S) == [1, 0]
        assert visit(engine, 0, [0]) == [0]


def test_long_chunks_are_left_to_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("promoe.transfer.engine.monitor.SHORT_CHUNK_BYTES", 4095)
    with running(Copying, slots=4) as (engine, link):
        visit(engine, 0, [1, 2])
        assert set(link.threads) == {"promoe-link-0"}


def test_an_empty_visit_has_all_it_needs() -> None:
    with running() as (engine, link), engine.visit(0, []) as nothing:
        assert nothing.all_rows() == {}
        assert list(nothing.groups()) == []
        assert link.started == []


def test_chunks_are_fetched_in_order_of_execution() -> None:
    with running(slots=5) as (engine, link):
        visit(engine, 0, [1, 4])
        link.started.clear()
        assert visit(engine, 0, [0, 1, 3, 4]) == [1, 4, 0, 3]
        assert link.started == [(ExpertKey(0, expert_idx), idx) for expert_idx in (0, 3) for idx in range(CHUNKS)]


def test_without_reorder_experts_run_and_come_in_id_order() -> None:
    with running(slots=5, reorder=False) as (engine, link):
        visit(engine, 0, [1, 4])
        link.started.clear()
        assert visit(engine, 0, [4, 3, 1, 0]) == [0, 1, 3, 4]
        assert link.experts == [0, 3]


def test_a_hint_starts_what_is_missing_and_its_visit_finishes_it() -> None:
    with running(slots=4) as (engine, link):
        visit(engine, 0, [1])
        link.started.clear()
        assert engine.hint(0, [1, 2, 5]) == 1
        settle(engine)
        assert link.experts == [2, 5]
        assert resident(engine) >= {(0, 1), (0, 2), (0, 5)}
        with engine.visit(0, [1, 2, 5]) as layer_visit:
            assert layer_visit.all_rows() is not None
        assert len(link.started) == 2 * CHUNKS


def test_demand_waits_for_no_more_than_the_chunk_under_way() -> None:
    """Speculation is preempted between chunks: at most one of its chunks lies before the demand's first."""
    with running(lambda link: Recording(link, lambda key, idx: key == (1, 0) and idx == 1), slots=4) as (engine, link):
        visit(engine, 0, [0])
        probabilities = [1.0, 1.0] + [0.0] * 4
        assert engine.forecast(engine.scheduler.step, 1, 1, probabilities)
        until(lambda: (ExpertKey(1, 0), 1) in link.started)
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(visit, engine, 0, [3])
            until(lambda: engine.waiters)
            link.open.set()
            done.result(WAIT_S)
        held = link.started.index((ExpertKey(1, 0), 1))
        after = link.started[held + 1 :]
        assert after[:CHUNKS] == [(ExpertKey(0, 3), idx) for idx in range(CHUNKS)]
        settle(engine)
        assert {(1, 0), (1, 1)} <= resident(engine)  # and speculation was finished, not started again
        assert len(link.started) == len(set(link.started))


def test_at_once_all_that_have_slots_are_one_group() -> None:
    """Small experts: a group each would cost more than it computes."""
    with running(slots=4) as (engine, _):
        visit(engine, 0, [1])
        engine.recorder.reset()
        with engine.visit(0, [0, 1, 2]) as layer_visit:
            assert [sorted(rows) for rows in layer_visit.groups(at_once=True)] == [[0, 1, 2]]
        counts = engine.recorder.phase_stats("prefill")
        assert (counts.needed, counts.hits) == (3, 1)
        assert counts.ready >= 1  # expert 1 was not waited for, though it ran with the others
        with engine.visit(1, [0, 1, 2, 3, 4, 5]) as layer_visit:  # two waves
            groups = [len(rows) for rows in layer_visit.groups(at_once=True)]
        assert sum(groups) == EXPERTS
        assert max(groups) <= 4


def test_at_once_a_failure_is_raised_though_others_are_there() -> None:
    with running(Failing) as (engine, link):
        visit(engine, 0, [1])
        link.broken = {ExpertKey(0, 2)}
        layer_visit = engine.visit(0, [1, 2])
        with layer_visit, pytest.raises(ExpertLoadError):
            list(layer_visit.groups(at_once=True))


def test_several_forwards_wait_for_all_of_theirs_and_none_for_ever() -> None:
    with running(slots=3, workers=2) as (engine, _), ThreadPoolExecutor(3) as threads:

        def run(layer_idx: int) -> int:
            ran = 0
            for round_idx in range(20):
                ids = [(round_idx + i) % EXPERTS for i in range(3)]
                with engine.visit(layer_idx % LAYERS, ids) as layer_visit:
                    ran += sum(len(rows) for rows in layer_visit.groups(at_once=True))
            return ran

        assert [done.result(WAIT_S) for done in [threads.submit(run, i) for i in range(3)]] == [60] * 3


def test_workers_fetch_at_once() -> None:
    with running(lambda link: Recording(link, lambda key, idx: True), workers=3) as (engine, link):
        engine.hint(0, [0, 1])
        until(lambda: link.most_running == 3)
        assert link.started == [(ExpertKey(0, 0), idx) for idx in range(3)]
        link.open.set()
        visit(engine, 0, [0, 1])


def test_speculation_may_use_all_workers_and_demand_is_next() -> None:
    with running(lambda link: Recording(link, lambda key, idx: True), slots=6, workers=2) as (engine, link):
        assert engine.forecast(engine.scheduler.step, 1, 1, [1.0] * 4 + [0.0] * 2)
        until(lambda: link.most_running == 2)
        engine.hint(0, [0])
        link.open.set()
        settle(engine)
        layers = [key.layer_idx for key, _ in link.started]
        assert layers[:2] == [1, 1]
        assert 0 in layers[2:4]  # two workers note what they were given in either order
        assert link.most_running == 2


def test_a_late_forecast_is_dropped() -> None:
    with running() as (engine, link):
        visit(engine, 0, [0])
        origin_step = engine.scheduler.step
        visit(engine, 1, [0])
        link.started.clear()
        assert not engine.forecast(origin_step, 1, 1, [1.0] * EXPERTS)
        assert engine.forecast(origin_step, 2, 2, [1.0] + [0.0] * 5)
        settle(engine)
        assert link.experts == [0]
        assert (2, 0) in resident(engine)


def test_reuse_is_foreseen_until_the_layer_is_visited_again() -> None:
    with running(slots=4) as (engine, _):
        told: list[tuple[int, bool]] = []
        foresee = engine.scheduler.foresee_reuse

        def noted(layer_idx: int, log_odds: Any, begun: bool) -> None:
            told.append((layer_idx, begun))
            foresee(layer_idx, log_odds, begun)

        engine.scheduler.foresee_reuse = noted  # type: ignore[method-assign]
        origin_step = engine.scheduler.step + 1
        assert engine.foresee_reuse(origin_step, 0, [0.0] * EXPERTS)  # in the forward, before its visit
        visit(engine, 0, [0])
        assert engine.foresee_reuse(origin_step, 0, [0.0] * EXPERTS)  # in a thread beside it
        for layer_idx in range(1, LAYERS):
            visit(engine, layer_idx, [0])
            assert engine.foresee_reuse(origin_step, 0, [0.0] * EXPERTS)
        visit(engine, 0, [0])
        assert not engine.foresee_reuse(origin_step, 0, [0.0] * EXPERTS)
        assert not engine.foresee_reuse(engine.scheduler.step + 2, 0, [0.0] * EXPERTS), "of before a renewal"
        assert told == [(0, False)] + [(0, True)] * LAYERS
    assert not engine.foresee_reuse(engine.scheduler.step, 0, [0.0] * EXPERTS), "closed"


def test_hits_are_what_was_resident_in_any_order_of_execution() -> None:
    for reorder in (True, False):
        with running(slots=5, reorder=reorder) as (engine, _):
            visit(engine, 0, [3, 4, 5])
            engine.recorder.reset()
            visit(engine, 0, [0, 3, 4])
            counts = engine.recorder.phase_stats("prefill")
            assert (counts.needed, counts.hits) == (3, 2)
            assert (counts.stall_s > 0) == (counts.ready < counts.needed)


# -- several forwards at once -----------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_several_forwards_at_once(slots: int) -> None:
    with running(slots=slots, workers=2) as (engine, _), ThreadPoolExecutor(3) as threads:

        def forward(seed: int) -> None:
            for turn in range(20):
                for layer_idx in range(LAYERS):
                    first = (seed + turn + layer_idx) % EXPERTS
                    visit(engine, layer_idx, [first, (first + 2) % EXPERTS, (first + 3) % EXPERTS])

        for result in [threads.submit(forward, seed) for seed in range(3)]:
            result.result(WAIT_S)


def test_a_group_that_another_forward_runs_is_progress() -> None:
    """A long computation in one thread is not a stall of another that waits for its slots."""
    clock = Clock()
    with running(slots=1, stall_timeout_s=1.0, clock=clock) as (engine, _), ThreadPoolExecutor(1) as thread:
        with engine.visit(0, [0, 1]) as layer_visit:
            groups = layer_visit.groups()
            next(groups)
            waiting = thread.submit(visit, engine, 1, [2])
            until(lambda: engine.waiters)
            clock.advance(engine, 0.6)
            next(groups)
            clock.advance(engine, 0.6)
            assert not waiting.done()
            assert list(groups) == []
        assert waiting.result(WAIT_S) == [2]


# -- failures ---------------------------------------------------------------------------------------------------


class Failing(FaultyLink):
    """Fails every transfer of the experts in `broken`, after writing garbage; workers do all transfers."""

    def __init__(self, link: Link) -> None:
        self.broken: set[ExpertKey] = set()
        super().__init__(link, lambda number, chunk: Fault("torn") if self.key(chunk) in self.broken else None)
        self.copies_from_ram = False

    def key(self, chunk: Chunk) -> ExpertKey:
        return ExpertKey(chunk.source_idx, chunk.source_offset_bytes // (WIDTH * 4))


@pytest.mark.parametrize("hinted", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_failed_demand_names_expert_source_and_cause(workers: int, hinted: bool) -> None:
    with running(Failing, workers=workers) as (engine, link):
        link.broken = {ExpertKey(1, 4)}
        if hinted:
            engine.hint(1, [0, 4])
        with pytest.raises(
            ExpertLoadError, match=r"Expert 4 of MoE layer 1.*tensor w of MoE layer 1.*offset \d+"
        ) as raised:
            visit(engine, 1, [0, 4])
        assert isinstance(raised.value.__cause__, OSError)
        assert raised.value.__cause__.errno == errno.EIO
        assert str(raised.value.__cause__) in str(raised.value)
        # Usable: others at once, the same expert as soon as the cause is mended.
        visit(engine, 1, [0, 1])
        with pytest.raises(ExpertLoadError):
            visit(engine, 1, [4])
        link.broken.clear()
        visit(engine, 1, [0, 4])


def test_experts_that_were_ready_run_before_the_failure_is_raised() -> None:
    with running(Failing) as (engine, link):
        visit(engine, 0, [1])
        link.broken = {ExpertKey(0, 2)}
        ran: list[int] = []
        layer_visit = engine.visit(0, [1, 2])
        with layer_visit, pytest.raises(ExpertLoadError):
            ran.extend(row for rows in layer_visit.groups() for row in rows)
        assert ran == [1]
        assert engine.recorder.phase_stats("prefill").failures_demand == 1


def test_a_failed_prefetch_is_counted_logged_once_and_retried_only_on_demand(caplog: pytest.LogCaptureFixture) -> None:
    with running(Failing, workers=3) as (engine, link):
        visit(engine, 0, [0])
        link.broken = {ExpertKey(1, 2)}
        forecast = [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
        with caplog.at_level(logging.WARNING, "promoe.transfer.engine"):
            for _ in range(3):
                assert engine.forecast(engine.scheduler.step, 1, 1, forecast)
                settle(engine)
        tried = link.injected["torn"]
        assert 1 <= tried <= 3  # the chunks that were in flight together; none after the first was known to fail
        assert len(caplog.records) == 1
        assert "prefetch of ExpertKey(layer_idx=1, expert_idx=2) failed" in caplog.text
        counts = engine.recorder.phase_stats("prefill")
        assert (counts.failures_prefetch, counts.failures_demand) == (tried, 0)
        link.broken.clear()
        assert visit(engine, 1, [2]) == [2]


def test_a_failure_does_not_keep_the_others_from_running() -> None:
    with running(Failing, slots=1) as (engine, link), ThreadPoolExecutor(2) as threads:
        link.broken = {ExpertKey(0, 0)}

        def failing() -> int:
            failed = 0
            for _ in range(10):
                with pytest.raises(ExpertLoadError):
                    visit(engine, 0, [0])
                failed += 1
            return failed

        def working() -> None:
            for turn in range(20):
                visit(engine, 1, [turn % EXPERTS, (turn + 1) % EXPERTS])

        results = [threads.submit(failing), threads.submit(working)]
        assert results[0].result(WAIT_S) == 10
        results[1].result(WAIT_S)


class Fatal(Recording):
    """A link with a bug: it raises what no I/O raises."""

    def transfer(self, chunk: Chunk, destination: memoryview, address: int) -> None:
        raise SystemExit("a bug in the link")


def test_a_dead_worker_is_an_engine_error(caplog: pytest.LogCaptureFixture) -> None:
    with running(Fatal, workers=2) as (engine, _):
        for _ in range(2):
            with pytest.raises(EngineError, match=r"worker died.*a bug in the link.*unpatch") as raised:
                visit(engine, 0, [0])
            assert isinstance(raised.value.__cause__, SystemExit)
        assert "died" in caplog.text


def test_any_error_of_a_link_is_reported_to_the_forward() -> None:
    class Buggy(Recording):
        def transfer(self, chunk: Chunk, destination: memoryview, address: int) -> None:
            raise ZeroDivisionError("a bug")

    with running(Buggy) as (engine, _):
        with pytest.raises(ExpertLoadError, match="a bug") as raised:
            visit(engine, 0, [0])
        assert isinstance(raised.value.__cause__, ZeroDivisionError)


# -- warming ----------------------------------------------------------------------------------------------------

RATES = [[0.5] * EXPERTS] * LAYERS


def keys_of(layer_idx: int, *expert_ids: int) -> list[ExpertKey]:
    return [ExpertKey(layer_idx, expert_idx) for expert_idx in expert_ids]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_warming_fills_free_slots_best_first_and_waits_for_them(workers: int) -> None:
    with running(slots=4, workers=workers) as (engine, link):
        visit(engine, 0, [1])
        link.started.clear()
        assert engine.warm(keys_of(1, 5, 2, 4, 0, 3), RATES) == 3
        assert resident(engine) == {(0, 1), (1, 5), (1, 2), (1, 4)}
        assert len(link.started) == 3 * CHUNKS
        assert engine.recorder.phase_stats("prefill").evictions == 0
        assert visit(engine, 1, [2, 4, 5]) == [2, 4, 5]
        assert len(link.started) == 3 * CHUNKS
        assert engine.warm(keys_of(1, 5), RATES) == 1  # is there
        assert engine.warm([], RATES) == 0
        assert engine.waiters == []


def test_a_forward_goes_before_what_warms() -> None:
    held = lambda key, idx: key == (1, 0) and idx == 1  # noqa: E731
    with (
        running(lambda link: Recording(link, held), slots=4) as (engine, link),
        ThreadPoolExecutor(2) as threads,
    ):
        warming = threads.submit(engine.warm, keys_of(1, 0, 1), RATES)
        until(lambda: (ExpertKey(1, 0), 1) in link.started)
        forward = threads.submit(visit, engine, 0, [3])
        until(lambda: len(engine.waiters) == 2)
        link.open.set()
        forward.result(WAIT_S)
        assert warming.result(WAIT_S) == 2
        after = link.started[link.started.index((ExpertKey(1, 0), 1)) + 1 :]
        assert after[:CHUNKS] == [(ExpertKey(0, 3), idx) for idx in range(CHUNKS)]
        assert resident(engine) == {(0, 3), (1, 0), (1, 1)}


def test_warming_ends_where_others_take_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to send then, and nobody would say so but the worker that finds out."""
    monkeypatch.setattr(waiter_module, "HEARTBEAT_S", 10 * WAIT_S)
    held = lambda key, idx: key == (1, 0) and idx == 0  # noqa: E731
    with (
        running(lambda link: Recording(link, held), slots=3, stall_timeout_s=10 * WAIT_S) as (engine, link),
        ThreadPoolExecutor(1) as thread,
    ):
        warming = thread.submit(engine.warm, keys_of(1, 0, 1, 2, 3), RATES)
        until(lambda: link.started)
        engine.hint(0, [3, 4])
        link.open.set()
        assert warming.result(WAIT_S) == 1
        settle(engine)
        assert resident(engine) == {(0, 3), (0, 4), (1, 0)}


def test_what_cannot_be_fetched_is_left_to_demand_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with running(Failing, slots=4) as (engine, link):
        link.broken = {ExpertKey(1, 5)}
        with caplog.at_level(logging.WARNING):
            assert engine.warm(keys_of(1, 5, 2), RATES) == 1
        (message,) = caplog.messages
        assert message.startswith("1 experts could not be fetched to warm the cache")
        assert "expert_idx=5" in message
        assert resident(engine) == {(1, 2)}
        link.broken.clear()
        assert visit(engine, 1, [5]) == [5]


def test_closing_ends_warming() -> None:
    with (
        running(lambda link: Recording(link, lambda key, idx: True)) as (engine, link),
        ThreadPoolExecutor(2) as threads,
    ):
        warming = threads.submit(engine.warm, keys_of(0, 0, 1), RATES)
        until(lambda: link.started)
        closing = threads.submit(engine.close)
        with pytest.raises(EngineClosedError):
            warming.result(WAIT_S)
        link.open.set()
        closing.result(WAIT_S)
        with pytest.raises(EngineClosedError):
            engine.warm(keys_of(0, 0), RATES)
        assert engine.waiters == []


def test_warming_that_does_not_go_on_is_an_error() -> None:
    make = lambda link: Recording(link, lambda key, idx: idx == 1)  # noqa: E731
    with running(make, stall_timeout_s=0.05) as (engine, link):
        with pytest.raises(EngineStalledError, match=r"The cache is being warmed.*stall_timeout_s=0.05"):
            engine.warm(keys_of(0, 0, 1), RATES)
        assert not engine.scheduler._warm
        link.open.set()
        settle(engine)


# -- another number of slots ------------------------------------------------------------------------------------


def test_what_stays_is_not_fetched_again() -> None:
    with running(slots=4) as (engine, link):
        visit(engine, 0, [1, 2, 3, 4])
        link.started.clear()
        engine.resize([6])
        assert visit(engine, 0, [1, 2, 3, 4]) == [1, 2, 3, 4]
        assert link.started == []
        visit(engine, 1, [0, 5])
        assert resident(engine) == {(0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 5)}
        engine.resize([3])  # LRU: of two used at once the later one, and those of the last visit
        assert resident(engine) == {(0, 4), (1, 0), (1, 5)}
        link.started.clear()
        assert visit(engine, 1, [0, 5]) == [0, 5]
        assert visit(engine, 0, [4]) == [4]
        assert link.started == []
        engine.resize([1])
        for layer_idx in range(LAYERS):
            assert len(visit(engine, layer_idx, list(range(EXPERTS)))) == EXPERTS
        engine.resize([1])
        assert engine.pools[0].num_slots == 1


def test_what_is_in_flight_lands_first_and_nothing_is_sent_meanwhile() -> None:
    held = lambda key, idx: idx == 1  # noqa: E731
    with (
        running(lambda link: Recording(link, held), slots=4) as (engine, link),
        ThreadPoolExecutor(1) as thread,
    ):
        engine.hint(0, [2, 3])
        until(lambda: (ExpertKey(0, 2), 1) in link.started)
        resizing = thread.submit(engine.resize, [2])
        until(lambda: engine.waiters)
        with pytest.raises(PatchStateError, match="by another thread"):
            engine.resize([3])
        link.open.set()
        resizing.result(WAIT_S)
        assert engine.pools[0].num_slots == 2
        assert engine.waiters == []
        settle(engine)
        assert link.started == [(ExpertKey(0, 2), 0), (ExpertKey(0, 2), 1)]
        assert visit(engine, 0, [2, 3]) == [2, 3]


def test_in_the_midst_of_a_visit_it_is_refused_and_nothing_changes() -> None:
    with running(slots=4) as (engine, _):
        with engine.visit(0, [1, 2]) as layer_visit:
            for _ in layer_visit.groups():
                with pytest.raises(PatchStateError, match="while a forward of the model uses it"):
                    engine.resize([2])
        assert engine.pools[0].num_slots == 4
        assert visit(engine, 0, [1, 2, 3]) == [1, 2, 3]


def test_without_memory_for_more_slots_it_goes_on_as_before() -> None:
    with running(slots=4) as (engine, link):
        visit(engine, 0, [1, 2])
        with pytest.raises(ConfigError, match="Choose a smaller cache"):
            engine.resize([2**50])
        link.started.clear()
        assert visit(engine, 0, [1, 2]) == [1, 2]
        assert link.started == []


def test_of_several_pools_none_is_changed_if_one_cannot_grow() -> None:
    with running(pools=[PoolSpec(2, (0,)), PoolSpec(3, (1, 2))]) as (engine, link):
        visit(engine, 0, [1, 2])
        with pytest.raises(ConfigError, match="Choose a smaller cache"):
            engine.resize([1, 2**50])
        assert [pool.num_slots for pool in engine.pools] == [2, 3]
        link.started.clear()
        assert visit(engine, 0, [1, 2]) == [1, 2]
        assert link.started == []
        engine.resize([1, 4])
        assert [pool.num_slots for pool in engine.pools] == [1, 4]


def test_a_closed_engine_is_not_resized() -> None:
    with running() as (engine, _):
        engine.close()
        with pytest.raises(EngineClosedError):
            engine.resize([2])


# -- closing and stalling ---------------------------------------------------------------------------------------


def test_closing_wakes_a_forward_that_waits() -> None:
    with (
        running(lambda link: Recording(link, lambda key, idx: True)) as (engine, link),
        ThreadPoolExecutor(2) as threads,
    ):
        waiting = threads.submit(visit, engine, 0, [0])
        until(lambda: engine.waiters)
        closing = threads.submit(engine.close)  # its worker is in a transfer, which lands first
        with pytest.raises(EngineClosedError, match=r"closed.*unpatch"):
            waiting.result(WAIT_S)
        link.open.set()
        closing.result(WAIT_S)
        assert not any(thread.is_alive() for thread in engine._threads)


def test_a_closed_engine_refuses_visits_and_ignores_the_rest() -> None:
    with running() as (engine, link):
        visit(engine, 0, [0])
        engine.close()
        engine.close()
        assert engine.closed
        with pytest.raises(EngineClosedError):
            visit(engine, 0, [0])
        started = len(link.started)
        engine.hint(0, [1])
        assert not engine.forecast(engine.scheduler.step, 1, 1, [1.0] * EXPERTS)
        assert len(link.started) == started


def test_no_progress_is_an_error_with_the_state() -> None:
    make = lambda link: Recording(link, lambda key, idx: idx == 1)  # noqa: E731
    with running(make, slots=3, workers=1, stall_timeout_s=0.05) as (engine, link):
        with pytest.raises(EngineStalledError) as raised:
            visit(engine, 2, [4])
        message = str(raised.value)
        for part in (
            "MoE layer 2 waits",
            "stall_timeout_s=0.05",
            "layer 2, 1 chunks completed",
            "0 of 1 workers idle",
            "a link under test",
            "3 slots, 2 free, 0 resident, 1 pinned, 1 chunks in flight",
        ):
            assert part in message, (part, message)
        link.open.set()
        visit(engine, 2, [4])  # it was the link: everything goes on


def test_a_slot_holds_nan_from_its_experts_end_until_the_next_has_come() -> None:
    held = lambda key, idx: key.expert_idx == 1  # noqa: E731
    with running(lambda link: Recording(link, held), slots=1) as (engine, link), ThreadPoolExecutor(1) as thread:
        visit(engine, 0, [0])
        assert not engine.pools[0].tensors(0)["w"].isnan().any()
        waiting = thread.submit(visit, engine, 0, [1])
        until(lambda: link.experts == [0, 1])
        assert engine.pools[0].tensors(0)["w"].isnan().all()
        link.open.set()
        waiting.result(WAIT_S)


def test_progress_elsewhere_is_not_a_stall() -> None:
    """The clock starts again with each chunk, whoever's it is."""

    clock = Clock()

    class Slow(Recording):
        engine: Engine

        def transfer(self, chunk: Chunk, destination: memoryview, address: int) -> None:
            clock.advance(self.engine, 0.4)
            super().transfer(chunk, destination, address)

    with running(Slow, stall_timeout_s=0.6, clock=clock) as (engine, link):
        link.engine = engine
        visit(engine, 0, [0, 1])
    assert clock.now_s == pytest.approx(2 * CHUNKS * 0.4)


def test_a_process_that_was_stopped_did_not_wait() -> None:
    """Ctrl-Z and a frozen container stop the clock of no machine; only time in which it looked counts."""
    clock = Clock()
    make = lambda link: Recording(link, lambda key, idx: idx == 1)  # noqa: E731
    with running(make, stall_timeout_s=5.0, clock=clock) as (engine, link), ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(visit, engine, 0, [0])
        until(lambda: engine.waiters and (ExpertKey(0, 0), 1) in link.started)
        for seconds in (0.0, 1000.0, 1000.0, 0.9):  # first it sees what came before
            clock.advance(engine, seconds)
        assert engine.waiters
        clock.advance(engine, 0.9)
        with pytest.raises(EngineStalledError, match=r"no chunk completed for 5\.8 s"):
            waiting.result(WAIT_S)
        link.open.set()


def test_what_is_whole_is_not_renewed() -> None:
    with running(slots=4) as (engine, _):
        visit(engine, 0, [1, 2])
        before = engine.scheduler
        engine.renew()
        assert engine.scheduler is before
        assert visit(engine, 0, [1, 2]) == [1, 2]


def torn(engine: Engine) -> None:
    with engine.lock:
        engine.change_failed(KeyboardInterrupt())


def test_who_computes_with_slots_of_before_a_renewal_is_told() -> None:
    with running(slots=4) as (engine, _):
        visit(engine, 0, [1, 2])

        def compute() -> None:
            with engine.visit(0, [1, 2]) as layer_visit:
                assert layer_visit.all_rows() is not None
                torn(engine)
                engine.renew()

        with pytest.raises(EngineError, match="renewed meanwhile"):
            compute()
        with engine.visit(0, [1, 2]) as layer_visit:
            groups = layer_visit.groups()
            next(groups)
            torn(engine)
            engine.renew()
            with pytest.raises(EngineError, match="renewed meanwhile"):
                next(groups)
            layer_visit._visit = None  # a forward would have ended with that error
        assert visit(engine, 0, [1, 2]) == [1, 2]


def test_a_forecast_of_before_a_renewal_is_dropped() -> None:
    with running(slots=4) as (engine, _):
        for _ in range(5):
            visit(engine, 0, [1, 2])
        origin_step = engine.scheduler.step
        torn(engine)
        engine.renew()
        assert not engine.forecast(origin_step, 2, 1, [1.0] * EXPERTS)
        assert engine.forecast(engine.scheduler.step + 1, 2, 1, [1.0] * EXPERTS)


def test_without_all_of_its_workers_it_is_not_renewed(caplog: pytest.LogCaptureFixture) -> None:
    with running() as (engine, _):
        torn(engine)
        with engine.lock:
            engine._assigned.append(object())  # type: ignore[arg-type]  # of which it dies
            engine._work.notify()
        engine._threads[0].join(WAIT_S)
        engine.renew()
        for _ in range(2):
            with pytest.raises(EngineError, match="open it again"):
                visit(engine, 0, [1])
        engine.torn = False  # for the checks at the end


KNOWS_ITS_DEPTH = pytest.mark.skipif(
    not hasattr(threading.RLock(), "_recursion_count"), reason="this Python's locks do not say how often they are held"
)


def in_the_midst_of_a_hint(engine: Engine, call: Callable[[], object]) -> None:
    """Run `call` as a signal handler would run that comes then, in this thread."""
    stock = engine.scheduler.hint

    def interrupted(layer_idx: int, ids: Sequence[int]) -> int:
        hits = stock(layer_idx, ids)
        call()
        return hits

    engine.scheduler.hint = interrupted  # type: ignore[method-assign]
    try:
        engine.hint(0, [1, 2])
    finally:
        engine.scheduler.hint = stock  # type: ignore[method-assign]


@KNOWS_ITS_DEPTH
def test_a_signal_handler_is_refused_in_the_midst_of_a_change() -> None:
    """And not left waiting for itself. One that catches that has done no harm."""
    with running() as (engine, _):

        def handler() -> None:
            for call in (
                partial(visit, engine, 0, [3]),
                partial(engine.hint, 1, [3]),
                partial(engine.set_prefetch, False),
            ):
                with pytest.raises(PatchStateError, match="signal handler"):
                    call()

        in_the_midst_of_a_hint(engine, handler)
        assert not engine.torn
        assert visit(engine, 0, [1, 2]) == [1, 2]


@KNOWS_ITS_DEPTH
def test_a_handler_that_does_not_catch_it_leaves_a_state_that_is_not_trusted() -> None:
    with running() as (engine, _):
        with pytest.raises(PatchStateError, match="signal handler"):
            in_the_midst_of_a_hint(engine, partial(engine.hint, 1, [3]))
        assert engine.torn
        with pytest.raises(EngineError, match="was being changed"):
            visit(engine, 0, [1, 2])


def test_a_signal_handler_that_closes_does_not_wait_for_workers_that_wait_for_it() -> None:
    with running(stall_timeout_s=30.0) as (engine, _):
        started_s = time.monotonic()
        in_the_midst_of_a_hint(engine, engine.close)
        assert time.monotonic() - started_s < 15.0, "it waited for workers, which need the lock that its thread had"
        with pytest.raises(EngineClosedError):
            visit(engine, 0, [1])
        for thread in engine._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()


def test_closing_does_not_wait_for_ever_for_a_transfer_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    with running(lambda link: Recording(link, lambda key, idx: True), stall_timeout_s=0.05) as (engine, link):
        link.close = lambda: None  # type: ignore[method-assign]  # it would end the hanging
        with pytest.raises(EngineStalledError):
            visit(engine, 0, [0])
        engine.close()
        assert "promoe-link-0 still in a transfer after 0.1 s" in caplog.text
        link.open.set()
        engine._threads[0].join(WAIT_S)
        assert not engine._threads[0].is_alive()


def test_the_timeline_may_end_while_chunks_are_under_way() -> None:
    """A worker looks at the tracer twice; in between, it may be gone."""

    class Vanishing(Engine):
        looks = 0

        @property
        def tracer(self) -> Any:
            self.looks += 1
            return _Spans() if self.looks % 2 else None

        @tracer.setter
        def tracer(self, value: Any) -> None:
            pass

    class _Spans:
        def span(self, *args: Any, **kwargs: Any) -> None:
            pass

    with running() as (engine, _):
        engine.__class__ = Vanishing
        for layer_idx in range(LAYERS):
            visit(engine, layer_idx, [0, 1, 2, 3])
        assert engine._broken is None
        engine.__class__ = Engine


# -- experts that are begun before they are whole ---------------------------------------------------------------


class Gated(Link):
    """A link over which the chunks of last tensors wait until `release`, and some then fail."""

    copies_from_ram = False

    def __init__(self, link: Link) -> None:
        self.workers = link.workers
        self.released = threading.Semaphore(0)
        self.failing: set[int] = set()  # experts of layer 0
        self._link = link

    def transfer(self, chunk: Chunk, destination: memoryview, address: int) -> None:
        if chunk.source_idx % 2:  # each layer has two tensors
            assert self.released.acquire(timeout=WAIT_S)
            if chunk.source_offset_bytes // WIDTH in self.failing:
                raise OSError(errno.EIO, "made to fail")
        self._link.transfer(chunk, destination, address)

    def describe(self) -> str:
        return "a link under test"

    def close(self) -> None:
        for _ in range(100):
            self.released.release()
        self._link.close()


def two_tensor_bank(layer_idx: int) -> dict[str, torch.Tensor]:
    """Of one chunk each."""
    numbers = torch.arange(EXPERTS, dtype=torch.float32).unsqueeze(1).expand(EXPERTS, WIDTH // 4) + 100 * layer_idx
    return {"up_proj": numbers, "down_proj": numbers + 50}


@contextmanager
def two_tensors(workers: int = 1) -> Iterator[tuple[Engine, Any]]:
    """An engine over experts of two tensors, of which the first is enough to begin."""
    with pytest.MonkeyPatch.context() as patch:
        # A forward that nobody wakes is not to be saved by looking up every now and then.
        patch.setattr(waiter_module, "HEARTBEAT_S", 4 * WAIT_S)
        with running(
            Gated,
            slots=6,
            workers=workers,
            stall_timeout_s=WAIT_S,
            make_bank=two_tensor_bank,
            num_chunks=2,
            first_chunks=[1] * LAYERS,
        ) as engine_and_link:
            yield engine_and_link


Seen = tuple[str, dict[int, dict[str, float]]]


def seen(rows: Any) -> Seen:
    """Whether a group is of first tensors or of whole experts, and the number in each tensor."""
    numbers = {e: {name: t.unique().item() for name, t in tensors.items()} for e, tensors in rows.items()}
    return type(rows).__name__, numbers


def test_a_forward_that_would_wait_is_given_what_is_there_of_an_expert() -> None:
    with two_tensors() as (engine, link), engine.visit(0, [2, 4]) as layer_visit:
        groups = layer_visit.groups(begin=True)
        assert seen(next(groups)) == ("FirstRows", {2: {"up_proj": 2.0}})
        link.released.release()
        assert seen(next(groups)) == ("dict", {2: {"up_proj": 2.0, "down_proj": 52.0}})
        assert seen(next(groups)) == ("FirstRows", {4: {"up_proj": 4.0}})
        link.released.release()
        assert seen(next(groups)) == ("dict", {4: {"up_proj": 4.0, "down_proj": 54.0}})
        assert list(groups) == []


def test_whole_experts_go_before_what_could_be_begun() -> None:
    with two_tensors() as (engine, link):
        link.released.release()
        visit_all(engine, 0, [1])
        with engine.visit(0, [1, 2]) as layer_visit:
            groups = layer_visit.groups(begin=True)
            assert seen(next(groups))[0] == "dict"
            assert seen(next(groups)) == ("FirstRows", {2: {"up_proj": 2.0}})
            link.released.release()
            assert [seen(rows)[0] for rows in groups] == ["dict"]


def visit_all(engine: Engine, layer_idx: int, ids: list[int], at_once: bool = False, begin: bool = True) -> list[str]:
    """Run a visit; what kinds of groups it came in."""
    with engine.visit(layer_idx, ids) as layer_visit:
        return [seen(rows)[0] for rows in layer_visit.groups(at_once, begin)]


def have_first(engine: Engine, experts: list[int]) -> bool:
    """Whether the first chunks of these experts of layer 0 are there, and not the last."""
    with engine.lock:
        loads = engine.scheduler.cache_of(0).loads
        return all(expert_idx in loads and loads[expert_idx].has_first(1) for expert_idx in experts)


@pytest.mark.parametrize(("at_once", "begin"), [(True, True), (True, False), (False, False)])
def test_nothing_is_begun_where_that_is_not_wanted(at_once: bool, begin: bool) -> None:
    with two_tensors(workers=2) as (engine, link), ThreadPoolExecutor(1) as pool:
        kinds = pool.submit(visit_all, engine, 0, [2, 4], at_once, begin)
        until(lambda: have_first(engine, [2, 4]) and len(engine.waiters) == 1)
        for _ in range(2):
            link.released.release()
        assert set(kinds.result(WAIT_S)) == {"dict"}


def test_an_expert_whose_last_tensor_fails_is_not_finished() -> None:
    with two_tensors() as (engine, link), engine.visit(0, [2]) as layer_visit:
        groups = layer_visit.groups(begin=True)
        assert seen(next(groups))[0] == "FirstRows"
        link.failing.add(2)
        link.released.release()
        with pytest.raises(ExpertLoadError, match=r"Expert 2 of MoE layer 0 .*made to fail"):
            next(groups)


def test_an_expert_that_failed_is_begun_anew_by_the_next_visit() -> None:
    with two_tensors() as (engine, link):
        link.failing.add(2)
        link.released.release()
        with pytest.raises(ExpertLoadError):
            visit_all(engine, 0, [2])
        link.failing.clear()
        with engine.visit(0, [2]) as layer_visit:
            groups = layer_visit.groups(begin=True)
            assert seen(next(groups)) == ("FirstRows", {2: {"up_proj": 2.0}})
            link.released.release()
            assert seen(next(groups)) == ("dict", {2: {"up_proj": 2.0, "down_proj": 52.0}})
            assert list(groups) == []


def test_one_that_was_begun_was_not_there_in_time() -> None:
    """Also if it is whole before the forward looks again, so that nothing ever waited."""
    with two_tensors(workers=2) as (engine, link):
        engine.recorder.begin_pass("decode", 1, 1)
        engine.hint(0, [2, 4])
        until(lambda: have_first(engine, [2, 4]))
        with engine.visit(0, [2, 4]) as layer_visit:
            groups = layer_visit.groups(begin=True)
            assert seen(next(groups)) == ("FirstRows", {2: {"up_proj": 2.0}, 4: {"up_proj": 4.0}})
            for _ in range(2):
                link.released.release()
            until(lambda: len(resident(engine)) == 2)
            assert [seen(rows)[0] for rows in groups] == ["dict"]
        visit_all(engine, 0, [2])
        engine.recorder.end_pass(1.0)
        stats = engine.recorder.phase_stats("decode")
        assert (stats.needed, stats.ready) == (3, 1)


def test_a_visit_left_after_it_began_an_expert_gives_everything_back() -> None:
    with two_tensors() as (engine, link):
        with engine.visit(0, [2, 4]) as layer_visit:
            assert seen(next(layer_visit.groups(begin=True)))[0] == "FirstRows"
        for _ in range(3):
            link.released.release()
        assert visit_all(engine, 1, [5])[-1] == "dict"
