"""Measures times of generation, and compares those of several systems: paired by prompt, with intervals.

Knows nothing of experts: a system is whatever generates tokens.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from transformers.generation.streamers import BaseStreamer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIDENCE = 0.95
# Small models that are greedy repeat themselves, and loops need the same experts again and again.
REPETITION_PENALTY = 1.15
RESAMPLES = 4000


@dataclass(frozen=True)
class Generation:
    """An answer, and when its tokens came."""

    tokens: tuple[int, ...]
    """Generated token ids, prompt excluded."""
    ttft_s: float
    """Seconds from the call to the first token."""
    gaps_s: tuple[float, ...]
    """Seconds between one token and the next: one less than tokens."""

    @property
    def tpot_s(self) -> float:
        """Mean seconds per output token after the first, (t_last - t_first) / (n - 1); nan if there is one token."""
        return sum(self.gaps_s) / len(self.gaps_s) if self.gaps_s else math.nan


class Stopwatch(BaseStreamer):  # type: ignore[misc]
    """A streamer for `model.generate(streamer=)` that notes when each token of one sequence comes.

    Args:
        on_token: called with each generated token id, after its time was noted. The time that it takes delays the next token.
    """

    def __init__(self, on_token: Callable[[int], None] | None = None) -> None:
        self._on_token = on_token
        self._prompt_seen = False
        self.tokens: list[int] = []
        self.times_s: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt `[1, n]` at the first call, then one token `[1]` at each call."""
        now_s = time.perf_counter()
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        for token in value.flatten().tolist():
            self.tokens.append(token)
            self.times_s.append(now_s)
            if self._on_token is not None:
                self._on_token(token)

    def end(self) -> None:
        """Do nothing: there is nothing to flush."""


def generate(
    model: PreTrainedModel,
    inputs: Mapping[str, torch.Tensor],
    max_new_tokens: int,
    on_token: Callable[[int], None] | None = None,
    **options: Any,
) -> Generation:
    """Let a model answer one prompt, and time it.

    Args:
        model: patched or not.
        inputs: `input_ids` and `attention_mask`, both `[1, n]`.
        max_new_tokens: tokens to generate at most.
        on_token: see `Stopwatch`.
        options: for `model.generate`, which is greedy unless they say otherwise.
    """
    watch = Stopwatch(on_token)
    start_s = time.perf_counter()
    with torch.inference_mode():
        model.generate(**{**inputs, "do_sample": False, "max_new_tokens": max_new_tokens, **options, "streamer": watch})
    times_s = watch.times_s
    gaps_s = tuple(after - before for before, after in itertools.pairwise(times_s))
    return Generation(tuple(watch.tokens), times_s[0] - start_s, gaps_s)


class Estimate(NamedTuple):
    """A median and its bootstrap interval."""

    value: float
    low: float
    high: float


def estimate(values: Sequence[float], *, seed: int = 0) -> Estimate:
    """Return the median of `values` and its 95% percentile-bootstrap interval; nan without values, no width for one."""
    if not values:
        return Estimate(math.nan, math.nan, math.nan)
    resampled = np.random.default_rng(seed).choice(np.asarray(values, dtype=np.float64), (RESAMPLES, len(values)))
    tail = (1.0 - CONFIDENCE) / 2
    low, high = np.quantile(np.median(resampled, axis=1), (tail, 1.0 - tail))
    return Estimate(median(values), float(low), float(high))


def paired_speedup(slow: Sequence[float], fast: Sequence[float]) -> Estimate:
    """Return how many times as fast `fast` is: the median, with interval, of `slow[i] / fast[i]` over pairs."""
    return estimate([before / after for before, after in zip(slow, fast, strict=True)])


def paired_estimates(times: Mapping[str, Sequence[float]]) -> dict[str, Estimate]:
    """Return each system's median time, with an interval that leaves out what slows an item for all systems alike.

    Each time is divided by the geometric mean of its item over the systems (after Cousineau 2005, who subtracts), because a
    slow item, or a busy machine, slows all systems by a factor. These intervals show what a paired comparison can resolve.
    Intervals of the times themselves are as wide as the prompts are different.

    Args:
        times: of each system, one per item, in the same order; all more than 0.
    """
    if not times:
        return {}
    table = np.log(np.array([list(values) for values in times.values()], dtype=np.float64))  # [systems, items]
    levelled = np.exp(table - table.mean(axis=0, keepdims=True))
    found = {}
    for (name, values), row in zip(times.items(), levelled.tolist(), strict=True):
        value, relative = median(values), estimate(row)
        found[name] = Estimate(value, value * relative.low / relative.value, value * relative.high / relative.value)
    return found


def tpots_s(generations: Sequence[Generation]) -> list[float]:
    """Return the TPOT of each generation, in seconds."""
    return [generation.tpot_s for generation in generations]


def ttfts_s(generations: Sequence[Generation]) -> list[float]:
    """Return the TTFT of each generation, in seconds."""
    return [generation.ttft_s for generation in generations]
