from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from served import PROMPTS, expected, greedy, served
from waiting import WAIT_S

from promoe.commands.serve.requests import CHAT, Asked, Cancelled, Limits, Refused
from promoe.commands.serve.turns import ASKED, AnswerError, Turns


def submit(turns: Turns, act: Any, asked: Asked | None = None) -> Any:
    token = ASKED.set(asked or Asked(CHAT))
    try:
        return turns.submit(act)
    finally:
        ASKED.reset(token)


def test_calls_run_in_order_in_the_thread_that_runs() -> None:
    turns = Turns(Limits("m"))
    seen: list[tuple[int, int]] = []
    done = [submit(turns, lambda number=number: seen.append((number, threading.get_ident()))) for number in range(5)]
    turns.end()
    turns.run()
    assert seen == [(number, threading.get_ident()) for number in range(5)]
    assert all(future.done() for future in done)
    turns.run()  # there is nothing left, and it returns


def test_an_error_of_a_call_is_its_futures() -> None:
    turns = Turns(Limits("m"))
    failing, next_one = submit(turns, lambda: 1 / 0), submit(turns, lambda: 2)
    turns.end()
    turns.run()
    with pytest.raises(ZeroDivisionError):
        failing.result(WAIT_S)
    assert next_one.result(WAIT_S) == 2


def test_an_interruption_is_told_to_both_sides_and_the_rest_still_runs() -> None:
    turns = Turns(Limits("m"))

    def interrupt() -> None:
        raise KeyboardInterrupt

    interrupted, next_one = submit(turns, interrupt), submit(turns, lambda: 2)
    with pytest.raises(KeyboardInterrupt):
        turns.run()
    with pytest.raises(AnswerError, match="The server is ending"):
        interrupted.result(WAIT_S)
    turns.end()
    turns.run()
    assert next_one.result(WAIT_S) == 2


def test_so_many_may_wait() -> None:
    turns = Turns(Limits("m", waiting=2))
    with turns.taking(Asked(CHAT)), turns.taking(Asked(CHAT)):
        with pytest.raises(Refused, match="2 requests are answered or wait") as refused, turns.taking(Asked(CHAT)):
            raise AssertionError("a third was taken")
        assert refused.value.status == 503
    with turns.taking(Asked(CHAT)):
        assert turns.counts()["waiting"] == 1
    assert turns.counts()["answered"] == 3


def test_the_end_cancels_what_was_taken_and_takes_no_more() -> None:
    turns, asked = Turns(Limits("m")), Asked(CHAT)
    called: list[bool] = []
    asked.on_cancel = lambda: called.append(asked.cancelled)
    with turns.taking(asked):
        turns.end()
        assert called == [True]
        with pytest.raises(Refused, match="The server is ending"):
            submit(turns, lambda: None)
        with pytest.raises(Refused, match="The server is ending"), turns.taking(Asked(CHAT)):
            raise AssertionError("taken")
    turns.end()
    assert turns.tally == {"cancelled": 1}


def test_a_cancelled_call_that_has_not_begun_does_nothing() -> None:
    turns, asked = Turns(Limits("m")), Asked(CHAT)
    with served("qwen2_moe") as model, turns.watching(model) as watched:
        done = submit(turns, lambda: watched.generate(**PROMPTS["one"], max_new_tokens=4), asked)
        asked.cancel()
        turns.end()
        turns.run()
    with pytest.raises(Cancelled):
        done.result(WAIT_S)
    assert asked.passes == 0
    assert asked.outcome == "cancelled"


def test_a_forward_ends_at_its_next_layer_and_the_model_is_whole() -> None:
    turns, asked = Turns(Limits("m")), Asked(CHAT)
    with served("qwen2_moe") as model, turns.watching(model) as watched:
        layers = watched.promoe.runtime.layers
        entered: list[int] = []

        def enter(block: Any, args: Any, idx: int) -> None:
            entered.append(idx)
            if len(entered) == 5:  # the second layer of the second pass
                asked.cancel()

        hooks = [
            layer.block.register_forward_hook(lambda block, args, out, idx=layer.layer_idx: enter(block, args, idx))
            for layer in layers
        ]
        done = submit(turns, lambda: watched.generate(**PROMPTS["one"], max_new_tokens=9, do_sample=False), asked)
        turns.end()
        turns.run()
        for hook in hooks:
            hook.remove()
        with pytest.raises(Cancelled):
            done.result(WAIT_S)
        assert entered == [0, 1, 2, 0, 1]
        assert asked.passes == 2
        assert model.promoe.stats().total.passes_aborted == 1
        greedy(model, PROMPTS["one"]).assert_equals(expected("qwen2_moe", torch.float32, "grouped_mm", "one"))


def test_nothing_of_the_watch_is_left_on_the_model() -> None:
    with served("qwen2_moe") as model:

        def hooks() -> int:
            return sum(len(module._forward_pre_hooks) for module in model.modules())

        before = hooks()
        with Turns(Limits("m")).watching(model) as watched:
            assert hooks() == before + 1 + 3
            assert watched.config is model.config
        assert hooks() == before


def test_seeds_are_set_when_the_turn_has_come() -> None:
    turns = Turns(Limits("m"))
    with served("qwen2_moe") as model, turns.watching(model) as watched:
        options = {**PROMPTS["one"], "do_sample": True, "max_new_tokens": 8, "min_new_tokens": 8}
        done = [submit(turns, lambda: watched.generate(**options), Asked(CHAT, seed=seed)) for seed in (1, 2, 1)]
        turns.end()
        turns.run()
    first, second, third = (future.result(WAIT_S).tolist() for future in done)
    assert first == third != second


def test_ends_that_come_from_another_thread_wake_the_one_that_waits() -> None:
    turns = Turns(Limits("m"))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(turns.run)
        turns.end()
        running.result(WAIT_S)


def test_an_interruption_while_an_answer_is_handed_over_stays_one() -> None:
    turns = Turns(Limits("m"))

    def interrupt(done: Any) -> None:
        raise KeyboardInterrupt

    answered = submit(turns, lambda: 1)
    answered.add_done_callback(interrupt)
    with pytest.raises(KeyboardInterrupt):
        turns.run()
    assert answered.result(WAIT_S) == 1


def test_who_leaves_before_the_turn_takes_what_it_was_for() -> None:
    class Prompt:
        pass

    turns, left = Turns(Limits("m", waiting=1)), []
    for _ in range(5):
        asked, prompt = Asked(CHAT), Prompt()
        left.append(weakref.ref(prompt))
        with turns.taking(asked):
            done = submit(turns, lambda prompt=prompt: prompt, asked)
        assert done.cancelled()
        del prompt
    gc.collect()
    assert [one() for one in left] == [None] * 5
    turns.end()
    turns.run()
