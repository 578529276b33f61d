"""What `promoe-train export` does: a trained predictor in a folder of its own, with a card that says how good it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from promoe import files
from promoe.errors import ConfigError
from promoe.predictors.trained import CONFIG_FILE, TrainedPredictor
from promoe.training.kinds import PREDICTOR_FOLDER, SETTINGS_FILE

CARD_FILE = "README.md"


@dataclass(frozen=True)
class Export:
    """Which run, where to, and what `evaluate` wrote about it."""

    run: Path
    out: Path
    evaluation: Path | None


def run_export(task: Export, out: TextIO) -> None:
    """Write weights, config and card.

    Raises:
        ConfigError: the run has no predictor yet, the evaluation cannot be read, or the folder holds something else.
    """
    source = task.run / PREDICTOR_FOLDER
    if not os.path.isfile(source / CONFIG_FILE):
        raise ConfigError(
            f"{task.run} holds no finished run: {PREDICTOR_FOLDER}/{CONFIG_FILE} is not there. Repeat `promoe-train fit`, "
            "which goes on where it was interrupted."
        )
    predictor = TrainedPredictor.load(str(source))
    evaluation = read_json(task.evaluation) if task.evaluation is not None else {}
    settings = read_json(task.run / SETTINGS_FILE)
    card = {"training": training_lines(settings), "evaluation": evaluation_table(evaluation)}
    if os.path.exists(task.out) and not os.path.isdir(task.out):
        raise ConfigError(f"'{task.out}' is not a folder. Choose another --out.")
    if os.path.exists(task.out) and any(task.out.iterdir()) and not os.path.isfile(task.out / CONFIG_FILE):
        raise ConfigError(f"The folder '{task.out}' holds something other than a predictor. Choose another --out.")
    try:
        (task.out / CARD_FILE).unlink(missing_ok=True)  # one of an earlier export would be kept
        predictor.to(torch.bfloat16).save_pretrained(task.out, model_card_kwargs=card)
    except OSError as error:
        raise ConfigError(f"Cannot write to '{task.out}': {error.strerror or error}. Choose another --out.") from error
    print(f'written to {task.out}; use it with promoe.from_pretrained(MODEL, predictor="{task.out}")', file=out)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ConfigError: there is none.
    """
    try:
        values = files.read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read {path}: {error}. Check the path.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object. Found {type(values).__name__} instead.")
    return values


def training_lines(settings: Mapping[str, Any]) -> str:
    """How it was trained, one item a line."""
    shown = ("kind", "loss", "lookahead", "num_tokens", "batch_size", "learning_rate", "weight_decay", "seed")
    return "\n".join(f"- {name}: {_cell(str(settings[name]))}" for name in shown if name in settings)


def evaluation_table(evaluation: Mapping[str, Any]) -> str:
    """Accuracy on held-out prompts in Markdown: a row per kind, a column per distance.

    Raises:
        ConfigError: this is not what `evaluate --json` writes.
    """
    if not evaluation:
        return "Not evaluated yet (`promoe-train evaluate --json FILE`, then `promoe-train export --evaluation FILE`)."
    try:
        distances = sorted({int(k) for by_distance in evaluation.values() for k in by_distance})
        rows = [
            [_cell(kind), *(_percent(by_distance.get(str(k), {}).get("accuracy")) for k in distances)]
            for kind, by_distance in evaluation.items()
        ]
    except (AttributeError, ValueError, TypeError, OverflowError) as error:
        raise ConfigError(
            f"The evaluation is not what `promoe-train evaluate --json` writes: {type(error).__name__}: {error}."
        ) from error
    head = ["predictor", *(f"k = {k}" for k in distances)]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(text: str) -> str:
    """On one line, and no Markdown of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"
