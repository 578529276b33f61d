"""Results of an evaluation as its JSON has them, made up for tests."""

from __future__ import annotations

from typing import Any


def figures(accuracy: float | None, **changes: Any) -> dict[str, Any]:
    """Of one kind and lookahead; a model of three layers, the first of which is not predicted."""
    layers = [None, accuracy, accuracy]
    return {
        "accuracy": accuracy,
        "exact": None if accuracy is None else accuracy / 2,
        "recall": {},
        "recall_layers": {},
        "coverage_error": None if accuracy is None else 4.25,
        "next_token_accuracy": None,
        "layers": layers,
        "exact_layers": layers,
        "coverage_error_layers": layers,
        "next_token_layers": [None] * 3,
        "calibration": None,
        "misses": {"lru": {"25%": misses(0.614, 0.4849), "100%": misses(None, None)}},
        "prefill": None,
        "decode": None,
    } | changes


def misses(recall: float | None, precision: float | None) -> dict[str, float | None]:
    return {
        "recall": recall,
        "precision": precision,
        "predicted_per_visit": None,
        "fetch_rate": recall,
        "goodpred": precision,
    }


def calibration(brier: float) -> dict[str, Any]:
    return {"brier": brier, "layers": [None, brier, brier], "predicted": [0.05, 0.9], "observed": [0.1, 0.8]}
