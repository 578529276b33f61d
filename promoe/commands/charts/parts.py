"""What stacked bars of several charts are made of: the causes of traffic, and where needed experts were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from promoe.commands.charts.stacked_bars import Series
from promoe.stats.counts import Counts
from promoe.units import format_megabytes, ratio


class Part(NamedTuple):
    """One part of a whole: its css class, its name, and its size in a record of counters."""

    css: str
    label: str
    of: Callable[[Counts], int]


BYTES_BY_CAUSE = (
    Part("demand", "on demand", lambda c: c.bytes_demand - c.bytes_wasted_demand),
    # What one phase prefetched another one may use: parts are cut so that they add up to what this one moved.
    Part(
        "arrived", "prefetched, used", lambda c: max(0, c.bytes_prefetched - c.bytes_wasted_prefetch - c.bytes_pending)
    ),
    Part("pending", "prefetched, not needed yet", lambda c: c.bytes_pending),
    Part("wasted", "moved in vain", lambda c: c.bytes_wasted),
)

NEEDS = (
    Part("hit", "hit: resident at gate time", lambda c: c.hits),
    Part("arrived", "arrived in time", lambda c: c.ready - c.hits),
    Part("stall", "waited for", lambda c: c.needed - c.ready),
)

TRAFFIC_AXIS, NEEDS_AXIS = "traffic (MB per token)", "needed experts (%)"


def traffic(counts: Sequence[Counts], tokens: Sequence[int]) -> list[Series]:
    """Return the bytes of each record by cause, in MB per token; `tokens` are those of each record."""
    return [
        Series(part.css, part.label, [ratio(part.of(c), n) / 1e6 for c, n in zip(counts, tokens, strict=True)])
        for part in BYTES_BY_CAUSE
    ]


def needs(counts: Sequence[Counts]) -> list[Series]:
    """Return where the needed experts of each record were, in per cent of them."""
    return [Series(part.css, part.label, [100 * ratio(part.of(c), c.needed) for c in counts]) for part in NEEDS]


def write_traffic(value: float) -> str:
    """Write MB per token."""
    return f"{format_megabytes(value * 1e6)} MB per token"


def write_needs(value: float) -> str:
    """Write a share of the needed experts, in per cent."""
    return f"{value:.1f}% of needed experts"
