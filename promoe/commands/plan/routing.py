"""Finds which experts the tokens of some answers use: from a trace, or, where there is none, made up by one of two habits.

How often routing repeats decides what a cache is worth, and differs between models. Without a trace it is not known, so two
kinds are simulated, as in a model that repeats little and in one that repeats much, and what comes out is a range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from promoe.commands.plan.sizes import ModelSizes
from promoe.errors import ConfigError
from promoe.stats.routing import RoutedPass
from promoe.training.routing_traces import RoutingTrace

Answers = list[list[RoutedPass]]
# Tokens of the answer that fills the slots.
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Routing:
    """The routing of some answers, the first of which only fills the slots.

    Args:
        name: of the assumption, for a table.
        assumed: what it rests on, in words.
        answers: their passes.
    """

    name: str
    assumed: str
    answers: Answers


@dataclass(frozen=True)
class Habit:
    """How made-up routing repeats: a token takes the K experts of a layer with the largest sum of three numbers.

    Args:
        name: for a table.
        like: the model whose routing it was fitted to.
        popularity: standard deviation of a number that each expert keeps.
        recency: weight of how much of the last tokens used it (a share that decays by `DECAY` per token).

    The third is drawn anew for each token, from a Gumbel distribution.
    """

    name: str
    like: str
    popularity: float
    recency: float


DECAY = 0.8
# Fitted to hits of an LRU cache; benchmarks/NOTES.md has both beside each other.
SELDOM = Habit("repeats little", "DeepSeek-V2-Lite reading prompts", 0.5, 2.0)
OFTEN = Habit("repeats much", "gpt-oss-20b answering", 1.2, 1.5)


def made_up(
    sizes: ModelSizes, habit: Habit, prompt_tokens: int, new_tokens: int, answers: int = 2, seed: int = 0
) -> Routing:
    """Make up routing by a habit: the same for the same arguments.

    Args:
        sizes: the model's.
        habit: how the routing repeats.
        prompt_tokens: tokens of each prompt.
        new_tokens: tokens decoded in each answer.
        answers: how many, after the one that fills the slots.
        seed: of what is drawn.
    """
    counts = [layer.num_experts for layer in sizes.layers]
    tops = [layer.top_k for layer in sizes.layers]
    draw = np.random.default_rng(seed)
    popular = draw.normal(0.0, habit.popularity, (len(counts), max(counts)))
    popular[np.arange(max(counts)) >= np.array(counts)[:, None]] = -np.inf
    found = []
    for number in range(answers + 1):
        tokens = prompt_tokens + (new_tokens if number else min(new_tokens, WARM_UP_TOKENS))
        found.append(_passes(_tokens(popular, tops, habit.recency, tokens, draw), prompt_tokens))
    return Routing(habit.name, f"made up to repeat as {habit.like} does", found)


def usage(routing: Routing, sizes: ModelSizes) -> tuple[npt.NDArray[np.float64], ...]:
    """Return for each layer the share of tokens that use each expert `[num_experts]`, as if each had half a use more."""
    counts = [np.full(layer.num_experts, 0.5) for layer in sizes.layers]
    for one in chain.from_iterable(routing.answers):
        for layer_idx, tokens in one.visits:
            np.add.at(counts[layer_idx], list(chain.from_iterable(tokens)), 1.0)
    # A token uses as many experts as the layer's top-k.
    return tuple(
        np.minimum(1.0, layer.top_k * count / count.sum()) for layer, count in zip(sizes.layers, counts, strict=True)
    )


def _tokens(
    popular: npt.NDArray[np.float64], tops: Sequence[int], recency: float, tokens: int, draw: np.random.Generator
) -> list[list[list[int]]]:
    """Return the experts of each token and layer, `[num_tokens][num_layers][top_k]`."""
    recent = np.zeros_like(popular)
    layers, most = np.arange(len(tops))[:, None], max(tops)
    ranks = np.arange(most) < np.array(tops)[:, None]
    found = []
    for _ in range(tokens):
        score = popular + recency * recent + draw.gumbel(size=popular.shape)
        best = np.argsort(-score, axis=1)[:, :most]
        used = np.zeros_like(recent)
        used[layers.repeat(most, 1)[ranks], best[ranks]] = 1.0
        recent = DECAY * recent + (1 - DECAY) * used
        found.append([row[:top].tolist() for row, top in zip(best, tops, strict=True)])
    return found


def _passes(tokens: Sequence[Sequence[Sequence[int]]], prompt_tokens: int) -> list[RoutedPass]:
    """Return a prompt's pass and one for each token after it; `tokens` is `[num_tokens][num_layers][top_k]`."""
    layers = range(len(tokens[0]))
    prompt = [(idx, [list(token[idx]) for token in tokens[:prompt_tokens]]) for idx in layers]
    decoded = [[(idx, [list(token[idx])]) for idx in layers] for token in tokens[prompt_tokens:]]
    return [RoutedPass("prefill", prompt), *(RoutedPass("decode", visits) for visits in decoded)]


def from_trace(
    trace: RoutingTrace, sizes: ModelSizes, name: str, prompt_tokens: int, new_tokens: int, answers: int = 4
) -> Routing:
    """Take routing from recorded prompts: the first tokens of each are a prompt, those that follow the answer.

    Where the trace knows which tokens the model wrote itself, at most `prompt_tokens` of those before them are the prompt.

    Args:
        trace: of this model.
        sizes: the model's.
        name: of the trace, for messages.
        prompt_tokens: the most tokens of each prompt.
        new_tokens: the most tokens decoded in each answer.
        answers: the most answers, after the one that fills the slots.

    Raises:
        ConfigError: the trace is of another model, or holds too little.
    """
    shapes = {(layer.num_experts, layer.top_k) for layer in sizes.layers}
    expected = (len(sizes.layers), *next(iter(shapes)))
    found = (trace.num_layers, trace.num_experts, trace.top_k)
    # An expert that was never used leaves no trace of itself.
    if len(shapes) > 1 or found[::2] != expected[::2] or found[1] > expected[1]:
        raise ConfigError(
            f"--trace {name} is of another model: it has {found[0]} MoE layers of {found[1]} experts, top {found[2]}, but "
            f"{sizes.name} has {expected[0]} of {expected[1]}, top {expected[2]}. Give a trace of this model (promoe-train "
            "collect), or leave it out."
        )
    taken: Answers = []
    for start, length in zip(trace.prompt_starts.tolist(), trace.prompt_lengths.tolist(), strict=True):
        rows = trace.experts[start : start + length]
        prompt = length if trace.generated is None else int(np.count_nonzero(~trace.generated[start : start + length]))
        prompt = min(prompt_tokens, prompt, length - 1)
        if prompt >= 1:
            taken.append(_passes(rows[: prompt + new_tokens].tolist(), prompt))
        if len(taken) > answers:
            break
    if len(taken) < 2:
        raise ConfigError(
            f"--trace {name} has {len(taken)} prompts of two or more tokens; at least 2 are needed. Collect more."
        )
    tokens = sum(len(passes) - 1 for passes in taken[1:])
    return Routing("trace", f"{tokens} tokens of {len(taken) - 1} prompts of {name}", taken)
