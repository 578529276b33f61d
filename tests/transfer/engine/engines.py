"""Engines for tests. Each expert's numbers say which expert it is, and links note what they move, fail, or wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from waiting import WAIT_S, until

from promoe.scheduler import ExpertKey, PoolSpec, Scheduler, SchedulerConfig
from promoe.stats.recorder import Recorder
from promoe.stores import Chunk, HostStore
from promoe.transfer.engine import Engine
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
    stall_timeout_s: float = WAIT_S,
    clock: Callable[[], float] = time.perf_counter,
    make_bank: Callable[[int], dict[str, torch.Tensor]] = bank,
    num_chunks: int = CHUNKS,
    pools: Sequence[PoolSpec] = (),
    **fields: Any,
) -> Iterator[tuple[Engine, Any]]:
    """Run an engine over LAYERS layers of EXPERTS experts of so many chunks each. Yield it with its link."""
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
            assert not any(cache.num_pinned for cache in engine.scheduler.caches)
    finally:
        if isinstance(link, Recording):
            link.open.set()
        engine.close()


def visit(engine: Engine, layer_idx: int, ids: list[int]) -> list[int]:
    """Run a visit and check every weight. Return the experts in order of execution."""
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
        self._turns = self._seen = 0

    def __call__(self) -> float:
        turns, now_s = self._turns, self.now_s  # in this order: whoever sees a turn sees its time
        self._seen = turns
        return now_s

    def advance(self, engine: Engine, seconds: float) -> None:
        """Let time pass, and every waiting forward see it."""
        self.now_s += seconds
        self._turns += 1
        with engine.lock:
            engine.notify_waiters()
        until(lambda: self._seen == self._turns)


def resident(engine: Engine) -> set[ExpertKey]:
    with engine.lock:
        return set(engine.scheduler.resident())


class Failing(FaultyLink):
    """Fails every transfer of the experts in `broken`, after writing garbage; workers do all transfers."""

    def __init__(self, link: Link) -> None:
        self.broken: set[ExpertKey] = set()
        super().__init__(link, lambda number, chunk: Fault("torn") if self.key(chunk) in self.broken else None)
        self.copies_from_ram = False

    def key(self, chunk: Chunk) -> ExpertKey:
        return ExpertKey(chunk.source_idx, chunk.source_offset_bytes // (WIDTH * 4))


def in_the_midst_of_a_hint(engine: Engine, call: Callable[[], object]) -> None:
    """Run `call` during a hint and in its thread, as a signal handler would."""
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
