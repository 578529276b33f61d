"""Read how often a model's experts are used, from an earlier run, its file, or plain counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from os import PathLike
from typing import Any

from promoe.errors import ConfigError, shown
from promoe.scheduler import ExpertKey
from promoe.stats.saved_run import load_run
from promoe.stats.totals import Stats

Popularity = str | PathLike[str] | Stats | Iterable[Iterable[float]]
Rates = list[list[float]]
"""Uses per token of each layer's experts, `[num_layers][num_experts]`, at most 1 each."""


def usage_rates(popularity: Popularity, num_experts: Sequence[int], top_k: Sequence[int]) -> Rates:
    """Return the uses per token of each expert, from counts in any unit.

    Args:
        popularity: a saved run's JSON file, the counters of a run, or a number for each expert of each layer.
        num_experts: the number of experts of each MoE layer.
        top_k: experts per token of each MoE layer.

    Raises:
        ConfigError: the file cannot be read, belongs to another model, or has a number that is negative, infinite or
            NaN.
    """
    return [_rates(of_layer, k) for of_layer, k in zip(_counts(popularity, num_experts), top_k, strict=True)]


def most_used(rates: Rates) -> list[ExpertKey]:
    """Return the experts with a rate above zero, the most used ones first."""
    used = [(-rate, ExpertKey(layer, idx)) for layer, row in enumerate(rates) for idx, rate in enumerate(row) if rate]
    return [key for _, key in sorted(used)]


def most_used_of_each_layer(rates: Rates, share: float) -> frozenset[ExpertKey]:
    """Return that share of each layer's experts, the most used ones: at least one of a layer, and never all.

    Raises:
        ConfigError: a layer has only one expert.
    """
    if min(map(len, rates)) < 2:
        raise ConfigError("The most used experts were asked for, but a MoE layer of this model has only one expert.")
    found = []
    for layer_idx, of_layer in enumerate(rates):
        count = min(len(of_layer) - 1, max(1, round(share * len(of_layer))))
        ranked = sorted(range(len(of_layer)), key=lambda idx: (-of_layer[idx], idx))
        found += [ExpertKey(layer_idx, idx) for idx in ranked[:count]]
    return frozenset(found)


def _counts(popularity: Popularity, num_experts: Sequence[int]) -> Rates:
    if isinstance(popularity, str | PathLike):
        return _of_run(load_run(popularity).run.stats, num_experts, f"The run in '{popularity}'")
    if isinstance(popularity, Stats):
        return _of_run(popularity, num_experts, "The run")
    found = _plain(popularity)
    if [len(of_layer) for of_layer in found] != list(num_experts):
        raise ConfigError(
            f"The 'popularity' argument must have a number for each routed expert of each MoE layer: {_sizes(num_experts)}. "
            f"Got {_sizes([len(of_layer) for of_layer in found])} instead."
        )
    for layer_idx, of_layer in enumerate(found):
        for expert_idx, count in enumerate(of_layer):
            if not isinstance(count, Real) or not 0 <= count < math.inf:
                raise ConfigError(
                    f"The 'popularity' argument must have finite numbers of at least 0. Got {shown(count)} for expert "
                    f"{expert_idx} of MoE layer {layer_idx} instead."
                )
    return found


def _of_run(stats: Stats, num_experts: Sequence[int], what: str) -> Rates:
    """Return the counts of a run's decode passes, or of its prefill if it has none.

    Decode is preferred, because a prompt uses nearly all experts.
    """
    if stats.num_experts != tuple(num_experts):
        raise ConfigError(
            f"{what} belongs to another model: it has {_sizes(stats.num_experts)}, and this model has "
            f"{_sizes(num_experts)}."
        )
    phase = stats.decode if stats.decode.layer_visits else stats.prefill
    return [list(map(float, of_layer)) for of_layer in phase.expert_counts]


def _plain(popularity: Any) -> Rates:
    """Return the numbers as lists, from lists, arrays or tensors."""
    try:
        rows = popularity.tolist() if hasattr(popularity, "tolist") else popularity
        return [list(row.tolist() if hasattr(row, "tolist") else row) for row in rows]
    except TypeError:
        raise ConfigError(
            "The 'popularity' argument must be the JSON file of a saved run, a run's Stats, or counts per MoE layer and "
            f"expert. Got {shown(popularity)} instead."
        ) from None


def _rates(counts: Sequence[float], top_k: int) -> list[float]:
    total = sum(counts)
    return [min(1.0, count / total * top_k) if total else 0.0 for count in counts]


def _sizes(num_experts: Sequence[int]) -> str:
    """Return, for example, "12 layers of 32 experts"."""
    distinct = sorted(set(num_experts))
    return f"{len(num_experts)} layers of {' or '.join(map(str, distinct)) or 'no'} experts"
