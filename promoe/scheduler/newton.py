"""Decayed Newton steps: how a logistic model that is fitted while running forgets what is long past."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

AnyFloats = npt.NDArray[np.floating[Any]]


class NewtonSteps:
    """The decayed information matrix behind the coefficients of one model.

    Args:
        num_features: coefficients.
        start_outcomes: weight of the coefficients that it starts from, in outcomes.
        memory_visits: after so many visits an outcome weighs a third of a new one.
        ridge: weight, in outcomes, that holds each step back for ever.
    """

    def __init__(self, num_features: int, start_outcomes: float, memory_visits: float, ridge: float = 0.0) -> None:
        self._information = np.eye(num_features) * start_outcomes
        self._ridge = np.eye(num_features) * ridge
        self._kept = 1.0 - 1.0 / memory_visits

    def step(self, features: AnyFloats, expected: AnyFloats, errors: AnyFloats, num_visits: int) -> AnyFloats:
        """What to add to the coefficients.

        Args:
            features: `[num_features, num_outcomes]`.
            expected: probability of each outcome.
            errors: what came, 0 or 1, less what was expected.
            num_visits: that the outcomes are of.
        """
        self._information *= self._kept**num_visits
        self._information += (features * (expected * (1.0 - expected))) @ features.T
        step: AnyFloats = np.linalg.solve(self._information + self._ridge, features @ errors)
        return step
