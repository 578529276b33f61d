from __future__ import annotations

import pytest
from synthetic_runs import make_stats

from promoe.commands.charts.parts import BYTES_BY_CAUSE, NEEDS
from promoe.stats.counts import Counts


@pytest.mark.parametrize(
    "counts",
    [
        Counts(bytes_demand=100, bytes_prefetched=60, bytes_prefetch_used=20, bytes_wasted=30, bytes_wasted_demand=10),
        Counts(bytes_demand=5, bytes_prefetched=50, bytes_prefetch_used=80, bytes_wasted=10),
        make_stats(predictor="gate", wasted_every=3).decode,
    ],
)
def test_bytes_by_cause_add_up_to_what_was_moved(counts: Counts) -> None:
    sizes = [part.of(counts) for part in BYTES_BY_CAUSE]
    assert min(sizes) >= 0
    assert sum(sizes) == counts.bytes_total


def test_needs_add_up_and_hit_and_ready_rates_are_their_first_parts() -> None:
    counts = Counts(needed=10, hits=4, ready=7)
    assert [part.of(counts) for part in NEEDS] == [4, 3, 3]
