"""What stacked bars are made of: (css class, name, the part's size in a record of counters)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from promoe.stats.counts import Counts


class Part(NamedTuple):
    """One part of a whole."""

    css: str
    label: str
    of: Callable[[Counts], int]


BYTES_BY_CAUSE = (
    Part("demand", "on demand", lambda c: c.bytes_demand - c.bytes_wasted_demand),
    # What one phase prefetched another may use: parts are cut so that they add up to what this one moved.
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
