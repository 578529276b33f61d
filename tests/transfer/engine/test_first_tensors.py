"""Experts that are begun before they are whole."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from waiting import WAIT_S, until

from promoe.errors import (
    ExpertLoadError,
)
from promoe.stores import Chunk
from promoe.transfer.engine import Engine
from promoe.transfer.engine import waiter as waiter_module
from promoe.transfer.links import Link

from .engines import EXPERTS, LAYERS, WIDTH, resident, running


class Gated(Link):
    """A link that holds back the chunks of last tensors until `release`. Some then fail."""

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
    """Make two tensors of one chunk each."""
    numbers = torch.arange(EXPERTS, dtype=torch.float32).unsqueeze(1).expand(EXPERTS, WIDTH // 4) + 100 * layer_idx
    return {"up_proj": numbers, "down_proj": numbers + 50}


@contextmanager
def two_tensors(workers: int = 1) -> Iterator[tuple[Engine, Any]]:
    """Run an engine over experts of two tensors, of which the first is enough to begin."""
    with pytest.MonkeyPatch.context() as patch:
        # A forward that nobody wakes must not be saved by its heartbeat.
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
    """Return whether a group is of first tensors or of whole experts, and the number in each tensor."""
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
    """Run a visit and return the kinds of its groups."""
    with engine.visit(layer_idx, ids) as layer_visit:
        return [seen(rows)[0] for rows in layer_visit.groups(at_once, begin)]


def have_first(engine: Engine, experts: list[int]) -> bool:
    """Return whether the first chunks of these experts of layer 0 are there, and not the last."""
    with engine.lock:
        loads = engine.scheduler.caches[0].loads
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
    """This holds also if the expert is whole before the forward looks again, so that it never waited."""
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
