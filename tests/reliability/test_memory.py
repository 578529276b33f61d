"""Too little memory, and memory that must not grow."""

from __future__ import annotations

import errno
import gc
import logging
import threading
import weakref
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

import pytest
from served import PROMPTS, LinkOver, checkpoint, close, config, copying_link, greedy, plain_link, resident, slots_of
from transformers import PreTrainedModel
from untouched import leaving_untouched
from waiting import WAIT_S

import promoe
from promoe.errors import ConfigError, ExpertLoadError
from promoe.predictors import Forecast, LayerVisit
from promoe.stats.over_time import Stretch
from promoe.transfer import memory
from promoe.transfer.links import Fault

from .support import FAMILY, WAYS, assert_right, faulty, leaving_nothing, never

ROUNDS = 40


def without_memory(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Refuse mappings of at least `nbytes`, as the kernel does."""
    plain = memory._map_private

    def refusing(asked_bytes: int) -> Any:
        if asked_bytes >= nbytes:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return plain(asked_bytes)

    monkeypatch.setattr(memory, "_map_private", refusing)


@pytest.mark.parametrize("make", [plain_link, copying_link])
def test_no_memory_for_slots_while_patching(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    model = resident(FAMILY)
    cache = slots_of(model, 8)
    model.set_experts_implementation("grouped_mm")
    with leaving_nothing(), leaving_untouched(model):
        with monkeypatch.context() as patching:
            without_memory(patching, 8 * 24576)
            with pytest.raises(ConfigError, match=r"No memory for a cache of 8 slots of 24\.0 KiB, .*smaller cache"):
                promoe.patch(model, cache=cache, link=LinkOver(make), config=config())
        assert_right(model)


def test_no_memory_for_slots_while_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    with leaving_nothing(), monkeypatch.context() as patching:
        without_memory(patching, 8 * 24576)
        with pytest.raises(ConfigError, match="No memory for a cache of 8 slots"):
            promoe.from_pretrained(checkpoint(FAMILY), cache=8 * 24576, config=config())
    with leaving_nothing():
        model = promoe.from_pretrained(checkpoint(FAMILY), cache=8 * 24576, config=config())
        assert_right(model)
        close(model)


def alive() -> int:
    """Count objects of this library's classes, errors and what these keep, without stretches, whose number is limited."""
    gc.collect()
    kinds = (BaseException, TracebackType, FrameType)
    return sum(
        (str(type(one).__module__).startswith("promoe") and type(one) is not Stretch) or issubclass(type(one), kinds)
        for one in gc.get_objects()
    )


@pytest.mark.parametrize("way", WAYS)
def test_memory_does_not_grow(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """If each forward kept one object, there would be as many more as forwards."""
    caplog.set_level(logging.CRITICAL, "promoe")  # pytest keeps what is logged
    with faulty(way, never, verify="always") as (model, link):
        counts = []
        for _ in range(2):
            link._plan = lambda number, chunk: Fault("torn") if number % 40 == 7 else None
            for _ in range(ROUNDS):
                with suppress(ExpertLoadError):
                    greedy(model, PROMPTS["short"], new_tokens=1)
            link._plan = never
            for prompt in PROMPTS:
                assert_right(model, prompt)
            counts.append(alive())
        assert link.injected["torn"] > ROUNDS / 4
        assert counts[1] - counts[0] < ROUNDS / 2, counts


def test_opening_again_and_again() -> None:
    """No thread, file or slot of a model stays when it is closed, or dropped without closing."""
    for closed in (True, False) * 3:
        with leaving_nothing():
            model = promoe.from_pretrained(checkpoint(FAMILY), cache="25%", predictor="gate", config=config())
            assert_right(model)
            if closed:
                close(model)
            del model
            gc.collect()


def test_dropped_while_a_prediction_runs() -> None:
    """The predictor's thread holds the model until it has predicted. The next collection then frees it."""
    entered, go_on = threading.Event(), threading.Event()

    class Slow:
        model: PreTrainedModel  # as predictors know gates, and these the whole model

        def predict(self, visit: LayerVisit) -> list[Forecast]:
            entered.set()
            assert go_on.wait(WAIT_S)
            return []

    with leaving_nothing():
        slow = Slow()
        slow.model = model = promoe.from_pretrained(checkpoint(FAMILY), cache="25%", predictor=slow, config=config())
        found = weakref.ref(model)
        assert_right(model)
        assert entered.wait(WAIT_S)
        del model, slow
        gc.collect()
        assert found() is not None
        go_on.set()
    assert found() is None
