"""What the use of an expert says about the next uses of the others in its layer, learned while running.

A logistic model: to the log odds that an expert has by itself, each expert that was just used adds a number of its own.
The numbers start at zero, where nothing changes, and are corrected with each outcome by normalised least mean squares.
(Conditional frequencies, as in `correlation`, cannot be added up like this: experts that are used together say the same
thing twice.)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

LogOdds = npt.NDArray[np.float32]

# Share of an error that is corrected at once: of the first visits, and of all after many; and how many are many.
FIRST_RATE, LAST_RATE, MANY_VISITS = 0.3, 0.1, 400
# The most products of two numbers in one matrix product; of twice as many, numpy's BLAS wakes threads that would take the
# cores from the model.
MAX_PRODUCTS = 2**17


class Association:
    """The weights `[num_experts, num_experts]` of one layer: row j is what expert j's use adds to everyone's log odds."""

    __slots__ = ("_num_visits", "_weights")

    def __init__(self, num_experts: int) -> None:
        self._weights: LogOdds = np.zeros((num_experts, num_experts), dtype=np.float32)
        self._num_visits = 0

    @property
    def weights(self) -> LogOdds:
        """What was learned; live."""
        return self._weights

    def start_from(self, weights: LogOdds) -> None:
        """Take over what was learned elsewhere, as after many visits."""
        self._weights[...] = weights
        self._num_visits = MANY_VISITS * round(FIRST_RATE / LAST_RATE)

    def log_odds(self, own: LogOdds, chosen: Sequence[int]) -> LogOdds:
        """Of every expert `[num_experts]`, given its own and the experts just used."""
        if not chosen:
            alone: LogOdds = own.copy()
            return alone
        added: LogOdds = np.add.reduce(self._weights.take(chosen, axis=0), axis=0)
        added += own
        return added

    def log_odds_of(self, own: LogOdds, chosen: Sequence[Sequence[int]], used: LogOdds | None = None) -> LogOdds:
        """The same of several visits at once `[num_visits, num_experts]`, each with at least one expert.

        Args:
            own: of each visit.
            chosen: by each visit.
            used: the same in ones and zeros `[num_visits, num_experts]`, if it is at hand: for few experts that is quicker.
        """
        if used is not None and used.size * len(self._weights) <= MAX_PRODUCTS:
            total: LogOdds = used.dot(self._weights)
            total += own
            return total
        starts = np.cumsum([0, *(len(ids) for ids in chosen[:-1])])
        rows = self._weights.take(list(chain.from_iterable(chosen)), axis=0)
        sums: LogOdds = np.add.reduceat(rows, starts, axis=0)
        sums += own
        return sums

    def correct(self, errors: LogOdds, chosen: Sequence[Sequence[int]], used: LogOdds | None = None) -> None:
        """Learn from some visits: what came less what was expected `[num_visits, num_experts]`; `used` as above."""
        rate = max(LAST_RATE, FIRST_RATE / (1.0 + self._num_visits / MANY_VISITS))
        self._num_visits += len(chosen)
        # Every row takes a share of the errors of the visits that used its expert: one product of matrices.
        steps = errors * np.array([[rate / (1 + len(ids))] for ids in chosen], dtype=np.float32)
        if used is not None and used.size * len(self._weights) <= MAX_PRODUCTS:
            self._weights += used.T.dot(steps)
        else:
            self._correct_used(steps, chosen)

    def _correct_used(self, steps: LogOdds, chosen: Sequence[Sequence[int]]) -> None:
        """Without touching the rows of experts that were not used: they are most, where there are many."""
        experts = list(set(chain.from_iterable(chosen)))
        starts = {expert_idx: row * len(chosen) for row, expert_idx in enumerate(experts)}
        used = np.zeros((len(experts), len(chosen)), dtype=np.float32)
        used.put([starts[expert_idx] + visit_idx for visit_idx, ids in enumerate(chosen) for expert_idx in ids], 1.0)
        block = max(1, MAX_PRODUCTS // steps.size)
        for start in range(0, len(experts), block):
            self._weights[experts[start : start + block]] += used[start : start + block].dot(steps)
