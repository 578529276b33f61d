"""Ctrl-C at every point of a forward: the next forward is right, and nothing hangs."""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from served import PROMPTS, check_integrity, greedy
from transformers import PreTrainedModel
from waiting import WAIT_S, until

import promoe
from promoe.errors import EngineError
from promoe.transfer.memory import SlotPool

from .support import WAYS, always, assert_refuses, assert_right, faulty, never

FOLDER = str(Path(promoe.__file__).parent)


class Interrupting:
    """Raises KeyboardInterrupt in this thread at one line, or one call, of promoe's code, counted from 0.

    Python delivers signals between instructions, among them at each beginning of a function. A tracer can raise at all
    these places, and at more of them. Not at a `with`, which is also traced as it ends, where no signal is delivered;
    nor at a `try`: nothing happens there, so Python does not let go of the lock that a `with` around it holds.
    """

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.count = 0
        self.where = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        if event == "call" or (event == "line" and frame.f_lineno not in lines_with(frame.f_code.co_filename)):
            if self.count == self.at:
                self.where = f"{frame.f_code.co_name} in {frame.f_code.co_filename}, line {frame.f_lineno} ({event})"
                self.count += 1
                raise KeyboardInterrupt(self.where)
            self.count += 1
        return self

    @contextmanager
    def tracing(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)


@cache
def lines_with(path: str) -> frozenset[int]:
    """Return the numbers of the lines that begin a `with` or a `try`."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return frozenset(number for number, line in enumerate(lines, 1) if line.lstrip().startswith(("with ", "try:")))


def interrupt(model: PreTrainedModel, at: int, prompt: str) -> str:
    """Return where it was interrupted, or "" if the forwards ended before."""
    interrupting = Interrupting(at)
    try:
        with interrupting.tracing():
            greedy(model, PROMPTS[prompt], new_tokens=1)
    except KeyboardInterrupt:
        assert interrupting.where
    return interrupting.where


def points(way: str, prompt: str) -> int:
    """Count the points of a forward of that prompt and of one token more, from an empty cache."""
    counting = Interrupting()
    with faulty(way, never, predictor="gate") as (model, _), counting.tracing():
        greedy(model, PROMPTS[prompt], new_tokens=1)
    return counting.count


@pytest.mark.parametrize("way", WAYS)
def test_interruption_anywhere(way: str) -> None:
    interrupt_in_turn(way, "short", 12)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["short", "padded"])
@pytest.mark.parametrize("way", WAYS)
def test_interruption_nearly_everywhere(way: str, prompt: str) -> None:
    interrupt_in_turn(way, prompt, 500)


def interrupt_in_turn(way: str, prompt: str, times: int) -> None:
    """Interrupt so many forwards, each a little later. Other experts are resident each time."""
    step = max(1, points(way, prompt) // times)
    renewed, interrupted, at = 0, 0, WAYS.index(way) * step // len(WAYS)
    while True:
        with faulty(way, never, predictor="gate") as (model, _):
            for _ in range(25):  # many in one model, so that what one leaves behind would disturb the next ones
                at += step
                where = interrupt(model, at, prompt)
                if not where:
                    break
                interrupted += 1
                renewed += model.promoe.runtime.engine.torn
                assert_right(model, "short")
                assert not model.promoe.runtime.engine.torn
                check_integrity(model)
                with model.promoe.runtime.engine.lock:
                    caches = model.promoe.runtime.engine.scheduler.caches
                    assert not any(cache.num_pinned for cache in caches), where
                    assert not model.promoe.runtime.engine.waiters, where
        if not where:
            break
    assert interrupted >= times // 4, "once experts are resident, a forward has fewer points, but not so few"
    assert renewed < interrupted, "about half of the lines change the scheduler's state; the others do no harm"


class InScheduler(Interrupting):
    """Interrupt the scheduler's `begin_visit`, in the midst of a change."""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_name == "begin_visit" and frame.f_code.co_filename.startswith(FOLDER) and not self.where:
            self.where = "begin_visit"
            raise KeyboardInterrupt(self.where)


def tear(model: PreTrainedModel) -> None:
    interrupting = InScheduler()
    with pytest.raises(KeyboardInterrupt), interrupting.tracing():
        greedy(model, PROMPTS["one"])
    assert model.promoe.runtime.engine.torn


@pytest.mark.parametrize("way", WAYS)
def test_the_next_forward_begins_with_an_empty_cache_and_says_so(way: str, caplog: pytest.LogCaptureFixture) -> None:
    with faulty(way, never, predictor="gate") as (model, _):
        for _ in range(3):
            assert_right(model)
            engine = model.promoe.runtime.engine
            before, moved = engine.scheduler, model.promoe.stats().bytes_demand
            tear(model)
            with pytest.raises(EngineError, match=r"was being changed.*begins with an empty cache"):
                model.promoe.resize("50%")
            assert_right(model)
            assert engine.scheduler is not before
            assert model.promoe.stats().bytes_demand > moved
            assert "interrupted a change of the cache" in caplog.text
            caplog.clear()
            model.promoe.resize("50%")
            check_integrity(model)


def test_while_another_forward_runs_nothing_is_begun_anew() -> None:
    """The other forward may still read slots."""
    with faulty("RAM, workers", never, predictor=None) as (model, _):
        inside, leave, ended = threading.Event(), threading.Event(), []

        def hold(*_: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                assert leave.wait(WAIT_S)

        def other() -> None:
            try:
                greedy(model, PROMPTS["one"])
            except EngineError as error:
                ended.append(error)

        hook = promoe.find_moe_layers(model)[1].block.register_forward_pre_hook(hold)
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(WAIT_S)
        tear(model)
        assert_refuses(model, "once no other forward of it runs")
        leave.set()
        thread.join()
        assert [str(error) for error in ended if "begins with an empty cache" in str(error)]
        hook.remove()
        assert_right(model)


def test_in_the_midst_of_a_layer_nothing_is_begun_anew() -> None:
    """A hook or a signal handler may run the model inside a layer, which then goes on to read its slots."""
    with faulty("RAM, workers", never, predictor=None) as (model, _):
        engine, refused = model.promoe.runtime.engine, []

        def within(*_: Any) -> None:
            hook.remove()
            with engine.lock:
                engine.change_failed(KeyboardInterrupt())  # as if in another thread
            with pytest.raises(EngineError) as error:
                greedy(model, PROMPTS["one"])
            refused.append(str(error.value))

        layer = promoe.find_moe_layers(model)[1]
        stock = model.promoe.runtime.engine.visit

        def visit(layer_idx: int, *arguments: Any) -> Any:
            found = stock(layer_idx, *arguments)
            if layer_idx == layer.layer_idx and not refused:
                rows = found._rows
                found._rows = lambda: (within() if not refused else None, rows())[1]
            return found

        hook = layer.block.register_forward_pre_hook(lambda *_: None)
        engine.visit = visit  # type: ignore[method-assign]
        with pytest.raises(EngineError):
            greedy(model, PROMPTS["short"])
        assert refused
        assert "begins with an empty cache" in refused[0]
        engine.visit = stock  # type: ignore[method-assign]
        assert_right(model)


def test_what_was_torn_is_not_begun_anew_in_a_forked_process() -> None:
    with faulty("RAM, workers", never, predictor=None) as (model, _):
        tear(model)
        engine = model.promoe.runtime.engine
        with engine.lock:
            engine._forked()
        assert_refuses(model, "This process was forked")
        engine.renewable = True  # the same process, really
        assert_right(model)


def test_slots_that_were_being_resized_are_not_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with faulty("RAM, workers", never, predictor=None) as (model, _):
        assert_right(model)
        monkeypatch.setattr(SlotPool, "resize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.promoe.resize("50%")
        assert_refuses(model, r"was being changed.*call promoe.unpatch\(model\)")


def test_without_its_workers_nothing_is_begun_anew() -> None:
    with faulty("RAM, workers", never, predictor=None) as (model, _):
        tear(model)
        engine = model.promoe.runtime.engine
        with engine.lock:
            engine._assigned.append(object())  # a worker dies of this
            engine._work.notify()
        until(lambda: not all(thread.is_alive() for thread in engine._threads))
        assert_refuses(model, "was being changed.*open it again")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "function", ["on_gate", "forward", "_begin", "__enter__", "__exit__", "_wait", "_look", "close"]
)
def test_interruption_at_a_named_point(way: str, function: str) -> None:
    """Ctrl-C comes as that function begins, when nothing is changed yet."""

    class AtCall(Interrupting):
        def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
            path = Path(frame.f_code.co_filename)
            mine = path.parent.name == "engine" or path.parts[-2:] == ("runtime", "hot_path.py")
            if mine and event == "call" and frame.f_code.co_name == function and not self.where:
                self.where = function
                raise KeyboardInterrupt(self.where)

    with faulty(way, never, cache=3, predictor=None) as (model, _):
        interrupting = AtCall()
        with pytest.raises(KeyboardInterrupt, match=function), interrupting.tracing():
            greedy(model, PROMPTS["padded"])
        assert_right(model)
        check_integrity(model)


@pytest.mark.usefixtures("_heeding_ctrl_c")
def test_interruption_of_a_read_that_takes_long() -> None:
    """A real signal comes as soon as the forward waits."""
    with faulty("files, workers", always("stuck"), predictor=None) as (model, link):
        engine = model.promoe.runtime.engine

        def press() -> None:
            assert link.stuck.wait(WAIT_S)
            until(lambda: engine.waiters)
            _thread.interrupt_main()

        pressing = threading.Thread(target=press)
        pressing.start()
        with pytest.raises(KeyboardInterrupt):
            greedy(model, PROMPTS["one"])
        pressing.join()
        link.mend()
        assert_right(model)
