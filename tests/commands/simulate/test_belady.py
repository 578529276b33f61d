"""Belady's choice, against every possible choice."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import numpy as np
import pytest

from promoe.commands.simulate.belady import misses


def least(visits: tuple[tuple[int, ...], ...], num_slots: int) -> int:
    """The fewest misses of one layer, over all that could be kept after each visit."""

    @cache
    def from_here(position: int, held: frozenset[int]) -> int:
        if position == len(visits):
            return 0
        ids = visits[position]
        missed = len(set(ids) - held)
        union = sorted(held | set(ids))
        kept = combinations(union, min(num_slots, len(union)))
        return missed + min(from_here(position + 1, frozenset(choice)) for choice in kept)

    return from_here(0, frozenset())


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(6))
def test_nothing_misses_less(seed: int, num_slots: int) -> None:
    rng = np.random.default_rng(seed)
    experts = np.stack([[rng.permutation(6)[:2] for _ in range(3)] for _ in range(14)])
    found = misses(experts, 6, num_slots)
    assert found.shape == (14, 3)
    for layer_idx in range(3):
        visits = tuple(tuple(row.tolist()) for row in experts[:, layer_idx])
        assert found[:, layer_idx].sum() == least(visits, num_slots)


def test_with_a_slot_for_each_expert_only_first_uses_miss() -> None:
    experts = np.array([[[0, 1]], [[1, 2]], [[0, 2]], [[3, 0]]])
    assert misses(experts, 4, 4).ravel().tolist() == [2, 1, 0, 1]
