"""Replays routing through the scheduler, on demand only: which bytes a cache of a policy would have had to fetch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from promoe.scheduler import Scheduler, SchedulerConfig
from promoe.scheduler.cache import RESIDENT
from promoe.scheduler.reuse import LearnedReuse


class Replay:
    """The same slots and eviction policy with demand only, each layer one event: keeps its cache from pass to pass.

    Args:
        config: the scheduler configuration of the system that is replayed.
        reuse: what its reuse prior started from.
        taught: the scheduler of a system with the same policy, which is shown each visit first: as its reuse prior has
            learned the same, it serves both.
    """

    def __init__(
        self, config: SchedulerConfig, reuse: LearnedReuse | None = None, taught: Scheduler | None = None
    ) -> None:
        self._config = config
        on_demand = dataclasses.replace(config, hints=False, prefetch=False, reorder=True)
        self._scheduler = Scheduler(on_demand, reuse=reuse, taught=taught)

    def residency(self, layer_idx: int) -> npt.NDArray[np.bool_]:
        """Whether each expert of a layer is in a slot, `[num_experts]`."""
        start = layer_idx * self._scheduler.max_experts
        states = self._scheduler.cache_of(layer_idx).states[start : start + self._config.num_experts[layer_idx]]
        result: npt.NDArray[np.bool_] = states == RESIDENT
        return result

    def foresee_reuse(self, layer_idx: int, log_odds: npt.ArrayLike) -> None:
        """What a predictor says of the reuse of a layer's experts `[num_experts]` at the visit that comes next."""
        self._scheduler.foresee_reuse(layer_idx, log_odds, begun=False)

    def visit(self, layer_idx: int, tokens: Sequence[Sequence[int]], num_sequences: int = 1) -> int:
        """One layer's visit with the experts of each token `[num_tokens][top_k]`; returns the bytes that it fetches.

        `num_sequences` tokens are expected at the layer's next visit.
        """
        scheduler, fetched_bytes = self._scheduler, 0
        ids = sorted({expert_idx for token in tokens for expert_idx in token})
        visit = scheduler.begin_visit(layer_idx, ids, tokens, num_sequences)
        while not visit.finished:
            visit.admit()
            while lease := scheduler.next_transfer(1):
                chunk_bytes = self._config.chunk_bytes[lease.key.layer_idx]
                fetched_bytes += sum(chunk_bytes[lease.chunk_idx : lease.chunk_idx + lease.num_chunks])
                scheduler.chunk_done(lease)
            visit.release(visit.ready())
        visit.close()
        return fetched_bytes
