"""Skip-based prediction: a later layer's own gate, applied to this layer's gate input, and corrected while running.

The residual stream changes slowly from layer to layer, so that gate sees nearly what it will see (Mixtral-offloading's
speculative loading; ProMoE section 3 measures it at k = 1..8). Part of how it changes can be learned from some tokens
(`linear_fit`). No training: it begins as the gate.
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
from .gate_call import GateCaller
from .linear_fit import LinearFit

# Slope of the logistic that turns a router logit's distance from the selection threshold, in standard deviations of
# the layer's logits, into a probability. The run-time calibration corrects it.
SLOPE = 2.0
# Log odds are kept within this; and this far from even, on the side that the selection says.
MAX_LOG_ODDS = 7.0
MIN_LOG_ODDS = math.log(0.6 / 0.4)
# Visits of a gate in which its matrix alone must have chosen as the whole gate did, before the matrix is trusted.
AGREEMENTS = 3
# Tokens that a correction is learned from at once, which is much cheaper than one by one.
BATCH_TOKENS = 8


class GatePredictor:
    """Applies the gates of the next `lookahead` MoE layers to the present gate input.

    Gates that are one matrix are corrected by what they then saw, of each layer and distance by itself, which takes
    4 bytes per element of their weights. The last layers ask the first ones' gates about the next pass: far from what
    those will see, yet better than chance.
    """

    quick = True

    def __init__(self, context: PredictorContext, lookahead: int) -> None:
        self._lookahead = min(lookahead, context.num_layers - 1)
        self._caller = GateCaller(context.gates)
        self._targets = [_TargetGate(context, layer_idx, self._caller) for layer_idx in range(context.num_layers)]
        self._latest: dict[int, LayerVisit] = {}
        self._followed: dict[tuple[int, int], _Followed] = {}  # (steps ahead, layer)

    def predict(self, visit: LayerVisit) -> list[Forecast]:
        """One forecast per layer i+1 .. i+lookahead whose gate can be asked, counted on across the end of the pass."""
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
            # Only here, and not around everything: cold, to enter this mode takes as long as a linear gate's product.
            with torch.inference_mode():
                return target.probabilities(visit)
        followed = self._followed.get((steps_ahead, layer_idx))
        if followed is None:
            followed = self._followed[steps_ahead, layer_idx] = _Followed(target)
        return followed.probabilities(visit.gate_input)

    def _learn(self, visit: LayerVisit) -> None:
        """From what this visit's gate sees, and what earlier ones saw of the same tokens."""
        for steps_ahead in range(1, self._lookahead + 1):
            followed = self._followed.get((steps_ahead, visit.layer_idx))
            origin = self._latest.get((visit.layer_idx - steps_ahead) % len(self._targets))
            if followed is not None and origin is not None and _is_followed_by(origin, visit):
                followed.learn(origin.gate_input, visit.gate_input)
        self._latest[visit.layer_idx] = visit


def _is_followed_by(origin: LayerVisit, visit: LayerVisit) -> bool:
    """Whether a forecast from the one is of the other: the same tokens, or those that the sequences went on with."""
    if len(origin.gate_input) != len(visit.gate_input):
        return False
    if origin.layer_idx < visit.layer_idx:
        return origin.pass_idx == visit.pass_idx
    return origin.pass_idx + 1 == visit.pass_idx and origin.phase == visit.phase == "decode"


class _Followed:
    """A linear gate as the layer so many steps before it foresees it.

    Args:
        target: the gate.
    """

    def __init__(self, target: _TargetGate) -> None:
        self._target = target
        self._fit = LinearFit(*target.matrix)
        self._examples: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._lacking = BATCH_TOKENS - target.layer_idx % BATCH_TOKENS  # not all layers learn at the same token

    def probabilities(self, hidden: torch.Tensor) -> npt.NDArray[np.float64]:
        """Probability `[num_experts]` that any of the tokens `[n, hidden_dim]` uses an expert."""
        per_token = [_one_token(logits, self._target.top_k) for logits in self._fit(hidden)]
        return per_token[0] if len(per_token) == 1 else any_token(np.stack(per_token))

    def learn(self, before: torch.Tensor, seen: torch.Tensor) -> None:
        """What was seen `[n, hidden_dim]` when it was foreseen, and what the gate then saw."""
        self._examples.append((before, seen))
        self._lacking -= len(seen)
        if self._lacking <= 0:
            with torch.inference_mode():
                before, seen = (torch.cat(tensors) for tensors in zip(*self._examples, strict=True))
                self._fit.learn(before, self._target.logits(seen))
            self._examples.clear()
            self._lacking = BATCH_TOKENS


class _TargetGate:
    """A later layer's gate: asked as a whole, until its matrix alone was seen to choose the same.

    The forward waits for this, between products that leave nothing of it in the processor's caches: the whole gate and
    the general formula take 0.8 ms then, the matrix 0.2.
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
        # Correction biases and groups change the choice, if seldom.
        tensors = {name for name, _ in itertools.chain(gate.named_parameters(), gate.named_buffers())}
        is_plain = self._num_ids == self._num_experts
        self._may_be_linear = (
            is_plain and "weight" in tensors and tensors <= {"weight", "bias"} and not getattr(gate, "n_group", 0)
        )

    def probabilities(self, visit: LayerVisit) -> npt.NDArray[np.float64] | None:
        """Probability `[num_experts]` that any of the visit's tokens uses an expert; None: the gate cannot be asked."""
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
        """Whether its matrix is all there is to it."""
        return self._agreements == AGREEMENTS

    @property
    def matrix(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight `[num_experts, hidden_dim]` and bias `[num_experts]` of a linear gate."""
        weight: torch.Tensor = self._gate.weight  # type: ignore[assignment]
        return weight, getattr(self._gate, "bias", None)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What a linear gate makes of `[n, hidden_dim]`: `[n, num_experts]`."""
        return nn.functional.linear(hidden, *self.matrix)

    def _compare(self, hidden: torch.Tensor, chosen: torch.Tensor) -> None:
        self.top_k = chosen.shape[1]
        self._may_be_linear = self.matrix[0].dtype == hidden.dtype and self.top_k < self._num_experts
        if self._may_be_linear:
            probability = _one_token(self.logits(hidden)[0].tolist(), self.top_k)
            self._may_be_linear = np.flatnonzero(probability > 0.5).tolist() == sorted(chosen[0].tolist())
            self._agreements += self._may_be_linear


def _one_token(logits: list[float], top_k: int) -> npt.NDArray[np.float64]:
    """`selection_probability` `[num_experts]` where the largest logits are what is selected.

    In plain Python: cold, the dozen operations of numpy that this were take longer, for up to some hundred experts.
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
    """Per token, how likely each expert is selected, from a gate's output.

    Logits above the threshold between the last selected and the first rejected expert give more than 1/2. Where the
    gate's selection differs from the order of its logits (correction biases, groups), the selection wins.

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
        probability = 1.0 / (1.0 + np.exp(-np.clip(SLOPE * distance, -7.0, 7.0)))
    if ids is not None:
        rows = np.arange(len(ids))[:, None]
        selected = np.maximum(probability[rows, ids], 0.6)
        probability = np.minimum(probability, 0.4)
        probability[rows, ids] = selected
    return probability
