"""Finds the least time per token that compute and link allow, `max(C, B / W)`, to be shown beside each measured time.

C: time per token of the unpatched model with everything resident. B: bytes that a demand-only replay of the same
eviction policy misses, where a layer's experts are one atomic event (replaying them one by one overstates misses).
W: the best bandwidth of the link that a raw probe reaches in the same run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from promoe.scheduler import SchedulerConfig
from promoe.scheduler.replay import Replay
from promoe.stats.counts import PhaseStats
from promoe.stats.routing import RoutedPass
from promoe.stores import Store
from promoe.transfer.links import Link
from promoe.transfer.links.probe import best_bandwidth
from promoe.units import is_number, ratio

MIB = 1024 * 1024
PROBE_REQUEST_BYTES = (1 * MIB, 4 * MIB)
PROBE_SECONDS = 0.3  # of each setting


class Missed(NamedTuple):
    """Bytes that one answer misses on demand only: of its prompt, and per token after it (nan without any)."""

    prompt_bytes: float
    token_bytes: float


def missed_bytes(config: SchedulerConfig, passes: Sequence[RoutedPass]) -> list[int]:
    """Return the bytes that a demand-only, event-atomic replay fetches in each of `passes`, beginning with empty slots."""
    replay = Replay(config)
    return [sum(replay.visit(layer_idx, tokens) for layer_idx, tokens in routed.visits) for routed in passes]


def missed_by_answer(config: SchedulerConfig, answers: Sequence[Sequence[RoutedPass]]) -> list[Missed]:
    """Return B of each answer: what its prompt misses, and the mean over the passes after it.

    Args:
        config: as in `Replay`.
        answers: the passes of each answer, the prompt's first, in the order in which the system ran them, warm-up included.
            Slots stay filled from one answer to the next.
    """
    missed = iter(missed_bytes(config, [routed for passes in answers for routed in passes]))
    found = []
    for passes in answers:
        prompt_bytes, *token_bytes = [next(missed) for _ in passes]
        found.append(Missed(prompt_bytes, ratio(sum(token_bytes), len(token_bytes))))
    return found


def needed_share(replayed: Sequence[float], decode: PhaseStats) -> float:
    """Return the share of the replayed misses that a system cannot do without, at most 1.

    Where its forecasts also keep experts from being evicted, a system moves less than its eviction policy misses on demand
    only. What it moved and used is then all that it needed.

    Args:
        replayed: bytes per token that its eviction policy misses, of each answer (`missed_by_answer`).
        decode: what the system moved for these answers.
    """
    known = [nbytes for nbytes in replayed if is_number(nbytes)]
    share = ratio(ratio(decode.bytes_used, decode.tokens), ratio(sum(known), len(known)))
    return min(1.0, share) if is_number(share) else 1.0


def link_bandwidth(link: Link, store: Store) -> float:
    """Return W in bytes per second: the speed of an emulated link, else the best of a raw probe of the store's files.

    The probe takes about 4 s. Disks drift, so W is the largest of several probes and of what systems were seen to get.
    """
    if link.emulated_bytes_per_s is not None:
        return link.emulated_bytes_per_s
    assert link.mode is not None, f"no probe for {link.describe()}"
    assert store.files, f"a file link over a {type(store).__name__}"
    return best_bandwidth(store, link.mode, request_bytes=PROBE_REQUEST_BYTES, seconds=PROBE_SECONDS).bytes_per_s
