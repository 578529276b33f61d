"""Small statistical models that learn while the model runs: about experts of one layer, and of two layers.

`SameLayerModel`: what the use of an expert says about the next uses of the others in its layer. It is a logistic model:
to the log odds that an expert has by itself, each expert that was just used adds a weight. The weights start at zero,
where they change nothing, and are corrected after each outcome by normalised least mean squares. (The frequencies of
`CrossLayerTable` cannot be added up like this: experts that are used together say the same thing twice.)

`CrossLayerTable`: which experts a layer uses after an earlier layer has used others, as a table of frequencies.

`NewtonSteps`: how the coefficients of a logistic model follow the data and forget old outcomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

AnyFloats = npt.NDArray[np.floating[Any]]
LogOdds = npt.NDArray[np.float32]

# The share of an error that SameLayerModel corrects at once: in the first visits, and after many; and how many are many.
FIRST_RATE, LAST_RATE, MANY_VISITS = 0.3, 0.1, 400
# The most multiplications in one matrix product. With twice as many, numpy's BLAS wakes threads that would take the
# cores from the model.
MAX_PRODUCTS = 2**17

# What CrossLayerTable assumes before it has seen anything, and how many visits that counts for.
START_PROBABILITY, START_VISITS = 0.1, 2
# From this many visits on, a row of CrossLayerTable forgets old ones.
MEMORY_VISITS = 200


class SameLayerModel:
    """The weights `[num_experts, num_experts]` of one layer: row j is added to all log odds when expert j was used."""

    __slots__ = ("_num_visits", "_weights")

    def __init__(self, num_experts: int) -> None:
        self._weights: LogOdds = np.zeros((num_experts, num_experts), dtype=np.float32)
        self._num_visits = 0

    @property
    def weights(self) -> LogOdds:
        """The learned weights; not a copy."""
        return self._weights

    def start_from(self, weights: LogOdds) -> None:
        """Copy weights that were learned elsewhere, and learn at the rate that holds after many visits."""
        self._weights[...] = weights
        self._num_visits = MANY_VISITS * round(FIRST_RATE / LAST_RATE)

    def log_odds(self, own: LogOdds, chosen: Sequence[int]) -> LogOdds:
        """Return every expert's log odds `[num_experts]`, given its own and the experts that were just used."""
        if not chosen:
            alone: LogOdds = own.copy()
            return alone
        added: LogOdds = np.add.reduce(self._weights.take(chosen, axis=0), axis=0)
        added += own
        return added

    def log_odds_of(self, own: LogOdds, chosen: Sequence[Sequence[int]], used: LogOdds | None = None) -> LogOdds:
        """Return the log odds of several visits `[num_visits, num_experts]`, each with at least one expert.

        Args:
            own: the experts' own log odds at each visit.
            chosen: the experts that each visit used.
            used: the same as ones and zeros `[num_visits, num_experts]`, if at hand: with few experts this is faster.
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
        """Learn from several visits.

        Args:
            errors: the outcomes minus their expected probabilities, `[num_visits, num_experts]`.
            chosen: as in `log_odds_of`.
            used: as in `log_odds_of`.
        """
        rate = max(LAST_RATE, FIRST_RATE / (1.0 + self._num_visits / MANY_VISITS))
        self._num_visits += len(chosen)
        # Every row takes a share of the errors of the visits that used its expert: one product of matrices.
        steps = errors * np.array([[rate / (1 + len(ids))] for ids in chosen], dtype=np.float32)
        if used is not None and used.size * len(self._weights) <= MAX_PRODUCTS:
            self._weights += used.T.dot(steps)
        else:
            self._correct_used(steps, chosen)

    def _correct_used(self, steps: LogOdds, chosen: Sequence[Sequence[int]]) -> None:
        """Change only the rows of experts that were used. With many experts, most were not."""
        experts = list(set(chain.from_iterable(chosen)))
        starts = {expert_idx: row * len(chosen) for row, expert_idx in enumerate(experts)}
        used = np.zeros((len(experts), len(chosen)), dtype=np.float32)
        used.put([starts[expert_idx] + visit_idx for visit_idx, ids in enumerate(chosen) for expert_idx in ids], 1.0)
        block = max(1, MAX_PRODUCTS // steps.size)
        for start in range(0, len(experts), block):
            self._weights[experts[start : start + block]] += used[start : start + block].dot(steps)


class CrossLayerTable:
    """Conditional frequencies between two layers (Klotski's correlation table).

    Args:
        num_chosen: experts of the earlier layer.
        num_experts: experts of the later one.
    """

    def __init__(self, num_chosen: int, num_experts: int) -> None:
        self._frequency = np.full((num_chosen, num_experts), START_PROBABILITY, dtype=np.float32)
        self._visits = np.full((num_chosen, 1), START_VISITS, dtype=np.float32)

    def probability(self, chosen: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return the probability of use `[num_experts]`: the mean over the experts that the earlier layer has chosen."""
        mean: npt.NDArray[np.float32] = np.add.reduce(self._frequency.take(chosen, axis=0), axis=0)
        mean /= len(chosen)
        return mean

    def observe(self, chosen: Sequence[int], ids: Sequence[int]) -> None:
        """Learn that the later layer used `ids` after the earlier one had used `chosen`."""
        earlier = np.array(chosen)
        visits = self._visits.take(earlier, axis=0)
        visits += 1
        np.minimum(visits, MEMORY_VISITS, out=visits)
        rows = self._frequency.take(earlier, axis=0)
        came = np.zeros(rows.shape[1], dtype=np.float32)
        came.put(ids, 1.0)
        error = came - rows
        error /= visits
        rows += error
        self._frequency[earlier] = rows
        self._visits[earlier] = visits


class NewtonSteps:
    """The decayed information matrix of one logistic model, from which each step of its coefficients follows.

    Args:
        num_features: the number of coefficients.
        start_outcomes: how many outcomes the starting coefficients count for.
        memory_visits: after this many visits an outcome weighs a third of a new one.
        ridge: how many outcomes hold each step back for ever.
    """

    def __init__(self, num_features: int, start_outcomes: float, memory_visits: float, ridge: float = 0.0) -> None:
        self._information = np.eye(num_features) * start_outcomes
        self._ridge = np.eye(num_features) * ridge
        self._kept = 1.0 - 1.0 / memory_visits

    def step(self, features: AnyFloats, expected: AnyFloats, errors: AnyFloats, num_visits: int) -> AnyFloats:
        """Return what to add to the coefficients `[num_features]`.

        Args:
            features: `[num_features, num_outcomes]`.
            expected: the probability of each outcome.
            errors: each outcome, 0 or 1, minus its expected probability.
            num_visits: how many visits the outcomes belong to.
        """
        self._information *= self._kept**num_visits
        self._information += (features * (expected * (1.0 - expected))) @ features.T
        step: AnyFloats = np.linalg.solve(self._information + self._ridge, features @ errors)
        return step
