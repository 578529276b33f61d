from __future__ import annotations

import gc
import sys
import threading
import weakref
from types import FrameType

import pytest
from tiny_models import build

import promoe
from promoe.model import forwards


class Thing:
    """Something that can be referred to weakly."""


def test_nothing_is_collected_while_stacks_are_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection may let another thread run, whose frames then end while they are walked: the process would die of it."""
    seen = []

    def look(frame: FrameType | None, modules: set[int]) -> bool:
        seen.append(gc.isenabled())
        return False

    model = build("qwen2_moe", layers=1)
    monkeypatch.setattr(forwards, "_calls_one_of", look)
    assert gc.isenabled()
    assert forwards.threads_in_forward(model, promoe.find_moe_layers(model)) == []
    assert seen
    assert not any(seen)
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    model = build("qwen2_moe", layers=1)
    gc.disable()
    try:
        forwards.threads_in_forward(model, promoe.find_moe_layers(model))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_threads_know_is_let_go_at_once() -> None:
    """Without a collection: neither the caller's model nor what is local in another thread is kept."""
    model = build("qwen2_moe", layers=1)
    kept, inside, leave = [], threading.Event(), threading.Event()

    def other() -> None:
        thing = Thing()
        kept.append(weakref.ref(thing))
        inside.set()
        leave.wait()

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    gc.collect()
    gc.disable()
    try:
        forwards.threads_in_forward(model, promoe.find_moe_layers(model))
        leave.set()
        thread.join()
        kept.append(weakref.ref(model))
        del model
        assert [one() for one in kept] == [None, None]
    finally:
        gc.enable()


def test_a_failure_leaves_the_collector_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no frames")

    model = build("qwen2_moe", layers=1)
    monkeypatch.setattr(sys, "_current_frames", fail)
    with pytest.raises(RuntimeError, match="no frames"):
        forwards.threads_in_forward(model, promoe.find_moe_layers(model))
    assert gc.isenabled()


def test_who_walks_stacks_may_be_interrupted_by_one_who_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler that closes the model comes in the midst of it."""
    model = build("qwen2_moe", layers=1)
    layers = promoe.find_moe_layers(model)
    look, found = forwards._calls_one_of, []

    def interrupted(frame: FrameType | None, modules: set[int]) -> bool:
        monkeypatch.setattr(forwards, "_calls_one_of", look)
        found.append(forwards.threads_in_forward(model, layers))
        return look(frame, modules)

    monkeypatch.setattr(forwards, "_calls_one_of", interrupted)
    walking = threading.Thread(target=forwards.threads_in_forward, args=(model, layers), daemon=True)
    walking.start()
    walking.join(30)
    assert not walking.is_alive()
    assert found == [[]]
    assert gc.isenabled()
