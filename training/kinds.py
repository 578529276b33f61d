"""Every kind that `evaluate` can judge, by its name or, if it was trained, by its folder.

Names are checked before anything is read, and torch is loaded only for kinds that need hidden states.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from promoe.errors import ConfigError, PromoeError
from promoe.files import read_json
from promoe.training.routing_traces import RoutingTrace, TraceError
from promoe.training.tables import KINDS, Kind

# Those of `hidden_kinds.HIDDEN_KINDS`, which would have to be imported.
NAMES_OF_HIDDEN_KINDS = ("gate", "linear", "sklearn-mlp")
CONFIG_FILE, PREDICTOR_FOLDER, SETTINGS_FILE = "config.json", "predictor", "fit.json"

Fitting = Callable[[], Kind]
"""Fits a kind when its turn comes."""


class UnknownKindError(PromoeError):
    """There is no kind of that name, nor a folder with a trained predictor."""


def check_kinds(names: Sequence[str]) -> None:
    """Raise UnknownKindError if one of them is neither a kind nor the folder of a trained predictor."""
    for name in names:
        if name in KINDS or name in NAMES_OF_HIDDEN_KINDS:
            continue
        if not os.path.isdir(name):
            raise UnknownKindError(
                f"There is no kind {name[:500]!r}, nor a folder of that name. Choose from {', '.join(KINDS)}, "
                f"{', '.join(NAMES_OF_HIDDEN_KINDS)}, or give the folder of a trained predictor."
            )
        folder_of_predictor(name)


def needs_hidden_states(name: str) -> bool:
    """Whether a kind, or folder, predicts from more than ids."""
    return name not in KINDS


def folder_of_predictor(name: str) -> Path:
    """The folder itself, or that in a run of `promoe-train fit`.

    Raises:
        UnknownKindError: there is no predictor.
    """
    for folder in (Path(name), Path(name) / PREDICTOR_FOLDER):
        if os.path.isfile(folder / CONFIG_FILE):
            return folder
    raise UnknownKindError(
        f"The folder {name!r} holds no trained predictor: neither {CONFIG_FILE} nor {PREDICTOR_FOLDER}/{CONFIG_FILE}. "
        "Train one with `promoe-train fit`."
    )


def prepare(names: Sequence[str], trace: RoutingTrace, fit: RoutingTrace) -> dict[str, Fitting]:
    """What to judge, under the name that results have it by: the kind, of trained predictors their config's kind.

    Args:
        names: kinds, and folders of trained predictors.
        trace: what they are judged on a part of.
        fit: the part to learn from.

    Raises:
        UnknownKindError: see `check_kinds`.
        TraceError: a kind needs hidden states, and the trace holds ids only.
        ConfigError: a trained predictor cannot be read, or is for another model.
    """
    check_kinds(names)
    if trace.recorded is None:
        for name in filter(needs_hidden_states, names):
            raise TraceError(
                f"The kind {name!r} predicts from hidden states, and the trace holds only ids. Record a trace with "
                f"`promoe-train collect` and give its folder, or choose from {', '.join(KINDS)}."
            )
    result: dict[str, Fitting] = {}
    for name in dict.fromkeys(names):
        if name in KINDS:
            result[name] = partial(KINDS[name], fit)
        elif name in NAMES_OF_HIDDEN_KINDS:
            from promoe.training.hidden_kinds import HIDDEN_KINDS

            result[name] = partial(HIDDEN_KINDS[name], fit)
        else:
            kind, fitting = _trained(folder_of_predictor(name), trace)
            label = kind if kind not in result else f"{kind} ({_run_name(name)})"
            result[label if label not in result else name] = fitting
    return result


def _run_name(name: str) -> str:
    path = Path(name).resolve()
    return path.parent.name if path.name == PREDICTOR_FOLDER else path.name


def _trained(folder: Path, trace: RoutingTrace) -> tuple[str, Fitting]:
    """(its kind, the kind to judge) of a trained predictor, if it is for the trace's model."""
    from promoe.predictors.trained import TrainedPredictor
    from promoe.training.hidden_kinds import Trained
    from promoe.training.recorded_traces import RecordedTrace

    predictor = TrainedPredictor.load(str(folder))
    assert isinstance(trace.recorded, RecordedTrace)
    info, config = trace.recorded.info, predictor.config
    mismatch = config.mismatch(
        model_type=info.model_type,
        num_layers=trace.num_layers,
        hidden_size=info.hidden_size,
        num_experts=trace.num_experts,
        top_k=trace.top_k,
    )
    if mismatch is not None:
        field, found, expected = mismatch
        raise ConfigError(
            f"The predictor in {folder} does not fit the trace {trace.recorded.folder}: expected {field} = {expected!r}, "
            f"found {found!r}. It was trained for {config.base_model or 'another model'}; give one that was trained for "
            f"{info.model}."
        )
    return config.kind, partial(Trained, predictor)


def note_on_training(name: str, trace: RoutingTrace) -> str | None:
    """What a reader must know of a run of `fit` that saw another number of tokens: its prompts were divided elsewhere."""
    try:
        num_tokens = read_json(Path(name) / SETTINGS_FILE)["num_tokens"]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None  # an exported predictor: nothing is known
    if num_tokens == trace.num_tokens or type(num_tokens) is not int:
        return None
    return (
        f"note: {name} was trained on a trace of {num_tokens:,} tokens, this one has {trace.num_tokens:,}. If it is the same "
        "one, grown since, it may have been trained on some of the prompts that it is judged on."
    )
