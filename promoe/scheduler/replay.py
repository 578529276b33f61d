"""Replays recorded routing through the scheduler, on demand only: how many bytes an eviction policy has to fetch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .cache import RESIDENT
from .config import SchedulerConfig
from .reuse import LearnedReuse
from .scheduler import Scheduler


class Replay:
    """The same slots and eviction policy without prefetch, each layer visit one event. The cache lasts from pass to pass.

    Args:
        config: the scheduler configuration of the system that is replayed.
        reuse: what its reuse prior started from.
        taught: the scheduler of a system with the same policy that is shown each visit first. Its reuse prior has
            learned the same, so both use it.
    """

    def __init__(
        self, config: SchedulerConfig, reuse: LearnedReuse | None = None, taught: Scheduler | None = None
    ) -> None:
        self._config = config
        on_demand = dataclasses.replace(config, hints=False, prefetch=False, reorder=True)
        self._scheduler = Scheduler(on_demand, reuse=reuse, taught=taught)

    def residency(self, layer_idx: int) -> npt.NDArray[np.bool_]:
        """Return whether each expert of a layer is in a slot, `[num_experts]`."""
        start = layer_idx * self._scheduler.max_experts
        end = start + self._config.num_experts[layer_idx]
        # An expert is absent from all pools but its own.
        states = np.max([cache.states[start:end] for cache in self._scheduler.caches], axis=0)
        result: npt.NDArray[np.bool_] = states == RESIDENT
        return result

    def foresee_reuse(self, layer_idx: int, log_odds: npt.ArrayLike) -> None:
        """Take a predictor's log odds of reuse of a layer's experts `[num_experts]`, made at the next visit."""
        self._scheduler.foresee_reuse(layer_idx, log_odds, begun=False)

    def visit(self, layer_idx: int, tokens: Sequence[Sequence[int]], num_sequences: int = 1) -> int:
        """Replay one layer's visit.

        Args:
            layer_idx: the layer.
            tokens: the experts of each token, `[num_tokens][top_k]`.
            num_sequences: how many tokens are expected at the layer's next visit.

        Returns:
            The bytes that it fetches.
        """
        scheduler, fetched_bytes = self._scheduler, 0
        ids = sorted({expert_idx for token in tokens for expert_idx in token})
        visit = scheduler.begin_visit(layer_idx, ids, tokens, num_sequences)
        while not visit.finished:
            visit.admit()
            while lease := scheduler.next_transfer(1):
                chunk_bytes = self._config.chunk_bytes_of(lease.key)
                fetched_bytes += sum(chunk_bytes[lease.chunk_idx : lease.chunk_idx + lease.num_chunks])
                scheduler.chunk_done(lease)
            visit.release(visit.ready())
        visit.close()
        return fetched_bytes
