"""Which experts follow which: how often a layer's visit used an expert when an earlier layer's had chosen another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Before anything was seen, and how many visits that is worth.
START_PROBABILITY, START_VISITS = 0.1, 2
# From here on an expert's row forgets.
MEMORY_VISITS = 200


class Correlation:
    """A table of conditional frequencies between two layers (Klotski's correlation table), learned while running.

    Args:
        num_chosen: experts of the earlier layer.
        num_experts: experts of the later one.
    """

    def __init__(self, num_chosen: int, num_experts: int) -> None:
        self._frequency = np.full((num_chosen, num_experts), START_PROBABILITY, dtype=np.float32)
        self._visits = np.full((num_chosen, 1), START_VISITS, dtype=np.float32)

    def probability(self, chosen: Sequence[int]) -> npt.NDArray[np.float32]:
        """Of use `[num_experts]`: the mean over the experts that the earlier layer has chosen."""
        mean: npt.NDArray[np.float32] = np.add.reduce(self._frequency.take(chosen, axis=0), axis=0)
        mean /= len(chosen)
        return mean

    def observe(self, chosen: Sequence[int], ids: Sequence[int]) -> None:
        """After these experts of the earlier layer, the later one used `ids`."""
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
