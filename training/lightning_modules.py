"""Lightning's modules that train a predictor's networks on a recorded trace: the rows, the data module, the network module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import lightning
import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from promoe.predictors.base import gate_weight
from promoe.predictors.network import ResidualNetwork
from promoe.predictors.trained import TrainedConfig, TrainedPredictor
from promoe.scheduler.reuse import HORIZON_VISITS
from promoe.training.baselines import spread
from promoe.training.losses import LOSSES
from promoe.training.recorded_traces import RecordedTrace
from promoe.training.routing_traces import TraceError

# This share of the prompts that are fitted on decides when to stop, and calibrates.
VALIDATION_SHARE = 0.1
# The mean and deviation of the gate inputs are taken over so many rows.
STANDARDISE_ROWS = 20_000


class Batch(NamedTuple):
    """Some tokens, with the experts that their layers and the next token's layers chose.

    Args:
        gate_inputs: bfloat16 `[n, L, H]`.
        chosen: 0/1 `[n, 2 L, E]`, for this token's layers, then for the next token's.
        gate: the gates' log probabilities `[n, 2 L, E]`.
        has_next: `[n]`, whether the next row continues the prompt.
        reused: 0/1 `[n, L, E]`, whether a layer uses an expert within the next `HORIZON_VISITS` tokens.
        has_horizon: `[n]`, whether the prompt goes on for so many tokens.
    """

    gate_inputs: torch.Tensor
    chosen: torch.Tensor
    gate: torch.Tensor
    has_next: torch.Tensor
    reused: torch.Tensor
    has_horizon: torch.Tensor


class TraceRows(Dataset[int]):
    """Tokens of a trace, which are gathered a batch at a time.

    Args:
        trace: a recorded trace.
        start: the first row.
        stop: the row after the last.
    """

    def __init__(self, trace: RecordedTrace, start: int, stop: int) -> None:
        self._trace = trace
        self._start = start
        self._count = stop - start
        routing = trace.routing
        self._experts = routing.experts
        self._num_experts = routing.num_experts
        # How many tokens follow each token in its prompt.
        ends = np.repeat(np.cumsum(routing.prompt_lengths), routing.prompt_lengths)
        self._num_after = ends - np.arange(routing.num_tokens) - 1

    def __len__(self) -> int:
        return self._count

    def __getitems__(self, positions: Sequence[int]) -> Batch:
        rows = self._start + np.asarray(positions)
        num_after = self._num_after[rows]
        both = np.stack([rows, rows + np.minimum(num_after, 1)], axis=1)
        shape = (len(rows), 2 * self._experts.shape[1], self._num_experts)
        logits = torch.from_numpy(self._trace.gate_logits(both.reshape(-1))).view(shape)
        ahead = rows[:, None] + np.minimum(num_after[:, None], np.arange(1, HORIZON_VISITS + 1))
        return Batch(
            gate_inputs=self._trace.gate_inputs(rows),
            chosen=self._used(both).view(shape),
            gate=log_probabilities(logits),
            has_next=torch.from_numpy(num_after >= 1).float(),
            reused=self._used(ahead).amax(1),
            has_horizon=torch.from_numpy(num_after >= HORIZON_VISITS).float(),
        )

    def _used(self, rows: npt.NDArray[np.intp]) -> torch.Tensor:
        """Return 0/1 `[.., L, E]`, whether each expert is used, for rows `[..]`."""
        ids = torch.from_numpy(self._experts[rows].astype(np.int64))
        return torch.zeros(*ids.shape[:-1], self._num_experts).scatter_(-1, ids, 1.0)


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Return the log of a gate's own distribution, from its logits, or from scores that are a distribution already."""
    sums_to_one = bool(((logits >= 0).all(-1) & ((logits.sum(-1) - 1).abs() < 0.02)).all())
    return logits.clamp_min(1e-9).log() if sums_to_one else logits.log_softmax(-1)


class TraceData(lightning.LightningDataModule):
    """The prompts to fit on, the first 80% of a trace, split once more by prompt into training and validation.

    Args:
        trace: a recorded trace.
        batch_size: tokens per batch.
        seed: seed of the order of tokens.

    Raises:
        TraceError: there are too few prompts or tokens.
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
        """Return the training tokens, divided among processes. An epoch's order depends on the seed and its number alone."""
        return self._loader(self.training, shuffle=True)

    def val_dataloader(self) -> DataLoader[int]:
        """Return the validation tokens, in order."""
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


class Scored(NamedTuple):
    """What a network says of a batch, and what is true.

    Args:
        scores: `[L, K, n, E]`.
        chosen: 0/1 `[L, K, n, E]`.
        weight: 0 or 1 `[L, K, n]`, whether the prediction counts.
        reuse: log odds `[L, n, E]` that a layer's next visits use an expert; None: not foreseen.
    """

    scores: torch.Tensor
    chosen: torch.Tensor
    weight: torch.Tensor
    reuse: torch.Tensor | None


class PredictorModule(lightning.LightningModule):
    """All layers and distances of a predictor, trained together.

    Args:
        predictor: the predictor to train.
        loss: a name in `LOSSES`.
        learning_rate: the largest one of a one-cycle schedule.
        weight_decay: weight decay of AdamW.
    """

    def __init__(self, predictor: TrainedPredictor, loss: str, learning_rate: float, weight_decay: float) -> None:
        super().__init__()
        self.predictor = predictor
        self._loss = LOSSES[loss]
        self._learning_rate = learning_rate
        self._weight_decay = weight_decay
        config = predictor.config
        layers, steps = torch.arange(config.num_layers)[:, None], torch.arange(1, config.lookahead + 1)[None]
        self._targets = layers + steps  # [L, K]; from L on, a layer of the next token
        self._predicted = torch.tensor(
            [[config.predicts(i, k) for k in range(1, config.lookahead + 1)] for i in range(config.num_layers)]
        )

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Return the mean loss over what is predicted."""
        loss = self._mean_loss(batch, self._scored(batch))
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the loss, and the share of chosen experts that were predicted within the token, over all distances."""
        scored = self._scored(batch)
        loss = self._mean_loss(batch, scored)
        in_token = scored.weight * (self._targets < len(self._targets))[..., None]
        hits = scored.chosen.gather(-1, scored.scores.topk(self.predictor.config.top_k).indices).sum(-1)
        accuracy = (hits * in_token).sum() / (scored.chosen.sum(-1) * in_token).sum().clamp_min(1)
        size = len(batch.has_next)
        self.log("val_loss", loss, prog_bar=True, batch_size=size, sync_dist=True)
        self.log("val_accuracy", accuracy, prog_bar=True, batch_size=size, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Return AdamW on a one-cycle schedule over all steps that the trainer will take."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self._learning_rate, weight_decay=self._weight_decay)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self._learning_rate, steps, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _scored(self, batch: Batch) -> Scored:
        config = self.predictor.config
        heads = self.predictor.network(batch.gate_inputs)
        in_token = (self._targets < len(self._targets))[..., None]
        return Scored(
            scores=heads[:, : config.lookahead],
            chosen=batch.chosen.transpose(0, 1)[self._targets],
            weight=self._predicted[..., None] * torch.where(in_token, 1.0, batch.has_next),
            reuse=heads[:, -1] if config.foresees_reuse else None,
        )

    def _mean_loss(self, batch: Batch, scored: Scored) -> torch.Tensor:
        losses = self._loss(scored.scores, scored.chosen, batch.gate.transpose(0, 1)[self._targets])
        total, count = (losses * scored.weight).sum(), scored.weight.sum()
        if scored.reuse is not None:
            # Each expert by itself, whatever the loss, because probabilities are wanted. Divided by top_k, it is about as
            # large as the loss of a distance.
            reused = batch.reused.transpose(0, 1)
            wrong = F.binary_cross_entropy_with_logits(scored.reuse, reused, reduction="none").sum(-1)
            total = total + (wrong * batch.has_horizon).sum() / self.predictor.config.top_k
            count = count + len(reused) * batch.has_horizon.sum()
        return total / count


def new_predictor(trace: RecordedTrace, rows: TraceRows, config: TrainedConfig, seed: int) -> TrainedPredictor:
    """Return an untrained predictor for a trace's model. It standardises inputs, and starts from gates if its kind does."""
    torch.manual_seed(seed)
    predictor = TrainedPredictor(config)
    sample = trace.gate_inputs(spread(len(rows), STANDARDISE_ROWS)).float()
    predictor.network.standardise(sample.mean(0), sample.std(0))
    found = (gate_weight(gate.values(), config.num_experts) for gate in trace.gates)
    weights = [weight for weight in found if weight is not None and weight.shape[1] == config.hidden_size]
    if isinstance(predictor.network, ResidualNetwork) and len(weights) == config.num_layers:
        predictor.network.start_from_gates(weights)
    return predictor
