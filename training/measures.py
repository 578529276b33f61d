"""How good predictions are, counted: of one kind at one lookahead, layer by layer, over all tokens or some of them.

The definitions are in `evaluation`. Knows arrays; not traces, kinds or files. scikit-learn is imported when it is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from promoe.scheduler.config import EvictionName

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]
Caches = Mapping[tuple[EvictionName, float], Bools]
"""(policy, cache rate) -> `residency` of the held-out tokens, or of the first of them."""

CALIBRATION_BINS = 10


@dataclass(frozen=True)
class Transfer:
    """How fast experts move and layers compute: what FETCHRATE depends on.

    Args:
        bandwidth_bytes_per_s: of the link.
        expert_bytes: of one expert.
        layer_s: seconds from one MoE layer to the next.
    """

    bandwidth_bytes_per_s: float
    expert_bytes: float
    layer_s: float

    def fetch_rate(self, lookahead: int, experts: float) -> float:
        """Share of so many experts that arrives within `lookahead` layers, at most 1."""
        needed_bytes = self.expert_bytes * experts
        return min(1.0, lookahead * self.layer_s * self.bandwidth_bytes_per_s / needed_bytes) if needed_bytes else 1.0


def top(scores: Floats, count: int) -> Bools:
    """The `count` largest of each row, as a mask of the same shape; of equal ones, the lower ids."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    mask = np.zeros(scores.shape, dtype=np.bool_)
    np.put_along_axis(mask, order, True, axis=1)
    return mask


def name_of_rate(rate: float) -> str:
    """A cache rate as the results call it: "12.5%"."""
    return f"{rate * 100:g}%"


class Misses:
    """Counts over layers: absent experts that were used, predicted, and both."""

    def __init__(self) -> None:
        self.visits = self.used = self.predicted = self.both = 0

    def add(self, absent: Bools, needed: Bools, predicted: Bools) -> None:
        """Count one layer's visits, each `[num_tokens, num_experts]`."""
        self.visits += len(absent)
        self.used += int(np.count_nonzero(absent & needed))
        self.predicted += int(np.count_nonzero(absent & predicted))
        self.both += int(np.count_nonzero(absent & needed & predicted))

    def to_json(self, accuracy: float | None, lookahead: int, transfer: Transfer | None) -> dict[str, float | None]:
        """Shares; None where there is nothing to divide by, or no link was given."""
        fetched = _share(self.predicted, self.visits)
        rate = None if transfer is None or fetched is None else transfer.fetch_rate(lookahead, fetched)
        return {
            "recall": _share(self.both, self.used),
            "precision": _share(self.both, self.predicted),
            "predicted_per_visit": fetched,
            "fetch_rate": rate,
            "goodpred": None if rate is None or accuracy is None else accuracy * rate,
        }


class Calibration:
    """Probabilities against what was used, over layers: are of those given p a share p used?"""

    def __init__(self, num_layers: int) -> None:
        self.layers: list[float | None] = [None] * num_layers
        self._outcomes: list[tuple[Floats, Bools]] = []

    def add(self, layer_idx: int, probabilities: Floats, needed: Bools) -> None:
        """Keep one layer's sample, each `[num_tokens, num_experts]`."""
        p, y = probabilities.ravel(), needed.ravel()
        if len(p):
            self.layers[layer_idx] = _brier(p, y)
            self._outcomes.append((p, y))

    def to_json(self) -> dict[str, Any] | None:
        """Brier score, over all and per layer, and the calibration curve: per bin with any, mean p and share used."""
        if not self._outcomes:
            return None
        from sklearn.calibration import calibration_curve

        p, y = (np.concatenate(parts) for parts in zip(*self._outcomes, strict=True))
        observed, predicted = calibration_curve(y, p, n_bins=CALIBRATION_BINS)
        return {
            "brier": _brier(p, y),
            "layers": self.layers,
            "predicted": predicted.tolist(),
            "observed": observed.tolist(),
        }


class Figures:
    """All measures of one kind at one lookahead, over some of the tokens.

    Args:
        tokens: mask `[num_tokens]`; None: all.
        num_layers: of the model.
        caches: for misses.
    """

    def __init__(self, tokens: Bools | None, num_layers: int, caches: Caches) -> None:
        self._tokens = tokens
        self._caches = caches
        self.accuracy: list[float | None] = [None] * num_layers
        self.exact: list[float | None] = [None] * num_layers
        self.coverage: list[float | None] = [None] * num_layers
        self.next_token: list[float | None] = [None] * num_layers
        self.misses = {cache: Misses() for cache in caches}
        self.calibration = Calibration(num_layers)

    def add(self, layer_idx: int, scores: Floats, predicted: Bools, needed: Bools) -> None:
        """Measure a layer from scores, what they predict and what is used, each `[num_tokens, num_experts]`."""
        from sklearn.metrics import coverage_error

        mine = slice(None) if self._tokens is None else self._tokens
        scores, right, wanted = scores[mine], predicted[mine] & needed[mine], needed[mine]
        if not len(wanted):
            return
        self.accuracy[layer_idx] = float(np.count_nonzero(right) / np.count_nonzero(wanted))
        self.exact[layer_idx] = float((right == wanted).all(axis=1).mean())
        self.coverage[layer_idx] = float(
            coverage_error(wanted.astype(np.int8), scores)
        )  # which it checks faster than bools
        for cache, held in self._caches.items():
            replayed = slice(len(held)) if self._tokens is None else np.flatnonzero(self._tokens[: len(held)])
            self.misses[cache].add(~held[replayed, layer_idx], needed[replayed], predicted[replayed])

    def add_probabilities(
        self, layer_idx: int, sample: npt.NDArray[np.intp], probabilities: Floats, needed: Bools
    ) -> None:
        """Measure a layer's probabilities `[len(sample), num_experts]`, of these tokens."""
        mine = slice(None) if self._tokens is None else self._tokens[sample]
        self.calibration.add(layer_idx, probabilities[mine], needed[sample][mine])

    def add_next_token(self, layer_idx: int, continues: Bools, predicted: Bools, needed: Bools) -> None:
        """Measure what each token's predecessor predicted of it, `[num_tokens, num_experts]`, where it `continues` one."""
        mine = continues if self._tokens is None else continues & self._tokens
        wanted = needed[mine]
        if len(wanted):
            self.next_token[layer_idx] = float(np.count_nonzero(predicted[mine] & wanted) / np.count_nonzero(wanted))

    def to_json(self, lookahead: int, transfer: Transfer | None) -> dict[str, Any]:
        """See `evaluation.evaluate`. Where a layer other than the first is not predicted there are no means: they
        could not be compared with another kind's."""
        accuracy = _mean(self.accuracy, self.accuracy[1:])
        misses: dict[str, dict[str, Any]] = {}
        for (policy, rate), counts in self.misses.items():
            figures = (counts if accuracy is not None else Misses()).to_json(accuracy, lookahead, transfer)
            misses.setdefault(policy, {})[name_of_rate(rate)] = figures
        return {
            "accuracy": accuracy,
            "exact": _mean(self.exact, self.exact[1:]),
            "coverage_error": _mean(self.coverage, self.coverage[1:]),
            "next_token_accuracy": _mean(self.next_token, self.next_token[:lookahead]),
            "layers": self.accuracy,
            "exact_layers": self.exact,
            "coverage_error_layers": self.coverage,
            "next_token_layers": self.next_token,
            "calibration": self.calibration.to_json() if accuracy is not None else None,
            "misses": misses,
        }


def _mean(values: Sequence[float | None], required: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known and None not in required else None


def _brier(probabilities: Floats, outcomes: Bools) -> float:
    return float(np.mean(np.square(probabilities - outcomes)))


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
