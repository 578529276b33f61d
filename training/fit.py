"""Trains the networks of a predictor on a recorded trace: Lightning's modules, and what they need of the trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import lightning
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from promoe.predictors.network import ResidualNetwork
from promoe.predictors.trained import TrainedConfig, TrainedPredictor
from promoe.training.losses import LOSSES
from promoe.training.recorded_traces import RecordedTrace
from promoe.training.routing_traces import TraceError
from promoe.training.tables import spread

# Of the prompts that are fitted on, the share that decides when to stop, and calibrates.
VALIDATION_SHARE = 0.1
# Rows for the mean and deviation of the gate inputs.
STANDARDISE_ROWS = 20_000


class Batch(NamedTuple):
    """Some tokens, with what their layers and the next token's chose.

    Args:
        gate_inputs: bfloat16 `[n, L, H]`.
        chosen: 0/1 `[n, 2 L, E]`, of this token's layers, then of the next one's.
        gate: the gates' log probabilities `[n, 2 L, E]`.
        has_next: `[n]`, whether the next row continues the prompt.
    """

    gate_inputs: torch.Tensor
    chosen: torch.Tensor
    gate: torch.Tensor
    has_next: torch.Tensor


class TraceRows(Dataset[int]):
    """Tokens of a trace, gathered a batch at a time.

    Args:
        trace: recorded.
        start: first row.
        stop: row after the last.
    """

    def __init__(self, trace: RecordedTrace, start: int, stop: int) -> None:
        self._trace = trace
        self._start = start
        self._count = stop - start
        routing = trace.routing
        self._experts = routing.experts
        self._num_experts = routing.num_experts
        self._is_first = np.zeros(routing.num_tokens + 1, dtype=np.bool_)
        self._is_first[routing.prompt_starts] = True
        self._is_first[-1] = True

    def __len__(self) -> int:
        return self._count

    def __getitems__(self, positions: Sequence[int]) -> Batch:
        rows = self._start + np.asarray(positions)
        has_next = ~self._is_first[rows + 1]
        following = np.where(has_next, rows + 1, rows)
        both = np.stack([rows, following], axis=1)
        flat: npt.NDArray[np.intp] = both.reshape(-1)
        shape = (len(rows), 2 * self._experts.shape[1], self._num_experts)
        chosen = torch.zeros(shape)
        ids = torch.from_numpy(self._experts[flat].astype(np.int64)).view(len(rows), shape[1], -1)
        chosen.scatter_(2, ids, 1.0)
        logits = torch.from_numpy(self._trace.gate_logits(flat)).view(shape)
        return Batch(
            self._trace.gate_inputs(rows), chosen, log_probabilities(logits), torch.from_numpy(has_next).float()
        )


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """A gate's own distribution in logarithms, from logits, or from scores that are one already."""
    sums_to_one = bool(((logits >= 0).all(-1) & ((logits.sum(-1) - 1).abs() < 0.02)).all())
    return logits.clamp_min(1e-9).log() if sums_to_one else logits.log_softmax(-1)


class TraceData(lightning.LightningDataModule):
    """The prompts to fit on, the first 80% of a trace, divided once more by prompt into training and validation.

    Args:
        trace: recorded.
        batch_size: tokens.
        seed: of the order.

    Raises:
        TraceError: too few prompts.
    """

    def __init__(self, trace: RecordedTrace, batch_size: int = 512, seed: int = 0) -> None:
        super().__init__()
        fit, _ = trace.routing.split()
        training, _ = fit.split(1 - VALIDATION_SHARE)
        self.training = TraceRows(trace, 0, training.num_tokens)
        self.validation = TraceRows(trace, training.num_tokens, fit.num_tokens)
        self._batch_size = batch_size
        self._seed = seed
        if len(self.training) < batch_size:
            raise TraceError(
                f"{trace.folder}: {len(self.training):,} tokens to train on, less than one batch of {batch_size:,}. Record "
                "more with `promoe-train collect --max-tokens`, or choose a smaller --batch-size."
            )

    def train_dataloader(self) -> DataLoader[int]:
        """Shuffled anew every epoch, the same way in a run that was interrupted; divided among processes."""
        return self._loader(self.training, shuffle=True)

    def val_dataloader(self) -> DataLoader[int]:
        """In order."""
        return self._loader(self.validation, shuffle=False)

    def _loader(self, rows: TraceRows, shuffle: bool) -> DataLoader[int]:
        trainer = self.trainer
        sampler: DistributedSampler[int] = DistributedSampler(
            rows,
            num_replicas=1 if trainer is None else trainer.world_size,
            rank=0 if trainer is None else trainer.global_rank,
            shuffle=shuffle,
            seed=self._seed,
            drop_last=shuffle,
        )
        return DataLoader(rows, self._batch_size, sampler=sampler, drop_last=shuffle, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch


class PredictorModule(lightning.LightningModule):
    """All layers and distances of a predictor, trained together.

    Args:
        predictor: to train.
        loss: name in `LOSSES`.
        learning_rate: the largest, of a one-cycle schedule.
        weight_decay: of AdamW.
    """

    def __init__(self, predictor: TrainedPredictor, loss: str, learning_rate: float, weight_decay: float) -> None:
        super().__init__()
        self.predictor = predictor
        self._loss = LOSSES[loss]
        self._learning_rate = learning_rate
        self._weight_decay = weight_decay
        config = predictor.config
        layers, steps = torch.arange(config.num_layers)[:, None], torch.arange(1, config.lookahead + 1)[None]
        self._targets = layers + steps  # [L, K], from L on: of the next token
        self._predicted = torch.tensor(
            [[config.predicts(i, k) for k in range(1, config.lookahead + 1)] for i in range(config.num_layers)]
        )

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Mean loss over what is predicted."""
        scores, chosen, weight = self._scored(batch)
        loss = self._mean_loss(batch, scores, chosen, weight)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Loss, and the share of chosen experts that were predicted, within the token, over all distances."""
        scores, chosen, weight = self._scored(batch)
        loss = self._mean_loss(batch, scores, chosen, weight)
        in_token = weight * (self._targets < len(self._targets))[..., None]
        hits = chosen.gather(-1, scores.topk(self.predictor.config.top_k).indices).sum(-1)
        accuracy = (hits * in_token).sum() / (chosen.sum(-1) * in_token).sum().clamp_min(1)
        size = len(batch.has_next)
        self.log("val_loss", loss, prog_bar=True, batch_size=size, sync_dist=True)
        self.log("val_accuracy", accuracy, prog_bar=True, batch_size=size, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """AdamW on a one-cycle schedule over all steps that the trainer will take."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self._learning_rate, weight_decay=self._weight_decay)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self._learning_rate, steps, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _scored(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scores and chosen `[L, K, n, E]`, and the weight `[L, K, n]` of each, 0 or 1."""
        scores = self.predictor.scores(batch.gate_inputs)
        chosen = batch.chosen.transpose(0, 1)[self._targets]
        in_token = (self._targets < len(self._targets))[..., None]
        return scores, chosen, self._predicted[..., None] * torch.where(in_token, 1.0, batch.has_next)

    def _mean_loss(
        self, batch: Batch, scores: torch.Tensor, chosen: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        losses = self._loss(scores, chosen, batch.gate.transpose(0, 1)[self._targets])
        return (losses * weight).sum() / weight.sum()


def new_predictor(trace: RecordedTrace, rows: TraceRows, config: TrainedConfig, seed: int) -> TrainedPredictor:
    """An untrained predictor for a trace's model: standardised inputs, and gates to start from where the kind has them."""
    torch.manual_seed(seed)
    predictor = TrainedPredictor(config)
    sample = trace.gate_inputs(spread(len(rows), STANDARDISE_ROWS)).float()
    predictor.network.standardise(sample.mean(0), sample.std(0))
    weights = [_gate_weight(gate, config) for gate in trace.gates]
    if isinstance(predictor.network, ResidualNetwork) and all(weight is not None for weight in weights):
        predictor.network.start_from_gates([weight for weight in weights if weight is not None])
    return predictor


def _gate_weight(gate: dict[str, torch.Tensor], config: TrainedConfig) -> torch.Tensor | None:
    wanted = (config.num_experts, config.hidden_size)
    return next((tensor for tensor in gate.values() if tuple(tensor.shape) == wanted), None)
