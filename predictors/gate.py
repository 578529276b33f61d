"""Skip-based prediction: a later layer's own gate, applied to this layer's gate input.

The residual stream changes slowly from layer to layer, so that gate sees nearly what it will see (Mixtral-offloading's
speculative loading; ProMoE section 3 measures it at k = 1..8). Free: no training, no further weights.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from promoe.moe_layers import gate_indices

from .base import Forecast, LayerVisit, PredictorContext, any_token

# Slope of the logistic that turns a router logit's distance from the selection threshold, in standard deviations of
# the layer's logits, into a probability. The run-time calibration corrects it.
SLOPE = 2.0


class GatePredictor:
    """Applies the gates of the next `lookahead` MoE layers of the same pass to the present gate input."""

    def __init__(self, context: PredictorContext, lookahead: int) -> None:
        self._context = context
        self._lookahead = lookahead

    def predict(self, visit: LayerVisit) -> list[Forecast]:
        """One forecast per layer i+1 .. i+lookahead that the pass still has."""
        last = min(visit.layer_idx + self._lookahead, self._context.num_layers - 1)
        return [
            Forecast(layer_idx - visit.layer_idx, layer_idx, self._apply(layer_idx, visit))
            for layer_idx in range(visit.layer_idx + 1, last + 1)
        ]

    def _apply(self, layer_idx: int, visit: LayerVisit) -> npt.NDArray[np.float64]:
        gate = self._context.gates[layer_idx]
        # Not gate(...): that would fire its hooks, ours and the recorder of router logits.
        with torch.inference_mode():
            output = type(gate).forward(gate, visit.gate_input, *visit.gate_args, **visit.gate_kwargs)
        num_experts = self._context.num_experts[layer_idx]
        chosen = gate_indices(output)
        return any_token(selection_probability(output, chosen, num_experts))


def selection_probability(output: object, chosen: torch.Tensor | None, num_experts: int) -> npt.NDArray[np.float64]:
    """Per token, how likely each expert is selected, from a gate's output.

    Logits above the threshold between the last selected and the first rejected expert give more than 1/2. Where the
    gate's selection differs from the order of its logits (correction biases, groups), the selection wins.

    Returns:
        `[num_tokens, num_experts]`
    """
    parts = output if isinstance(output, tuple | list) else (output,)
    logits = next(
        (p for p in parts if isinstance(p, torch.Tensor) and p.is_floating_point() and p.shape[-1] == num_experts), None
    )
    ids = None if chosen is None else chosen.reshape(-1, chosen.shape[-1]).numpy()
    if logits is None:
        assert ids is not None, "a gate must return logits over its experts or the chosen indices"
        probability = np.full((len(ids), num_experts), 0.05)
    else:
        z = logits.reshape(-1, num_experts).to(torch.float64).numpy()
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
