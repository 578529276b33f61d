"""The least time per token that compute and link allow, `max(C, B / W)`, to be shown beside each measured time.

C: time per token of the unpatched model with everything resident. B: bytes that a demand-only replay of the same
eviction policy misses, where a layer's experts are one atomic event (replaying them one by one overstates misses).
W: best bandwidth of the link that a raw probe reaches in the same run.
"""

from __future__ import annotations

from collections.abc import Sequence

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
PROBE_SECONDS = 0.3  # per setting


def missed_bytes(config: SchedulerConfig, passes: Sequence[RoutedPass]) -> list[int]:
    """Bytes that a demand-only, event-atomic replay fetches in each of `passes`, beginning with empty slots."""
    replay = Replay(config)
    return [_missed(replay, routed) for routed in passes]


def _missed(replay: Replay, routed: RoutedPass) -> int:
    return sum(replay.visit(layer_idx, tokens) for layer_idx, tokens in routed.visits)


def bytes_per_token(config: SchedulerConfig, generations: Sequence[Sequence[RoutedPass]]) -> list[float]:
    """B of each generation: mean missed bytes per decode pass; slots stay filled from one generation to the next.

    Args:
        config: as in `Replay`.
        generations: the passes of each, in the order in which the system ran them, warm-up included.

    Returns:
        One number per generation; nan where nothing was decoded.
    """
    replay, results = Replay(config), []
    for passes in generations:
        missed = [(routed.phase, _missed(replay, routed)) for routed in passes]
        decode = [nbytes for phase, nbytes in missed if phase == "decode"]
        results.append(ratio(sum(decode), len(decode)))
    return results


def token_bound_s(compute_s: float | None, missed_bytes_per_token: float, bandwidth_bytes_per_s: float) -> float:
    """`max(C, B / W)` in seconds per token; `compute_s` None (not measured): `B / W`, a weaker bound."""
    return max(compute_s or 0.0, missed_bytes_per_token / bandwidth_bytes_per_s)


def needed_bytes(replayed: float, decode: PhaseStats) -> float:
    """Return the bytes per token that a system cannot do without.

    Args:
        replayed: what its eviction policy misses on demand only (`bytes_per_token`).
        decode: what the system moved. Where its forecasts also keep experts from being evicted, it needed less.
    """
    used = ratio(decode.bytes_used, decode.tokens)
    return min(replayed, used) if is_number(used) else replayed


def link_bandwidth(link: Link, store: Store) -> float:
    """W, bytes per second: what an emulated link is set to, else the best of a raw probe of the store's files.

    The probe takes about 4 s. Disks drift: of several probes, and of what systems were seen to get, the largest is W.
    """
    if link.emulated_bytes_per_s is not None:
        return link.emulated_bytes_per_s
    assert link.mode is not None, f"no probe for {link.describe()}"
    assert store.files, f"a file link over a {type(store).__name__}"
    return best_bandwidth(store, link.mode, request_bytes=PROBE_REQUEST_BYTES, seconds=PROBE_SECONDS).bytes_per_s
