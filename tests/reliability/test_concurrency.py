"""Patching, unpatching and closing while forwards run, many forwards at once, and abandoned ones."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from served import PROMPTS, config, greedy, resident, served, stock
from torch import nn
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer
from untouched import leaving_untouched
from waiting import WAIT_S

import promoe
from promoe.errors import CheckpointError, ConfigError, EngineClosedError, PatchStateError
from promoe.model.passes import threads_in_forward

from .support import FAMILY, always, assert_right, assert_told, faulty, never

PLACES = ("RAM, workers", "files, workers")


@contextmanager
def held(model: PreTrainedModel, act: Callable[[], Any], threads: int = 1) -> Iterator[list[Future[Any]]]:
    """Call `act` in so many threads, and hold each in the model's second MoE layer until the context ends."""
    inside, let_go = threading.Semaphore(0), threading.Event()

    def hold(*args: Any) -> None:
        inside.release()
        assert let_go.wait(WAIT_S)

    hook = promoe.find_moe_layers(model)[1].block.register_forward_pre_hook(hold)
    with ThreadPoolExecutor(threads, "asking", torch.set_num_threads, (1,)) as pool:
        try:
            futures = [pool.submit(act) for _ in range(threads)]
            for _ in futures:
                assert inside.acquire(timeout=WAIT_S)
            hook.remove()
            yield futures
        finally:
            hook.remove()
            let_go.set()


# -- while a forward runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", PLACES)
@pytest.mark.parametrize(
    ("threads", "told"),
    [
        (
            1,
            r"while 1 forward of it is running \(in thread asking_0\)\. Nothing was changed\. Wait until .*promoe\.close",
        ),
        (2, r"while 2 forwards of it are running \(in threads asking_\d, asking_\d\)"),
    ],
    ids=["one", "two"],
)
def test_unpatch_during_a_forward(way: str, threads: int, told: str) -> None:
    with faulty(way, never) as (model, _):
        with held(model, lambda: assert_right(model), threads) as forwards, leaving_untouched(model):
            for _ in range(2):
                with pytest.raises(PatchStateError, match=told):
                    promoe.unpatch(model)
        for forward in forwards:
            forward.result(WAIT_S)
        assert_right(model)
        assert model.promoe.stats().total.passes_aborted == 0
        promoe.unpatch(model)
        model.set_experts_implementation("grouped_mm")
        assert_right(model)


def test_unpatch_in_a_forward_of_this_thread() -> None:
    """The hooks are those of the model, of a block and of experts, before and after they run."""
    with faulty("RAM, workers", never) as (model, _):
        told = []

        def unpatch(*args: Any) -> None:
            with pytest.raises(PatchStateError, match=r"in thread MainThread.*also in its hooks"):
                promoe.unpatch(model)
            told.append(args)

        layer = promoe.find_moe_layers(model)[1]
        modules = (model, layer.block, layer.experts)
        hooks = [module.register_forward_pre_hook(unpatch) for module in modules]
        hooks += [module.register_forward_hook(unpatch) for module in modules]
        greedy(model, PROMPTS["one"], new_tokens=0)
        for hook in hooks:
            hook.remove()
        assert len(told) == len(hooks)
        assert_right(model)


def test_unpatch_while_a_part_of_the_model_runs() -> None:
    """The base model and a block are called by themselves; a gate is what predictors ask."""
    with faulty("RAM, workers", never) as (model, _):
        layer = promoe.find_moe_layers(model)[1]
        hidden = torch.zeros(1, 2, model.config.hidden_size)
        calls: list[tuple[nn.Module, torch.Tensor]] = [
            (model.model, PROMPTS["one"]["input_ids"]),
            (layer.block, hidden),
        ]
        found: list[list[str]] = []
        hook = layer.gate.register_forward_hook(lambda *args: found.append(threads_in_forward(model, [layer])))
        with torch.inference_mode():
            for module, argument in calls:
                module(argument)
            layer.gate(hidden[0])
        hook.remove()
        assert found == [["MainThread"], ["MainThread"], []]


def test_patch_during_a_forward() -> None:
    model = resident(FAMILY)
    told = "cannot be patched while 1 forward of it is running"
    with (
        held(model, lambda: greedy(model, PROMPTS["one"])) as forwards,
        leaving_untouched(model),
        pytest.raises(PatchStateError, match=told),
    ):
        promoe.patch(model, config=config())
    forwards[0].result(WAIT_S)
    with served(FAMILY) as patched:
        assert patched is model
        assert_right(patched)


@pytest.mark.parametrize("way", PLACES)
def test_close_during_a_forward(way: str) -> None:
    """The error said so: close it, the forwards raise, then it can be unpatched."""
    with faulty(way, never, predictor="gate") as (model, _):
        with held(model, lambda: assert_right(model), 2) as forwards:
            model.promoe.close()
        for forward in forwards:
            assert isinstance(forward.exception(WAIT_S), EngineClosedError)
        assert_told(model, EngineClosedError, "after its engine was closed")
        promoe.unpatch(model)
        model.set_experts_implementation("grouped_mm")
        assert_right(model)


@pytest.mark.parametrize("way", PLACES)
def test_close_while_forwards_wait_for_a_read(way: str) -> None:
    with faulty(way, always("stuck"), predictor=None, stall_timeout_s=WAIT_S) as (model, link):
        pool = ThreadPoolExecutor(2)
        forwards = [pool.submit(assert_right, model) for _ in range(2)]
        assert link.stuck.wait(WAIT_S)
        closing = threading.Thread(target=model.promoe.close)  # waits for the workers, which the read holds
        closing.start()
        for forward in forwards:
            assert isinstance(forward.exception(WAIT_S), EngineClosedError)
        link.mend()
        closing.join(WAIT_S)
        assert not closing.is_alive()
        pool.shutdown()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("alive", [True, False])
def test_unpatch_after_a_forward_that_raised(error: type[BaseException], alive: bool) -> None:
    """A forward that ended does not run any more, even if its traceback is still held."""
    with faulty("RAM, workers", never) as (model, _):
        seen, end = threading.Event(), threading.Event()
        kept: list[BaseException] = []

        def fail(*args: Any) -> None:
            raise error("enough")

        def work() -> None:
            try:
                greedy(model, PROMPTS["one"])
            except BaseException as raised:
                kept.append(raised)
            seen.set()
            assert end.wait(WAIT_S)

        hook = promoe.find_moe_layers(model)[1].experts.register_forward_pre_hook(fail)
        thread = threading.Thread(target=work)
        thread.start()
        assert seen.wait(WAIT_S)
        with pytest.raises(error, match="enough"):
            greedy(model, PROMPTS["one"])
        hook.remove()
        if not alive:
            end.set()
            thread.join(WAIT_S)
        promoe.unpatch(model)
        end.set()
        thread.join(WAIT_S)
        assert isinstance(kept.pop(), error)
        model.set_experts_implementation("grouped_mm")
        assert_right(model)


def test_forward_that_begins_while_it_is_unpatched() -> None:
    """Reading all experts takes long. A forward that begins meanwhile raises, and so does a second `unpatch`."""
    with faulty("files, workers", never) as (model, _):
        restore, fails = model.promoe._restore, True

        def meanwhile() -> None:
            with ThreadPoolExecutor(1) as pool:
                begun = pool.submit(greedy, model, PROMPTS["one"]).exception(WAIT_S)
                assert isinstance(begun, PatchStateError), begun
                assert "Another thread was unpatching the model when this forward began" in str(begun)
                also = pool.submit(promoe.unpatch, model).exception(WAIT_S)
                assert isinstance(also, PatchStateError), also
            if fails:
                raise CheckpointError("nothing to read")
            restore()

        model.promoe._restore = meanwhile
        with pytest.raises(CheckpointError, match="nothing to read"):
            promoe.unpatch(model)
        assert_right(model)  # it stays patched
        fails = False
        promoe.unpatch(model)
        model.set_experts_implementation("grouped_mm")
        assert_right(model)


# -- many -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [3, 8])
def test_many_short_generations(slots: int) -> None:
    """Four threads with as many slots as one token's experts, or a few more: each answer has the unmodified model's bits."""
    prompts = ("one", "short", "padded", "short")
    for prompt in prompts:
        assert_right(stock(FAMILY), prompt)  # the references exist before threads ask for them
    together = threading.Barrier(len(prompts))
    with faulty("files, workers", never, cache=slots, stall_timeout_s=WAIT_S) as (model, _):

        def answer(prompt: str) -> None:
            together.wait(WAIT_S)
            for _ in range(8):
                assert_right(model, prompt)

        with ThreadPoolExecutor(len(prompts), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for result in [pool.submit(answer, prompt) for prompt in prompts]:
                result.result(WAIT_S)
        stats = model.promoe.stats()
        assert (stats.prefill.passes, stats.decode.passes) == (32, 96)
        assert stats.total.passes_aborted == 0
        engine = model.promoe.runtime.engine
        with engine.lock:
            engine.scheduler.check_integrity()
            assert not engine.waiters
            assert not any(cache.num_pinned for cache in engine.scheduler.caches)


# -- abandoned --------------------------------------------------------------------------------------------------


class Numbers:
    """Writes a token as its number: all that a streamer asks of a tokenizer."""

    def decode(self, ids: Any, **kwargs: Any) -> str:
        return "".join(f"{int(idx)}\n" for idx in ids)


class Abandoned(Exception):
    """Raised by a consumer that does not want the rest."""


def abandon_stream(model: PreTrainedModel) -> None:
    """Take two words and go. The generation's thread runs to its end."""
    streamer = TextIteratorStreamer(Numbers(), skip_prompt=True, timeout=WAIT_S)  # type: ignore[arg-type]
    asked = {**PROMPTS["one"], "streamer": streamer, "max_new_tokens": 8, "do_sample": False}
    thread = threading.Thread(target=model.generate, kwargs=asked)
    thread.start()
    words = iter(streamer)
    assert all(next(words) for _ in range(2))
    del words, streamer, asked
    thread.join(WAIT_S)
    assert not thread.is_alive()


class StopsWith(StoppingCriteria):
    """Return a function that generates and raises after the second token."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error, self.calls = error, 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            raise self.error("nobody wants the rest")
        return torch.zeros(len(input_ids), dtype=torch.bool)


def abandon_with(error: type[BaseException]) -> Callable[[PreTrainedModel], None]:
    def abandon(model: PreTrainedModel) -> None:
        criteria = StoppingCriteriaList([StopsWith(error)])
        with pytest.raises(error, match="nobody wants the rest"):
            model.generate(**PROMPTS["padded"], stopping_criteria=criteria, max_new_tokens=8, do_sample=False)

    return abandon


@pytest.mark.parametrize("way", PLACES)
@pytest.mark.parametrize(
    "abandon",
    [abandon_stream, abandon_with(Abandoned), abandon_with(KeyboardInterrupt)],
    ids=["stream", "error", "Ctrl-C"],
)
def test_abandoned_generation(way: str, abandon: Callable[[PreTrainedModel], None]) -> None:
    with faulty(way, never, predictor="gate") as (model, _):
        for _ in range(3):
            abandon(model)
            assert_right(model)
        total = model.promoe.stats().total
        assert total.passes_aborted == 0, "it ended between two passes"
        assert not threads_in_forward(model, model.promoe.runtime.layers)


# -- interpreters without a global lock -------------------------------------------------------------------------


def test_free_threaded_python(monkeypatch: pytest.MonkeyPatch) -> None:
    model = resident(FAMILY)
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    told = r"free-threaded Python .*PYTHON_GIL=1"
    with leaving_untouched(model):
        with pytest.raises(ConfigError, match=told):
            promoe.patch(model, config=config())
        with pytest.raises(ConfigError, match=told):
            promoe.from_pretrained("nowhere")
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    with served(FAMILY) as patched:  # that build, with the lock
        assert_right(patched)
