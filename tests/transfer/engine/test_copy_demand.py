"""Forwards that copy or queue what they need themselves."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from waiting import WAIT_S, settle, until

from promoe.errors import (
    ExpertLoadError,
)
from promoe.scheduler import ExpertKey
from promoe.stores import Chunk
from promoe.transfer.engine import Engine
from promoe.transfer.links import Link

from .engines import CHUNKS, EXPERTS, LAYERS, Recording, resident, running, value, visit


class Copying(Recording):
    """A link whose short chunks the forward copies itself. It notes the threads that do."""

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
    """A link that takes several chunks at once from the forward that needs them. It notes how many."""

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
        if isinstance(error, KeyboardInterrupt):  # from the gate or the visit; the copies made again fail, too
            with pytest.raises(KeyboardInterrupt):
                needs_them()
        elif hinted:  # the visit tries once more and then raises
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
                until(lambda: engine.waiters)  # for the chunk in flight, after it has fetched all else
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
