"""What `promoe-train fit` does: train, stop early, calibrate, fit the reuse prior, keep; go on where a run was interrupted."""

from __future__ import annotations

import json
import logging
import os
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.linear_model import LogisticRegression

import promoe
from promoe.errors import ConfigError, check_at_least
from promoe.files import read_json, write_atomically
from promoe.predictors.trained import NETWORKS, TRAINED_KINDS, TrainedConfig, TrainedPredictor, above_threshold
from promoe.training.fit import PredictorModule, TraceData, TraceRows, new_predictor
from promoe.training.kinds import PREDICTOR_FOLDER, SETTINGS_FILE
from promoe.training.losses import LOSSES
from promoe.training.recorded_traces import RecordedTrace
from promoe.training.reuse_fit import fit_reuse
from promoe.training.tables import spread
from promoe.training.trace_folder import require_same_settings
from promoe.training.trainer_options import TrainerOptions

CHECKPOINT_FOLDER = "checkpoints"
# Rows that calibrate; each is one outcome per expert, layer and distance.
CALIBRATION_ROWS = 4096


@dataclass(frozen=True)
class Fit:
    """What is trained, on what, how, and where it is kept."""

    trace: str
    out: Path
    kind: str
    loss: str
    lookahead: int
    width: int | None
    learning_rate: float
    weight_decay: float
    batch_size: int
    patience: int
    seed: int
    trainer: TrainerOptions

    def __post_init__(self) -> None:
        for name, found, allowed in (("kind", self.kind, TRAINED_KINDS), ("loss", self.loss, tuple(LOSSES))):
            if found not in allowed:
                raise ConfigError(f"--{name} must be of {', '.join(allowed)}. Got {found!r} instead.")
        check_at_least(
            1, lookahead=self.lookahead, batch_size=self.batch_size, patience=self.patience, width=self.width
        )

    def settings(self) -> dict[str, Any]:
        """What must be the same for a run to be gone on with."""
        values = asdict(self)
        del values["out"]
        values["reuse_foreseen"] = NETWORKS[self.kind].may_foresee_reuse
        values["trainer"] = {"max_epochs": self.trainer.max_epochs, "precision": self.trainer.precision}
        return values


def run_fit(task: Fit, out: TextIO) -> None:
    """Train a predictor, or go on with it, and keep it in `<out>/predictor`.

    Raises:
        TraceError: the trace cannot be used.
        ConfigError: the folder holds a run with other settings, or cannot be written.
    """
    trace = RecordedTrace(task.trace)
    settings = {**task.settings(), "num_tokens": trace.num_tokens}
    data = TraceData(trace, task.batch_size, task.seed)
    predictor = new_predictor(trace, data.training, _config(task, trace), task.seed)
    _claim(task.out, settings)
    module = PredictorModule(predictor, task.loss, task.learning_rate, task.weight_decay)
    trainer = _train(task, module, data)
    if not trainer.is_global_zero:
        return  # one of several processes
    calibrate(predictor, data.validation)
    predictor.to(torch.bfloat16).float()  # as it will be kept: what is learned of its word must be of that
    predictor.keep_reuse(fit_reuse(trace.routing.split()[0], predictor=predictor))
    folder = task.out / PREDICTOR_FOLDER
    predictor.to(torch.bfloat16).save_pretrained(folder)
    size = sum(parameter.numel() for parameter in predictor.parameters())
    print(f"{task.kind} of {size:,} parameters, {trainer.current_epoch} epochs, in {folder}", file=out)


def _config(task: Fit, trace: RecordedTrace) -> TrainedConfig:
    info, routing = trace.info, trace.routing
    return TrainedConfig(
        kind=task.kind,
        model_type=info.model_type,
        num_layers=info.num_layers,
        hidden_size=info.hidden_size,
        num_experts=routing.num_experts,
        top_k=routing.top_k,
        lookahead=task.lookahead,
        width=task.width or default_width(task.kind, info.hidden_size),
        base_model=info.model,
        base_revision=info.revision,
        foresees_reuse=NETWORKS[task.kind].may_foresee_reuse,
        versions={**info.versions, "promoe": promoe.__version__, "lightning": lightning.__version__},
    )


def default_width(kind: str, hidden_size: int) -> int:
    """Half the hidden size (the paper's 2 M parameters at 2,048); a trunk serves all distances, and little is enough."""
    return min(max(hidden_size // 2, 32), 128) if kind == "residual" else max(hidden_size // 2, 32)


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Make the folder, or check that it holds the run that is to be gone on with."""
    path = folder / SETTINGS_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.path.exists(path):
            write_atomically(path, [json.dumps(settings, indent=2), "\n"])
            return
        found = read_json(path)
        if not isinstance(found, dict):
            raise ValueError(f"{SETTINGS_FILE} holds no object")
    except (OSError, ValueError) as error:
        raise ConfigError(f"The folder '{folder}' cannot be used: {error}. Choose another --out.") from error
    require_same_settings(settings, found, folder, "run")


def _train(task: Fit, module: PredictorModule, data: TraceData) -> lightning.Trainer:
    folder = task.out / CHECKPOINT_FOLDER
    best = ModelCheckpoint(folder, filename="best", monitor="val_loss", save_last=True, enable_version_counter=False)
    options = asdict(task.trainer)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        # Rows are gathered from a memory map: workers would only copy them between processes.
        warnings.filterwarnings("ignore", ".*treespec", FutureWarning)  # Lightning's own affair with torch
        warnings.filterwarnings("ignore", ".*does not have many workers")
        warnings.filterwarnings("ignore", ".*Checkpoint directory .* exists and is not empty")
        warnings.filterwarnings("ignore", ".*The number of training batches .* is smaller than the logging interval")
        trainer = lightning.Trainer(
            **options,
            callbacks=[best, EarlyStopping("val_loss", patience=task.patience)],
            logger=False,
            gradient_clip_val=5.0,
            use_distributed_sampler=False,  # the data module divides rows itself
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        last = folder / "last.ckpt"
        trainer.fit(module, data, ckpt_path=_checked(last) if os.path.exists(last) else None, weights_only=True)
    state = torch.load(best.best_model_path, weights_only=True, map_location="cpu")["state_dict"]
    module.load_state_dict(state)
    return trainer


def _checked(path: Path) -> str:
    """The path of Lightning's checkpoint, if it holds nothing but numbers; else ConfigError. A pickle could run code."""
    try:
        torch.load(path, weights_only=True, map_location="meta")
    except Exception as error:  # of a damaged archive, whatever reading one raises
        raise ConfigError(
            f"The checkpoint {path} of an interrupted run cannot be read: {type(error).__name__}: {str(error)[:300]}. Delete "
            "it to begin again."
        ) from error
    return str(path)


def calibrate(predictor: TrainedPredictor, rows: TraceRows) -> None:
    """Fit slope and offset of every layer and distance, so that of what is given probability p, a share p is used."""
    config = predictor.config
    sample = spread(len(rows), CALIBRATION_ROWS)
    batch = rows.__getitems__(sample.tolist())
    with torch.inference_mode():
        distances = above_threshold(predictor.scores(batch.gate_inputs), config.top_k)
    for i in range(config.num_layers):
        for k in range(1, config.lookahead + 1):
            usable = batch.has_next.bool() if i + k >= config.num_layers else torch.ones(len(sample), dtype=torch.bool)
            if not config.predicts(i, k) or not usable.any():
                continue
            x = distances[i, k - 1][usable].reshape(-1, 1).numpy()
            y = batch.chosen[usable, i + k].reshape(-1).numpy()
            regression = LogisticRegression().fit(x, y)
            # Not below 0, whatever a few outcomes say: a higher score never means less likely.
            predictor.slope[i, k - 1] = max(1e-3, float(regression.coef_[0, 0]))
            predictor.offset[i, k - 1] = float(regression.intercept_[0])
