"""How long a forward waits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from waiting import WAIT_S, until

from promoe.errors import (
    EngineStalledError,
)
from promoe.scheduler import ExpertKey
from promoe.stores import Chunk
from promoe.transfer.engine import Engine

from .engines import CHUNKS, Clock, Recording, running, visit


def test_no_progress_is_an_error_with_the_state() -> None:
    clock = Clock()
    make = lambda link: Recording(link, lambda key, idx: idx == 1)  # noqa: E731
    with (
        running(make, slots=3, workers=1, stall_timeout_s=0.05, clock=clock) as (engine, link),
        ThreadPoolExecutor(1) as thread,
    ):
        waiting = thread.submit(visit, engine, 2, [4])
        until(lambda: engine.waiters and (ExpertKey(2, 4), 1) in link.started)
        for seconds in (0.0, 0.06):  # first it sees what came before
            clock.advance(engine, seconds)
        with pytest.raises(EngineStalledError) as raised:
            waiting.result(WAIT_S)
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
        visit(engine, 2, [4])  # once the link goes on, everything does


def test_progress_elsewhere_is_not_a_stall() -> None:
    """The clock starts again with each chunk, whoever needs it."""

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
    """Ctrl-Z and a frozen container do not stop the machine's clock. Only time in which the forward looked counts."""
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
