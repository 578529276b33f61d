"""Several generations at once: models, conversations and threads that take turns do not disturb each other."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from served import PROMPTS, delayed, served
from transformers import DynamicCache, PreTrainedModel

from generation.compared import FAMILY, SLOTS, assert_same, assert_same_bits, assert_served, unmodified

PADDED = PROMPTS["padded"]
ONE = PROMPTS["one"]
GREEDY: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}


@torch.no_grad()
def step_by_step(model: PreTrainedModel, prompt: torch.Tensor) -> Iterator[torch.Tensor]:
    """The logits of a prompt and of the four greedy tokens after it, one pass at a time."""
    cache, ids = DynamicCache(config=model.config), prompt
    for _ in range(5):
        logits = model(ids, past_key_values=cache).logits
        yield logits
        ids = logits[:, -1:].argmax(-1)


def test_two_models_take_turns_token_by_token() -> None:
    families = (FAMILY, "qwen2_moe")
    wanted = [list(step_by_step(unmodified(family), ONE["input_ids"])) for family in families]
    with (
        served(families[0], cache=SLOTS, predictor="gate") as one,
        served(families[1], cache=SLOTS, store="file") as two,
    ):
        turns = zip(*(step_by_step(model, ONE["input_ids"]) for model in (one, two)), strict=True)
        assert_same_bits(list(map(list, zip(*turns, strict=True))), wanted)
        for model in (one, two):
            assert_served(model.promoe.stats())


def test_two_conversations_with_one_model_take_turns() -> None:
    prompts = (ONE["input_ids"], PROMPTS["short"]["input_ids"])

    def call(model: PreTrainedModel) -> Any:
        return list(itertools.chain(*zip(*(step_by_step(model, prompt) for prompt in prompts), strict=True)))

    assert_same(call)


@pytest.mark.parametrize("predictor", ["gate", "random"])
def test_one_model_generates_in_two_threads_at_once(predictor: str) -> None:
    """Beams in one, greedy answers in the other, each with its own cache; twice, so that they meet anyhow."""
    asked: list[dict[str, Any]] = [{**PADDED, **GREEDY, "num_beams": 2}, {**ONE, **GREEDY}]

    def call(model: PreTrainedModel) -> Any:
        together = threading.Barrier(len(asked))

        def answers(kwargs: dict[str, Any]) -> list[torch.Tensor]:
            found = []
            for _ in range(2):
                together.wait(60)
                found.append(model.generate(**kwargs))
            return found

        with ThreadPoolExecutor(len(asked), initializer=torch.set_num_threads, initargs=(1,)) as threads:
            return [result.result(60) for result in [threads.submit(answers, kwargs) for kwargs in asked]]

    stats = assert_same(call, predictor=predictor, link=delayed(3))
    assert (stats.prefill.passes, stats.decode.passes) == (4, 16)
