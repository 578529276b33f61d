"""Many prompts that a system answers: one by one, in padded batches, or together by continuous batching."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from promoe.errors import ConfigError, shown
from promoe.runtime.batches import BatchPrompt, generate_batch
from promoe.runtime.paged import PAGE_TOKENS
from promoe.runtime.sampling import Sampling

Way = Literal["alone", "padded", "together"]
STEP_TOKENS = 512
# Mean and largest number of tokens of prompts, as published evaluations have them (MoE-Lightning 2024, section 5).
LENGTHS = {"mtbench": (77, 418), "summaries": (1693, 1984)}
SPREAD = 0.7  # standard deviation of the logarithm of a length


@dataclass(frozen=True)
class Many:
    """Prompts, and how they are answered.

    Attributes:
        prompts: token ids of each.
        new_tokens: of each answer; none ends before.
        way: "alone" (one by one), "padded" (batches of `at_once`, by `generate`) or "together" (`promoe.generate_batch`).
        at_once: sequences at once.
        step_tokens: the most tokens of a step.
    """

    prompts: Sequence[Sequence[int]]
    new_tokens: int
    way: Way
    at_once: int = 1
    step_tokens: int = STEP_TOKENS

    @property
    def kv_tokens(self) -> int:
        """Tokens of a KV cache in which the largest `at_once` sequences have room."""
        pages = sorted((math.ceil((len(ids) + self.new_tokens) / PAGE_TOKENS) for ids in self.prompts), reverse=True)
        return PAGE_TOKENS * sum(pages[: self.at_once])


@dataclass(frozen=True)
class ManyAnswers:
    """What became of many prompts.

    Attributes:
        tokens: of each answer.
        took_s: seconds for all.
        waited_s: mean seconds from the beginning until an answer was complete.
    """

    tokens: Sequence[Sequence[int]]
    took_s: float
    waited_s: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens / (prompts and answers)."""
        return sum(map(len, self.tokens)) / self.took_s


def lengths(name: str, count: int) -> list[int]:
    """Return the tokens of prompts: "mtbench", "summaries", or "MEAN:MOST". The same for the same arguments.

    Raises:
        ConfigError: it is none of these.
    """
    try:
        mean, most = LENGTHS[name] if name in LENGTHS else map(int, name.split(":"))
        if not 1 <= mean <= most:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--lengths must be one of {', '.join(LENGTHS)}, or MEAN:MOST in tokens, such as 77:418. Got {shown(name)} instead."
        ) from None
    draw = random.Random(0)
    drawn = [math.exp(draw.gauss(0.0, SPREAD)) for _ in range(count)]
    scale = mean * count / sum(drawn)
    return [max(1, min(most, round(scale * one))) for one in drawn]


def cut_up(text: Sequence[int], counts: Sequence[int]) -> list[Sequence[int]]:
    """Return prompts of so many tokens each, one after the other from a text, which is repeated where it is too short."""
    tokens = list(text) * -(-sum(counts) // len(text))
    ends = list(itertools.accumulate(counts))
    return [tokens[end - count : end] for count, end in zip(counts, ends, strict=True)]


def answer_many(model: Any, many: Many, pad_token_id: int) -> ManyAnswers:
    """Answer many prompts greedily, and time it."""
    ends, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
    answers: list[list[int]] = [[]] * len(many.prompts)
    waited_s = []
    start_s = time.perf_counter()
    try:
        for number, tokens in _answers(model, many, pad_token_id):
            answers[number] = tokens
            waited_s.append(time.perf_counter() - start_s)
        took_s = time.perf_counter() - start_s
    finally:
        model.generation_config.eos_token_id = ends
    return ManyAnswers(answers, took_s, sum(waited_s) / len(waited_s))


def _answers(model: Any, many: Many, pad_token_id: int) -> Iterator[tuple[int, list[int]]]:
    if many.way == "together":
        asked = [BatchPrompt(ids, many.new_tokens, Sampling(0.0)) for ids in many.prompts]
        sizes = {"at_once": many.at_once, "step_tokens": many.step_tokens, "kv_tokens": many.kv_tokens}
        for answer in generate_batch(model, asked, **sizes):
            if answer.error is not None:
                raise ConfigError(answer.error)
            yield answer.number, answer.tokens
        return
    # Neighbours of similar length need little padding.
    order = sorted(range(len(many.prompts)), key=lambda number: -len(many.prompts[number]))
    for start in range(0, len(order), many.at_once):
        some = order[start : start + many.at_once]
        yield from zip(some, _padded(model, [many.prompts[number] for number in some], many, pad_token_id), strict=True)


def _padded(model: Any, prompts: Sequence[Sequence[int]], many: Many, pad_token_id: int) -> list[list[int]]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad_token_id] * (longest - len(one)) + list(one) for one in prompts])
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
    with torch.inference_mode():
        found = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=many.new_tokens,
            max_new_tokens=many.new_tokens,
            pad_token_id=pad_token_id,
            prefill_chunk_size=max(1, many.step_tokens // len(prompts)),  # as many tokens per step as together
        )
    tokens: list[list[int]] = found[:, longest:].tolist()
    return tokens
