"""Predicts with a later layer's own gate, applied early, to this layer's gate input, and corrected while running.

The residual stream changes slowly from layer to layer, so a gate that is asked early sees nearly what it will see in its
turn (Mixtral-offloading's speculative loading; ProMoE section 3 measures it at k = 1..8). Part of the change can be
learned from some tokens (`linear_fit`). No training is needed, because the correction starts at zero.

One layer ahead, some hundred tokens teach the correction as much as training does (docs/predictors.md, What the default
learns). It learns from eight tokens at a time, which costs one system of eight equations and one product per layer.
Layers take turns, so that no token waits for all of them.

By default it looks one layer ahead. Farther forecasts fetch more experts that are not used, and cost more than they
gain where computing a layer takes longer than a transfer. Raise `lookahead` where it does not: with a trained predictor,
packed experts and small caches, 3 gains 4 to 7% (docs/benchmarks.md, Experts packed beforehand).
"""

from __future__ import annotations

import itertools
import math
from operator import mul

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from promoe.experts.gate_output import gate_indices, gate_logits

from .base import Forecast, LayerVisit, PredictorContext, any_token, horizon
from .early_calls import GateCaller
from .linear_fit import LinearFit

# Slope of the logistic function that turns a router logit's distance from the selection threshold, in standard deviations
# of the layer's logits, into a probability. The run-time calibration corrects it.
SLOPE = 2.0
# Bounds of the size of log odds. The lower one keeps the experts that are selected clearly apart from the others.
MAX_LOG_ODDS = 7.0
MIN_LOG_ODDS = math.log(0.6 / 0.4)
# A gate's matrix is trusted once it alone has chosen as the whole gate did in so many visits.
AGREEMENTS = 3
# A correction learns from so many tokens at once, which is much cheaper than one by one.
BATCH_TOKENS = 8


class GatePredictor:
    """Applies the gates of the next `lookahead` MoE layers to the present gate input.

    A gate that is one matrix is corrected by what it then saw, for each layer and distance by itself; that takes 4 bytes
    per element of its weight. The last layers ask the first layers' gates about the next pass: their input is far from
    what those will see, but the answer is better than chance.
    """

    quick = True

    def __init__(self, context: PredictorContext, lookahead: int) -> None:
        self._lookahead = min(lookahead, context.num_layers - 1)
        self._caller = GateCaller(context.gates)
        self._targets = [_TargetGate(context, layer_idx, self._caller) for layer_idx in range(context.num_layers)]
        self._latest: dict[int, LayerVisit] = {}
        self._corrected: dict[tuple[int, int], _CorrectedGate] = {}  # (steps ahead, layer)

    def predict(self, visit: LayerVisit) -> list[Forecast]:
        """Return a forecast for each of the next `lookahead` layers whose gate can be asked."""
        self._caller.saw(visit)
        self._learn(visit)
        forecasts = []
        for steps_ahead, layer_idx in horizon(visit.layer_idx, self._lookahead, len(self._targets)):
            probabilities = self._probabilities(steps_ahead, layer_idx, visit)
            if probabilities is not None:
                forecasts.append(Forecast(steps_ahead, layer_idx, probabilities))
        return forecasts

    def _probabilities(self, steps_ahead: int, layer_idx: int, visit: LayerVisit) -> npt.NDArray[np.float64] | None:
        target = self._targets[layer_idx]
        if not target.is_linear:
            # Only here, and not around everything: with cold caches, entering this mode takes as long as a linear gate's
            # product.
            with torch.inference_mode():
                return target.probabilities(visit)
        corrected = self._corrected.get((steps_ahead, layer_idx))
        if corrected is None:
            corrected = self._corrected[steps_ahead, layer_idx] = _CorrectedGate(target)
        return corrected.probabilities(visit.gate_input)

    def _learn(self, visit: LayerVisit) -> None:
        """Learn from what this visit's gate sees, and what earlier gates saw of the same tokens."""
        for steps_ahead in range(1, self._lookahead + 1):
            corrected = self._corrected.get((steps_ahead, visit.layer_idx))
            origin = self._latest.get((visit.layer_idx - steps_ahead) % len(self._targets))
            if corrected is not None and origin is not None and _is_followed_by(origin, visit):
                corrected.learn(origin.gate_input, visit.gate_input)
        self._latest[visit.layer_idx] = visit


def _is_followed_by(origin: LayerVisit, visit: LayerVisit) -> bool:
    """Return whether a forecast from `origin` is about `visit`: same tokens, or those with which the sequences went on."""
    if (len(origin.gate_input), origin.all_tokens) != (len(visit.gate_input), visit.all_tokens):
        return False
    if origin.layer_idx < visit.layer_idx:
        return origin.pass_idx == visit.pass_idx
    return origin.pass_idx + 1 == visit.pass_idx and origin.phase == visit.phase == "decode"


class _CorrectedGate:
    """A linear gate, corrected for the input of one earlier layer."""

    def __init__(self, target: _TargetGate) -> None:
        self._target = target
        self._fit = LinearFit(*target.matrix)
        self._examples: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._missing_tokens = (
            BATCH_TOKENS - target.layer_idx % BATCH_TOKENS
        )  # so that layers learn at different tokens

    def probabilities(self, hidden: torch.Tensor) -> npt.NDArray[np.float64]:
        """Return the probability `[num_experts]` that any of the tokens `[n, hidden_dim]` uses an expert."""
        per_token = [_one_token(logits, self._target.top_k) for logits in self._fit(hidden)]
        return per_token[0] if len(per_token) == 1 else any_token(np.stack(per_token))

    def learn(self, before: torch.Tensor, seen: torch.Tensor) -> None:
        """Learn from the input `[n, hidden_dim]` of the earlier layer, and from what the gate then saw of these tokens."""
        self._examples.append((before, seen))
        self._missing_tokens -= len(seen)
        if self._missing_tokens <= 0:
            with torch.inference_mode():
                before, seen = (torch.cat(tensors) for tensors in zip(*self._examples, strict=True))
                self._fit.learn(before, self._target.logits(seen))
            self._examples.clear()
            self._missing_tokens = BATCH_TOKENS


class _TargetGate:
    """A later layer's gate. It is asked as a whole until its matrix alone has chosen the same experts often enough.

    The forward waits for this, with cold caches, because the products before it have used them for other data. The whole
    gate and the general formula then take 0.8 ms, the matrix alone 0.2.
    """

    def __init__(self, context: PredictorContext, layer_idx: int, caller: GateCaller) -> None:
        gate = self._gate = context.gates[layer_idx]
        self.layer_idx = layer_idx
        self._num_experts = context.num_experts[layer_idx]
        self._num_ids = context.num_ids[layer_idx] if context.num_ids else self._num_experts
        self._chosen = context.chosen[layer_idx] if context.chosen else gate_indices
        self._caller = caller
        self.top_k = 0
        """Experts that a linear gate chooses."""
        self._agreements = 0
        # Correction biases and groups change the choice, though seldom.
        tensors = {name for name, _ in itertools.chain(gate.named_parameters(), gate.named_buffers())}
        is_plain = self._num_ids == self._num_experts
        self._may_be_linear = (
            is_plain and "weight" in tensors and tensors <= {"weight", "bias"} and not getattr(gate, "n_group", 0)
        )

    def probabilities(self, visit: LayerVisit) -> npt.NDArray[np.float64] | None:
        """Return the probability `[num_experts]` that any of the visit's tokens uses an expert; None: it cannot be asked."""
        output = self._caller.ask(self.layer_idx, visit)
        if output is None:
            return None
        chosen = self._chosen(output)
        if (
            self._may_be_linear
            and chosen is not None
            and len(chosen) == 1
            and not (visit.gate_args or visit.gate_kwargs)
        ):
            self._compare(visit.gate_input, chosen)
        return any_token(selection_probability(output, chosen, self._num_ids))[: self._num_experts]

    @property
    def is_linear(self) -> bool:
        """Whether the gate is its matrix and nothing else."""
        return self._agreements == AGREEMENTS

    @property
    def matrix(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight `[num_experts, hidden_dim]` and bias `[num_experts]` of a linear gate."""
        weight: torch.Tensor = self._gate.weight  # type: ignore[assignment]
        return weight, getattr(self._gate, "bias", None)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return a linear gate's logits `[n, num_experts]` for inputs `[n, hidden_dim]`."""
        return nn.functional.linear(hidden, *self.matrix)

    def _compare(self, hidden: torch.Tensor, chosen: torch.Tensor) -> None:
        self.top_k = chosen.shape[1]
        self._may_be_linear = self.matrix[0].dtype == hidden.dtype and self.top_k < self._num_experts
        if self._may_be_linear:
            probability = _one_token(self.logits(hidden)[0].tolist(), self.top_k)
            self._may_be_linear = np.flatnonzero(probability > 0.5).tolist() == sorted(chosen[0].tolist())
            self._agreements += self._may_be_linear


def _one_token(logits: list[float], top_k: int) -> npt.NDArray[np.float64]:
    """Return `selection_probability` `[num_experts]` of one token whose largest logits are selected.

    In plain Python: with cold caches, a dozen operations of numpy take longer, for up to some hundred experts.
    """
    ranked, count = sorted(logits), len(logits)
    threshold = (ranked[-top_k] + ranked[-top_k - 1]) / 2
    variance = sum(map(mul, logits, logits)) / count - (sum(logits) / count) ** 2
    slope = SLOPE / (math.sqrt(max(0.0, variance)) + 1e-9)
    return np.array([_selected(slope * (logit - threshold)) for logit in logits])


def _selected(odds: float) -> float:
    size = min(max(abs(odds), MIN_LOG_ODDS), MAX_LOG_ODDS)
    return 1.0 / (1.0 + math.exp(-size if odds >= 0 else size))


def selection_probability(output: object, chosen: torch.Tensor | None, num_experts: int) -> npt.NDArray[np.float64]:
    """Return how likely each expert is selected for each token, from a gate's output.

    Logits above the threshold between the last selected and the first rejected expert give more than 1/2. Where the
    gate's selection differs from the order of its logits (correction biases, groups), the selection counts.

    Args:
        output: what the gate returned.
        chosen: the ids that it selected, `[num_tokens, top_k]`; None: unknown.
        num_experts: ids that it may select.

    Returns:
        `[num_tokens, num_experts]`
    """
    logits = gate_logits(output, num_experts)
    ids = None if chosen is None else chosen.reshape(-1, chosen.shape[-1]).cpu().numpy()
    if logits is None:
        assert ids is not None, "a gate must return logits over its experts or the chosen indices"
        probability = np.full((len(ids), num_experts), 0.05)
    else:
        z = logits.reshape(-1, num_experts).to(torch.float64).cpu().numpy()
        top_k = ids.shape[1] if ids is not None else 1
        ranked = -np.partition(-z, top_k, axis=1) if top_k < num_experts else z
        threshold = (ranked[:, :top_k].min(axis=1) + ranked[:, top_k:].max(axis=1)) / 2 if top_k < num_experts else 0
        scale = z.std(axis=1, keepdims=True) + 1e-9
        distance = (z - np.reshape(threshold, (-1, 1))) / scale
        probability = 1.0 / (1.0 + np.exp(-np.clip(SLOPE * distance, -MAX_LOG_ODDS, MAX_LOG_ODDS)))
    if ids is not None:
        rows = np.arange(len(ids))[:, None]
        selected = np.maximum(probability[rows, ids], 0.6)
        probability = np.minimum(probability, 0.4)
        probability[rows, ids] = selected
    return probability
