"""Runs the model at cache rates that were predicted, and sets what was predicted beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from promoe.commands.measure import REPETITION_PENALTY, Generation, generate, tpots_s, ttfts_s
from promoe.commands.plan.routing import WARM_UP_TOKENS, Answers, Routing
from promoe.commands.plan.sizes import cache_argument
from promoe.commands.plan.time_model import Prediction, Speed, TimeModel
from promoe.commands.terminal import opening_bar
from promoe.experts.moe_layers import find_moe_layers
from promoe.model.tokenizer import load_tokenizer
from promoe.runtime.loading import from_pretrained
from promoe.stats.routing import RoutingRecorder

ANSWERS = 3
TEXT = """The harbour was quiet when the first boats came back. On the quay two men were sorting nets and talking about the
price of fuel, which had risen again. How does a small town live when the fish move north? Some families opened guest
houses; others learned to repair engines, to keep accounts, or to teach. The mayor, who had been a teacher herself, asked
everybody to write down one thing that the town could do better than its neighbours. Many answers were about food. One was
a drawing of a machine that sorts shells by size: a belt, three sieves and a small motor, with the numbers written beside
them. To build it you need forty hours, a welder and somebody who understands gears. In the library there is a book about
the history of clocks; its second chapter explains how a pendulum keeps time, and why a longer one swings more slowly. The
children liked the experiment with the string. What would happen on the moon? They wrote their guesses on the board, drew a
graph, and found that the square of the period grows with the length. In the evening it rained, and the lights went out for
an hour. Nobody minded. There were candles, and a pot of soup for whoever came through the door."""


@dataclass(frozen=True)
class Verified:
    """One cache rate at which the model was run.

    Args:
        prediction: what was predicted before.
        with_this_routing: what would have been predicted, had these answers' routing been known.
        tpot_s: measured, median of the answers.
        ttft_s: measured, median of the answers.
        hit_rate: measured, of decoded tokens.
        link: as the model reports it.
    """

    prediction: Prediction
    with_this_routing: Speed
    tpot_s: float
    ttft_s: float
    hit_rate: float
    link: str


def verify(
    time_model: TimeModel, rates: Sequence[float], prompt_tokens: int, new_tokens: int, settings: dict[str, Any]
) -> list[Verified]:
    """Open the model at each cache rate, let it answer, and compare.

    Args:
        time_model: what predicts this model.
        rates: cache rates to run.
        prompt_tokens: tokens of each prompt, as in the prediction.
        new_tokens: tokens of each answer, as in the prediction.
        settings: for `from_pretrained`: dtype, device, config.

    Raises:
        PromoeError: the model cannot be opened.
    """
    tokenizer = load_tokenizer(time_model.sizes.name)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    ids = ids * (1 + (1 + ANSWERS) * (prompt_tokens + 1) // len(ids))
    prompts = [
        torch.tensor([ids[number * len(ids) // (2 + ANSWERS) :][:prompt_tokens]]) for number in range(1 + ANSWERS)
    ]
    found: list[tuple[Prediction, list[Generation], Any]] = []
    routing: Answers = []
    for rate in rates:
        with opening_bar(time_model.sizes.name) as progress:
            cache = cache_argument(rate)
            model: Any = from_pretrained(time_model.sizes.name, cache=cache, progress=progress, **settings)
        with closing(model.promoe):
            _answer(model, prompts[0], min(new_tokens, WARM_UP_TOKENS))
            model.promoe.reset_stats()
            answers = [_answer(model, prompt, new_tokens) for prompt in prompts[1:]]
            found.append((time_model(rate), answers, model.promoe.stats()))
            routing = routing or _routing(model, prompts, new_tokens)
    known = Routing("these answers", "recorded in a run that was not timed", routing)
    return [
        Verified(
            prediction,
            time_model.speed(prediction.rate, known),
            median(tpots_s(answers)),
            median(ttfts_s(answers)),
            stats.decode.hit_rate,
            stats.link,
        )
        for prediction, answers, stats in found
    ]


def _answer(model: Any, prompt: torch.Tensor, new_tokens: int) -> Generation:
    length = new_tokens + 1
    inputs = {"input_ids": prompt.to(model.device), "attention_mask": torch.ones_like(prompt).to(model.device)}
    return generate(model, inputs, length, min_new_tokens=length, repetition_penalty=REPETITION_PENALTY, pad_token_id=0)


def _routing(model: Any, prompts: Sequence[torch.Tensor], new_tokens: int) -> Answers:
    """Return the routing of the same answers, given once more and not timed."""
    routing: Answers = []
    runtime = getattr(model.promoe, "runtime", None)
    with RoutingRecorder(model, find_moe_layers(model) if runtime is None else runtime.layers) as recorder:
        for number, prompt in enumerate(prompts):
            _answer(model, prompt, new_tokens if number else min(new_tokens, WARM_UP_TOKENS))
            routing.append(recorder.take())
    return routing
