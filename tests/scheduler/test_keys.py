"""An expert's name."""

from __future__ import annotations

from promoe.scheduler import ExpertKey


def test_keys_sort_by_layer_then_expert_and_unpack() -> None:
    assert sorted([ExpertKey(1, 0), ExpertKey(0, 7), ExpertKey(0, 2)]) == [(0, 2), (0, 7), (1, 0)]
    layer_idx, expert_idx = ExpertKey(layer_idx=3, expert_idx=5)
    assert (layer_idx, expert_idx) == (3, 5)
