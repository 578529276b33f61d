"""A served model whose link fails by a plan, and checks of what it answers and leaves behind."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from served import PROMPTS, LinkOver, copying_link, expected, greedy, plain_link, served
from transformers import PreTrainedModel
from untouched import open_files, opened_since
from waiting import WAIT_S, until

import promoe
from promoe.stores import Chunk
from promoe.transfer.links import Fault, FaultyLink
from promoe.transfer.links.faults import FaultKind, Plan
from promoe.transfer.memory import SlotPool

FAMILY = "qwen2_moe"
EXPERTS = 24  # in three layers
SLOTS = 8
STALL_S = 0.3  # how long forwards wait once a read is stuck, see `impatient`
# Where experts are, and who moves their chunks.
WAYS = ("RAM, workers", "RAM, forwards", "files, workers", "files, forwards")
WORKERS = tuple(way for way in WAYS if "workers" in way)


def only(number: int, kind: FaultKind) -> Plan:
    """Return a plan by which only this transfer has a fault."""
    return lambda n, chunk: Fault(kind) if n == number else None


def always(kind: FaultKind) -> Plan:
    """Return a plan by which every transfer has this fault."""
    return lambda number, chunk: Fault(kind)


def never(number: int, chunk: Chunk) -> None:
    """Give no transfer a fault."""


def impatient(model: PreTrainedModel, link: FaultyLink) -> None:
    """Let forwards wait for STALL_S only, once a transfer is stuck. Until then, what is slow is waited for."""
    engine, plan = model.promoe.runtime.engine, link._plan

    def watched(number: int, chunk: Chunk) -> Fault | None:
        fault = plan(number, chunk)
        if fault is not None and fault.kind == "stuck":
            engine.stall_timeout_s = STALL_S
        return fault

    link._plan = watched


@contextmanager
def faulty(way: str, plan: Plan, **arguments: Any) -> Iterator[tuple[PreTrainedModel, FaultyLink]]:
    """Serve a model over a faulty link. Check that no thread, open file or slot of it is left afterwards.

    Args:
        way: one of WAYS.
        plan: of the link's faults.
        arguments: for `served`.
    """
    store, mover = way.split(", ")
    make = plain_link if mover == "workers" else copying_link
    links: list[FaultyLink] = []

    def bind(store: Any) -> FaultyLink:
        links.append(FaultyLink(make(store), plan))
        return links[-1]

    arguments = {"cache": SLOTS, "predictor": "gate", "stall_timeout_s": WAIT_S, **arguments}
    place = "host" if store == "RAM" else "file"
    with leaving_nothing() as slots, served(FAMILY, store=place, link=LinkOver(bind), **arguments) as model:
        slots += slot_memory(model)
        try:
            yield model, links[0]
        finally:
            links[0].release.set()  # so that no thread stays in a fault
            if hasattr(model, "promoe"):
                promoe.unpatch(model)  # also a model that was closed or came from files


def slot_memory(model: PreTrainedModel) -> list[weakref.ref[Any]]:
    """Return the mappings that hold the slots."""
    pools = model.promoe.runtime.engine.pools
    assert all(isinstance(pool, SlotPool) for pool in pools)
    return [weakref.ref(pool._regions[0]._mapping) for pool in pools]


@contextmanager
def leaving_nothing() -> Iterator[list[weakref.ref[Any]]]:
    """Check that no threads and open files are left afterwards, and that nothing that was put into the list lives."""
    threads, files = set(threading.enumerate()), open_files()
    gone: list[weakref.ref[Any]] = []
    yield gone
    for handler in logging.getLogger().handlers:  # pytest keeps what was logged, with its tracebacks
        getattr(handler, "records", []).clear()

    def left() -> list[str]:
        gc.collect()  # each time: a thread that predicted during the last one held the model
        return [t.name for t in threading.enumerate() if t not in threads and t.name.startswith("promoe")]

    until(lambda: not left(), lambda: f"left: {left()}")
    assert not opened_since(files)
    gc.collect()
    assert not [found() for found in gone if found() is not None], "slots are still in memory"


def assert_right(model: PreTrainedModel, prompt: str = "one") -> None:
    """Check that the model's answers have the unmodified model's bits."""
    greedy(model, PROMPTS[prompt]).assert_equals(expected(FAMILY, torch.float32, "grouped_mm", prompt))


def assert_told(model: PreTrainedModel, error: type[BaseException], match: str, prompt: str = "one") -> None:
    """Check that a forward raises this error, and that nothing of it stays in memory."""
    with pytest.raises(error, match=match):
        greedy(model, PROMPTS[prompt])


def assert_refuses(model: PreTrainedModel, match: str) -> None:
    """Check that nothing is served any more, and that each forward raises at once."""
    for _ in range(2):
        assert_told(model, promoe.EngineError, match)
