"""What `promoe-train fit` does: train, stop early, calibrate, fit the reuse prior, store; go on after an interruption."""

from __future__ import annotations

import json
import logging
import os
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.linear_model import LogisticRegression

import promoe
from promoe.errors import ConfigError
from promoe.files import read_json, write_atomically
from promoe.predictors.trained import NETWORKS, TrainedConfig, TrainedPredictor, above_threshold
from promoe.training.baselines import spread
from promoe.training.kinds import PREDICTOR_FOLDER, SETTINGS_FILE
from promoe.training.lightning_modules import PredictorModule, TraceData, TraceRows, new_predictor
from promoe.training.options import Fit
from promoe.training.recorded_traces import RecordedTrace
from promoe.training.reuse import fit_reuse
from promoe.training.trace_folder import require_same

CHECKPOINT_FOLDER = "checkpoints"
# Calibration uses so many rows, each with an outcome per expert, layer and distance.
CALIBRATION_ROWS = 4096


def fit(options: Fit) -> None:
    """Train a predictor, or go on with it, and keep it in `<out>/predictor`.

    Raises:
        TraceError: the trace cannot be used.
        ConfigError: the folder holds a run with other settings, or cannot be written.
    """
    trace, folder = RecordedTrace(options.trace), Path(options.out)
    data = TraceData(trace, options.batch_size, options.seed)
    predictor = new_predictor(trace, data.training, _config(options, trace), options.seed)
    _claim(folder, _settings(options, trace))
    module = PredictorModule(predictor, options.loss, options.learning_rate, options.weight_decay)
    trainer = _train(options, module, data)
    if not trainer.is_global_zero:
        return  # one of several processes
    calibrate(predictor, data.validation)
    predictor.to(torch.bfloat16).float()  # as it will be stored: the reuse prior must learn from what that foresees
    predictor.keep_reuse(fit_reuse(trace.routing.split()[0], predictor=predictor))
    predictor.to(torch.bfloat16).save_pretrained(folder / PREDICTOR_FOLDER)
    size = sum(parameter.numel() for parameter in predictor.parameters())
    epochs = trainer.current_epoch
    print(f"{options.kind} of {size:,} parameters, {epochs} epochs, in {folder / PREDICTOR_FOLDER}")


def _settings(options: Fit, trace: RecordedTrace) -> dict[str, Any]:
    """Return the settings in which a command must agree with a run to go on with it."""
    values = asdict(options)
    del values["out"]
    return {
        **values,
        "trainer": {"max_epochs": options.trainer.max_epochs, "precision": options.trainer.precision},
        "reuse_foreseen": NETWORKS[options.kind].may_foresee_reuse,
        "num_tokens": trace.num_tokens,
    }


def _config(options: Fit, trace: RecordedTrace) -> TrainedConfig:
    info, routing = trace.info, trace.routing
    return TrainedConfig(
        kind=options.kind,
        model_type=info.model_type,
        num_layers=info.num_layers,
        hidden_size=info.hidden_size,
        num_experts=routing.num_experts,
        top_k=routing.top_k,
        lookahead=options.lookahead,
        width=options.width or default_width(options.kind, info.hidden_size),
        base_model=info.model,
        base_revision=info.revision,
        foresees_reuse=NETWORKS[options.kind].may_foresee_reuse,
        versions={**info.versions, "promoe": promoe.__version__, "lightning": lightning.__version__},
    )


def default_width(kind: str, hidden_size: int) -> int:
    """Return half the hidden size (the paper's 2 M parameters at 2,048), or less for a trunk that all distances share."""
    return min(max(hidden_size // 2, 32), 128) if kind == "residual" else max(hidden_size // 2, 32)


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Make the folder of a run, or check that it holds a run with the same settings.

    Raises:
        ConfigError: it holds another run, or cannot be used.
    """
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
    require_same(settings, found, folder, "run")


def _train(options: Fit, module: PredictorModule, data: TraceData) -> lightning.Trainer:
    folder = Path(options.out) / CHECKPOINT_FOLDER
    best = ModelCheckpoint(folder, filename="best", monitor="val_loss", save_last=True, enable_version_counter=False)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*treespec", FutureWarning)  # between Lightning and torch
        # Rows are gathered from a memory map: workers would only copy them between processes.
        warnings.filterwarnings("ignore", ".*does not have many workers")
        warnings.filterwarnings("ignore", ".*Checkpoint directory .* exists and is not empty")
        warnings.filterwarnings("ignore", ".*The number of training batches .* is smaller than the logging interval")
        trainer = lightning.Trainer(
            **asdict(options.trainer),
            callbacks=[best, EarlyStopping("val_loss", patience=options.patience)],
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
    """Return the path of Lightning's checkpoint if it holds only numbers, and otherwise raise: a pickle could run code.

    Raises:
        ConfigError: it holds something else, or is damaged.
    """
    try:
        torch.load(path, weights_only=True, map_location="meta")
    except Exception as error:  # reading a damaged archive can raise anything
        raise ConfigError(
            f"The checkpoint {path} of an interrupted run cannot be read: {type(error).__name__}: {str(error)[:300]}. Delete "
            "it to begin again."
        ) from error
    return str(path)


def calibrate(predictor: TrainedPredictor, rows: TraceRows) -> None:
    """Fit slope and offset of every layer and distance, so that a share p of the experts given probability p is used."""
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
            # Positive, whatever a few outcomes say: a higher score never means less likely.
            predictor.slope[i, k - 1] = max(1e-3, float(regression.coef_[0, 0]))
            predictor.offset[i, k - 1] = float(regression.intercept_[0])
