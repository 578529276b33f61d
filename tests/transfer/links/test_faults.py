from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import pytest
import torch
from waiting import WAIT_S

from promoe.errors import ConfigError
from promoe.scheduler import ExpertKey
from promoe.stores import Chunk
from promoe.stores.host import HostStore
from promoe.transfer.links import Fault, FaultyLink, HostLink, Link
from promoe.transfer.links.faults import FaultKind, Plan, seeded
from promoe.transfer.memory import SlotPool

RAISED: dict[FaultKind, tuple[type[BaseException], str]] = {
    "failed": (OSError, "Input/output error .*32 bytes at offset 32"),
    "short": (OSError, "ends early .*32 bytes at offset 32, found 16"),
    "torn": (OSError, "Input/output error .*found 16"),
    "gone": (OSError, "No such device"),
    "no_memory": (MemoryError, "injected"),
    "bug": (RuntimeError, "injected"),
    "exit": (SystemExit, "injected"),
}


@pytest.fixture
def store() -> HostStore:
    return HostStore([{"up": torch.randn(4, 8)}])


@pytest.fixture
def pool(store: HostStore) -> SlotPool:
    pool = SlotPool(store.layouts[0], 4)
    pool.poison()
    return pool


def only(number: int, kind: FaultKind) -> Plan:
    return lambda n, chunk: Fault(kind) if n == number else None


def move(link: FaultyLink, store: HostStore, pool: SlotPool, expert_idx: int) -> torch.Tensor:
    """Fetch an expert into its slot. Return what is there."""
    link.transfer(store.chunks(ExpertKey(0, expert_idx))[0], pool.slot(expert_idx), pool.address(expert_idx))
    return pool.tensors(expert_idx)["up"]


def source(store: HostStore, expert_idx: int) -> torch.Tensor:
    return store._tensors[0][expert_idx]


def test_every_kind_is_tested() -> None:
    assert {*RAISED, "slow", "stuck", "wrong"} == set(get_args(FaultKind))


@pytest.mark.parametrize("kind", RAISED)
def test_a_transfer_that_raises_and_the_ones_after_it(kind: FaultKind, store: HostStore, pool: SlotPool) -> None:
    link = FaultyLink(HostLink(store), only(1, kind))
    error, match = RAISED[kind]
    assert torch.equal(move(link, store, pool, 0), source(store, 0))
    with pytest.raises(error, match=match):
        move(link, store, pool, 1)
    assert pool.tensors(1)["up"].isnan().all(), "none of the right bytes, and garbage where there was something else"
    if kind == "gone":
        with pytest.raises(OSError, match="No such device"):
            move(link, store, pool, 2)
        link.mend()
    assert torch.equal(move(link, store, pool, 2), source(store, 2))
    assert link.injected == {kind: 2 if kind == "gone" else 1}


@pytest.mark.parametrize("kind", ["short", "torn"])
def test_garbage_is_written_before_the_error(kind: FaultKind, store: HostStore, pool: SlotPool) -> None:
    pool.tensors(0)["up"].zero_()
    with pytest.raises(OSError, match="injected"):
        move(FaultyLink(HostLink(store), only(0, kind)), store, pool, 0)
    assert pool.tensors(0)["up"].isnan().tolist() == [True] * 4 + [False] * 4


def test_wrong_bytes_come_without_a_word(store: HostStore, pool: SlotPool) -> None:
    link = FaultyLink(HostLink(store), only(1, "wrong"))
    move(link, store, pool, 0)
    found, wanted = move(link, store, pool, 1).view(torch.uint8), source(store, 1).view(torch.uint8)
    assert (found != wanted).sum() == 1


def test_a_stuck_transfer_goes_on_when_it_is_released(store: HostStore, pool: SlotPool) -> None:
    link = FaultyLink(HostLink(store), only(0, "stuck"))
    with ThreadPoolExecutor(1) as thread:
        moved = thread.submit(move, link, store, pool, 0)
        assert link.stuck.wait(WAIT_S)
        assert not moved.done()
        assert torch.equal(move(link, store, pool, 1), source(store, 1))
        link.release.set()
        assert torch.equal(moved.result(WAIT_S), source(store, 0))


def test_delays_lie_around_the_transfer_and_depend_on_the_seed(store: HostStore, pool: SlotPool) -> None:
    drawn: list[list[float]] = []
    for _ in range(2):
        sleeps_s: list[float] = []
        link = FaultyLink(HostLink(store, workers=3), seeded(3, {"slow": 1.0}, 0.25), sleeps_s.append)
        assert isinstance(link, Link)
        assert link.workers == 3
        for expert_idx in range(4):
            assert torch.equal(move(link, store, pool, expert_idx), source(store, expert_idx))
        drawn.append(sleeps_s)
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 4  # the same before and after a transfer, another for the next
    assert all(0 <= sleep_s <= 0.125 for sleep_s in drawn[0])


def test_a_seeded_plan_is_a_function_of_seed_and_number(store: HostStore) -> None:
    chunk: Chunk = store.chunks(ExpertKey(0, 0))[0]

    def kinds(seed: int) -> list[FaultKind | None]:
        plan = seeded(seed, {"failed": 0.2, "wrong": 0.1})
        return [fault.kind if (fault := plan(number, chunk)) else None for number in range(1000)]

    assert kinds(1) == kinds(1) != kinds(2)
    counts = Counter(kinds(1))
    assert 150 < counts["failed"] < 250
    assert 60 < counts["wrong"] < 140


def test_closed(store: HostStore, pool: SlotPool) -> None:
    link = FaultyLink(HostLink(store), only(9, "failed"))
    assert link.describe() == "host memory, with injected faults"
    assert link.copies_from_ram
    link.close()
    with pytest.raises(OSError, match="closed"):
        move(link, store, pool, 0)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Fault("fire"), r"'kind' of a fault must be one of .*Got 'fire'"),  # type: ignore[arg-type]
        (lambda: seeded(0, {"fire": 0.1}), "Got 'fire'"),  # type: ignore[dict-item]
        (lambda: seeded(0, {"failed": -0.1}), "'shares' of faults"),
        (lambda: seeded(0, {"failed": 0.7, "torn": 0.7}), "'shares' of faults"),
    ],
)
def test_mistakes(make: Callable[[], object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()


def test_the_plan_is_asked_one_transfer_at_a_time(store: HostStore, pool: SlotPool) -> None:
    inside, numbers = threading.Lock(), []

    def plan(number: int, chunk: Chunk) -> None:
        assert inside.acquire(blocking=False)
        numbers.append(number)
        inside.release()

    link = FaultyLink(HostLink(store), plan)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda expert_idx: move(link, store, pool, expert_idx), [0, 1, 2, 3] * 50))
    assert numbers == list(range(200))
