from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from synthetic_runs import make_run, make_stats

from promoe.errors import ConfigError
from promoe.runtime.popularity import most_used, most_used_of_each_layer, usage_rates
from promoe.scheduler import ExpertKey
from promoe.stats.saved_run import save_run

COUNTS = [[4, 0, 12], [0, 1, 0], [0, 0, 0]]
RATES = [[0.5, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    "counts",
    [COUNTS, tuple(map(tuple, COUNTS)), np.array(COUNTS), torch.tensor(COUNTS), [np.array(row) for row in COUNTS]],
    ids=["lists", "tuples", "array", "tensor", "list of arrays"],
)
def test_counts_of_any_scale_become_uses_per_token(counts: Any) -> None:
    """Of 16 uses 12 would be 1.5 per token of two experts; more than once is not possible."""
    assert usage_rates(counts, [3, 3, 3], [2, 2, 2]) == RATES


def test_layers_may_differ() -> None:
    assert usage_rates([[1.0, 3.0], [0.5, 0.25, 0.25]], [2, 3], [1, 2]) == [[0.25, 0.75], [1.0, 0.5, 0.5]]


def test_those_used_most_come_first_and_those_never_used_not_at_all() -> None:
    assert most_used(RATES) == [ExpertKey(0, 2), ExpertKey(1, 1), ExpertKey(0, 0)]


@pytest.mark.parametrize(
    ("share", "experts"),
    [
        (0.1, [(0, 2), (1, 1), (2, 0)]),
        (0.4, [(0, 2), (1, 1), (2, 0)]),
        (0.9, [(0, 0), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1)]),
    ],
)
def test_some_of_each_layer_and_never_all(share: float, experts: list[tuple[int, int]]) -> None:
    """Of equals, the first ones."""
    assert sorted(most_used_of_each_layer(RATES, share)) == experts


def test_a_layer_of_one_expert_has_no_most_used_ones() -> None:
    with pytest.raises(ConfigError, match="only one expert"):
        most_used_of_each_layer([[0.5, 0.5], [1.0]], 0.5)


def test_of_a_run_its_answers_count(tmp_path: Path) -> None:
    stats = make_stats(layers=2, experts=4, top_k=2, decode_passes=9)
    rates = usage_rates(stats, [4, 4], [2, 2])
    assert rates == [[count / 9 for count in counts] for counts in stats.decode.expert_counts]
    path = save_run(make_run(stats=stats), tmp_path / "run.json", {})
    assert usage_rates(path, [4, 4], [2, 2]) == rates
    assert usage_rates(str(path), [4, 4], [2, 2]) == rates


def test_of_a_run_without_answers_its_prompt_counts() -> None:
    stats = make_stats(layers=1, experts=4, decode_passes=0)
    assert usage_rates(stats, [4], [2]) == [[0.5] * 4]


@pytest.mark.parametrize(
    ("popularity", "message"),
    [
        (5, "must be the JSON file of a saved run, a run's Stats, or counts.*Got 5"),
        ([1, 2, 3], "must be the JSON file of a saved run"),
        ([[1, 2], [3, 4]], r"2 layers of 3 experts. Got 2 layers of 2 experts"),
        ([[1, 2, 3]], r"2 layers of 3 experts. Got 1 layers of 3 experts"),
        ([[1, 2, 3], [1, float("nan"), 3]], "Got nan for expert 1 of MoE layer 1"),
        ([[1, 2, float("inf")], [1, 2, 3]], "Got inf for expert 2 of MoE layer 0"),
        ([[1, -2, 3], [1, 2, 3]], "finite numbers of at least 0. Got -2 for expert 1 of MoE layer 0"),
        ([["a", 2, 3], [1, 2, 3]], "Got 'a' for expert 0"),
        ("nowhere.json", "Cannot read 'nowhere.json'"),
    ],
)
def test_what_is_no_popularity_is_refused(popularity: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        usage_rates(popularity, [3, 3], [2, 2])


def test_another_models_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"belongs to another model: it has 4 layers of 8 experts.*2 layers of 3"):
        usage_rates(make_stats(), [3, 3], [2, 2])
