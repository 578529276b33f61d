"""Measures of how good predictions are: of one kind at one lookahead, layer by layer, over all tokens or some of them.

Layer j at lookahead k is predicted from what is known at layer max(0, j - k), and layer 0 only by kinds that know before
the token begins. Definitions, for a prediction of the top-k experts of each held-out token and layer, and its scores:

accuracy: share of the experts used that are among the predicted (the paper's ACCURACY); mean over layers.
exact: share of tokens whose experts of a layer are all predicted; mean over layers.
recall of m fetched: share of the experts used that are among the m with the highest scores, mean over the layers j >= k, which
    are predicted from exactly k layers before (Eliseev and Mazur 2023, speculative loading).
coverage error: how many experts, in the order of their scores, must be fetched to have all that are used; mean over layers.
next-token accuracy: accuracy of layers j < k, predicted from layer L + j - k of the token before, in the same prompt.
Brier score: mean squared difference of the probability given and what happened (0 or 1).
calibration curve: mean probability and share used, in ten equal ranges of the probability.
miss recall: share of the *absent* experts used that are among the predicted; only those cost anything.
miss precision: share of the predicted absent experts, which a prefetch would fetch, that are used.
FETCHRATE: share of the predicted absent experts, m per layer visit on average, that arrive within k layers:
    min(1, k * layer_seconds * bandwidth / (expert_bytes * m)).
GOODPRED: ACCURACY x FETCHRATE (ProMoE section 3).

All are also given for prefill and decode alone, where the trace knows which tokens the model wrote itself.

Knows arrays; not traces, kinds or files. scikit-learn is imported when it is needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from promoe.errors import ConfigError
from promoe.scheduler.config import EvictionName

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]
Caches = Mapping[tuple[EvictionName, float], Bools]
"""(policy, cache rate) -> whether each expert was in a slot when it was needed, `[num_tokens, num_layers, num_experts]`, of
the held-out tokens or of the first of them."""

CALIBRATION_BINS = 10


@dataclass(frozen=True)
class Transfer:
    """How fast experts move and layers compute, on which FETCHRATE depends.

    Args:
        bandwidth_bytes_per_s: bandwidth of the link.
        expert_bytes: bytes of one expert.
        layer_s: seconds from one MoE layer to the next.
    """

    bandwidth_bytes_per_s: float
    expert_bytes: float
    layer_s: float

    def fetch_rate(self, lookahead: int, experts: float) -> float:
        """Return the share of `experts` experts that arrives within `lookahead` layers, at most 1."""
        needed_bytes = self.expert_bytes * experts
        return min(1.0, lookahead * self.layer_s * self.bandwidth_bytes_per_s / needed_bytes) if needed_bytes else 1.0


def transfer_of(bandwidth: str | None, expert_bytes: str | None, layer_seconds: float | None) -> Transfer | None:
    """Return the link that the options of these names describe; None if none of them is given.

    Raises:
        ConfigError: one is missing, or is not a possible number.
    """
    given = {"--bandwidth": bandwidth, "--expert-bytes": expert_bytes, "--layer-seconds": layer_seconds}
    missing = [option for option, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if bandwidth is None or expert_bytes is None or layer_seconds is None:
        raise ConfigError(f"FETCHRATE needs all of {', '.join(given)}. {missing[0]} is missing.")
    if not 0 < layer_seconds < float("inf"):
        raise ConfigError(f"--layer-seconds must be more than 0, for example 0.002. Got {layer_seconds} instead.")
    return Transfer(
        _bytes(bandwidth, "--bandwidth", "24GB/s"), _bytes(expert_bytes, "--expert-bytes", "18.9MiB"), layer_seconds
    )


def _bytes(text: str, option: str, example: str) -> float:
    """Return a number of bytes, from text with or without a unit and `/s`."""
    from promoe.runtime.sizes import UNIT_BYTES

    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)(?:/s)?\s*", text, re.IGNORECASE)
    try:
        value = float(match[1]) * UNIT_BYTES[match[2].upper() or "B"] if match else 0.0
    except (ValueError, KeyError):
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(
            f"{option} must be a number of bytes more than 0, for example {example}. Got {text!r} instead."
        )
    return value


def top(scores: Floats, count: int) -> Bools:
    """Return a mask of the `count` largest of each row, and of equal ones those with lower ids."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    mask = np.zeros(scores.shape, dtype=np.bool_)
    np.put_along_axis(mask, order, True, axis=1)
    return mask


def name_of_rate(rate: float) -> str:
    """Return the name that results have for a cache rate, such as "12.5%"."""
    return f"{rate * 100:g}%"


class Misses:
    """Counts, over layers, of the absent experts that were used, predicted, and both."""

    def __init__(self) -> None:
        self.visits = self.used = self.predicted = self.both = 0

    def add(self, absent: Bools, needed: Bools, predicted: Bools) -> None:
        """Count one layer's visits, each `[num_tokens, num_experts]`."""
        self.visits += len(absent)
        self.used += int(np.count_nonzero(absent & needed))
        self.predicted += int(np.count_nonzero(absent & predicted))
        self.both += int(np.count_nonzero(absent & needed & predicted))

    def to_json(self, accuracy: float | None, lookahead: int, transfer: Transfer | None) -> dict[str, float | None]:
        """Return shares; None where there is nothing to divide by, or no link was given."""
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
    """Compares probabilities with what was used, over layers: of experts given probability p, a share p should be used."""

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
        """Return the Brier score, over all and per layer, and the calibration curve; None without any probabilities."""
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
        tokens: mask `[num_tokens]` of these tokens; None: all.
        num_layers: MoE layers of the model.
        caches: for misses.
        fetched: numbers of experts whose recall is measured.
    """

    def __init__(self, tokens: Bools | None, num_layers: int, caches: Caches, fetched: Sequence[int] = ()) -> None:
        self._tokens = tokens
        self._caches = caches
        self.recall: dict[int, list[float | None]] = {count: [None] * num_layers for count in fetched}
        self.accuracy: list[float | None] = [None] * num_layers
        self.exact: list[float | None] = [None] * num_layers
        self.coverage: list[float | None] = [None] * num_layers
        self.next_token: list[float | None] = [None] * num_layers
        self.misses = {cache: Misses() for cache in caches}
        self.calibration = Calibration(num_layers)

    def add(self, layer_idx: int, scores: Floats, predicted: Bools, needed: Bools) -> None:
        """Measure a layer from its scores, the experts predicted and those needed, each `[num_tokens, num_experts]`."""
        from sklearn.metrics import coverage_error

        mine = slice(None) if self._tokens is None else self._tokens
        scores, right, wanted = scores[mine], predicted[mine] & needed[mine], needed[mine]
        if not len(wanted):
            return
        self.accuracy[layer_idx] = float(np.count_nonzero(right) / np.count_nonzero(wanted))
        self.exact[layer_idx] = float((right == wanted).all(axis=1).mean())
        for count, recall in self.recall.items():
            recall[layer_idx] = float(np.count_nonzero(top(scores, count) & wanted) / np.count_nonzero(wanted))
        # coverage_error checks int8 faster than bools.
        self.coverage[layer_idx] = float(coverage_error(wanted.astype(np.int8), scores))
        for cache, held in self._caches.items():
            replayed = slice(len(held)) if self._tokens is None else np.flatnonzero(self._tokens[: len(held)])
            self.misses[cache].add(~held[replayed, layer_idx], needed[replayed], predicted[replayed])

    def add_probabilities(
        self, layer_idx: int, sample: npt.NDArray[np.intp], probabilities: Floats, needed: Bools
    ) -> None:
        """Measure a layer's probabilities `[len(sample), num_experts]` of a sample of the tokens."""
        mine = slice(None) if self._tokens is None else self._tokens[sample]
        self.calibration.add(layer_idx, probabilities[mine], needed[sample][mine])

    def add_next_token(self, layer_idx: int, continues: Bools, predicted: Bools, needed: Bools) -> None:
        """Measure what the previous token predicted of each token that continues a prompt, `[num_tokens, num_experts]`."""
        mine = continues if self._tokens is None else continues & self._tokens
        wanted = needed[mine]
        if len(wanted):
            self.next_token[layer_idx] = float(np.count_nonzero(predicted[mine] & wanted) / np.count_nonzero(wanted))

    def to_json(self, lookahead: int, transfer: Transfer | None) -> dict[str, Any]:
        """Return the figures that `evaluate.judge` describes.

        There are no means if a layer other than the first is not predicted: they could not be compared with another kind's.
        """
        accuracy = _mean(self.accuracy, self.accuracy[1:])
        misses: dict[str, dict[str, Any]] = {}
        for (policy, rate), counts in self.misses.items():
            figures = (counts if accuracy is not None else Misses()).to_json(accuracy, lookahead, transfer)
            misses.setdefault(policy, {})[name_of_rate(rate)] = figures
        return {
            "accuracy": accuracy,
            "exact": _mean(self.exact, self.exact[1:]),
            "recall": {str(count): _mean(of[lookahead:], of[lookahead:]) for count, of in self.recall.items()},
            "coverage_error": _mean(self.coverage, self.coverage[1:]),
            "next_token_accuracy": _mean(self.next_token, self.next_token[:lookahead]),
            "layers": self.accuracy,
            "exact_layers": self.exact,
            "recall_layers": {str(count): of_layers for count, of_layers in self.recall.items()},
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
