"""Runs a trained predictor for one model, with its networks folded into two matrix products per layer visit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from promoe.errors import ConfigError
from promoe.scheduler.reuse import LearnedReuse

from .base import Forecast, LayerVisit, PredictorContext, ReuseForecast, Traits, any_token
from .linear_fit import ONE_THREAD_ELEMENTS
from .trained import PUBLISHED, TrainedConfig, TrainedPredictor

# Probabilities of the published configuration, which says of an expert only whether it is among the top-k.
PREDICTED, NOT_PREDICTED = 0.99, 0.01
Floats32 = npt.NDArray[np.float32]
# For up to so many targets, one token's probabilities are computed in plain Python.
FEW_TARGETS = 2


class FoldedPredictor:
    """Forecasts with a trained predictor's networks.

    Args:
        trained: a predictor that was trained for this model.
        context: the model.
        lookahead: the largest distance to forecast, as far as the predictor was trained for it. "promoe-paper" has a
            distance of its own.

    Raises:
        ConfigError: it was trained for another model.
    """

    quick = True

    def __init__(self, trained: TrainedPredictor, context: PredictorContext, lookahead: int) -> None:
        config = trained.config
        check_fits(config, context)
        self.reuse: LearnedReuse | None = trained.learned_reuse()
        """What the model's reuse prior starts from; None: it was not fitted."""
        farthest = config.lookahead if config.kind == PUBLISHED else min(lookahead, config.lookahead)
        row = _Row(config.hidden_size)
        foresees_reuse = Traits.of(self).foresees_reuse
        self._layers = [
            _LayerPredictor(trained, layer_idx, farthest, foresees_reuse, row) for layer_idx in range(config.num_layers)
        ]

    def predict(self, visit: LayerVisit) -> list[Forecast | ReuseForecast]:
        """Return what is foreseen of the layer's own next visits, if that was trained, and a forecast for each distance."""
        layer = self._layers[visit.layer_idx]
        if not layer.num_heads:
            return []
        reuse, probabilities = layer.predict(visit.gate_input)
        forecasts: list[Forecast | ReuseForecast] = [] if reuse is None else [ReuseForecast(visit.layer_idx, reuse)]
        forecasts += [Forecast(*target, one) for target, one in zip(layer.targets, probabilities, strict=True)]
        return forecasts


class _Row:
    """One token's gate input in fp32, for numpy. It always uses the same memory, which saves two operations per visit."""

    def __init__(self, hidden_size: int) -> None:
        with torch.inference_mode(False):  # tensors made in inference mode can only be written in it
            self._tensor = torch.empty(1, hidden_size)
        self._array: Floats32 = self._tensor.numpy()

    def holding(self, gate_input: torch.Tensor) -> Floats32:
        """Return `gate_input[1, H]` as an array that is valid until the next call."""
        self._tensor.copy_(gate_input)
        return self._array


class _Product:
    """Multiplies inputs `[n, H]` by a matrix: `[n, rows]` in fp32.

    Numpy multiplies one token: while a model runs, that takes less time than torch's product in bf16, although it reads
    twice the bytes.

    Args:
        weight: `[rows, H]`.
        row: holds the input of one token.
    """

    def __init__(self, weight: torch.Tensor, row: _Row) -> None:
        self._transposed = weight.t()
        rows_at_once = max(1, ONE_THREAD_ELEMENTS // weight.shape[1])
        self._blocks: list[Floats32] = [block.numpy().T for block in weight.split(rows_at_once)]
        self._row = row

    def __call__(self, x: torch.Tensor) -> Floats32:
        if len(x) > 1:
            product: Floats32 = torch.mm(x.to(self._transposed), self._transposed).numpy()
            return product
        row = self._row.holding(x)
        parts = [row.dot(block) for block in self._blocks]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


class _LayerPredictor:
    """Computes `TrainedPredictor.log_odds` of one layer, for few tokens and above all for one.

    A model's own products leave the processor's caches cold, and then an operation takes ten times as long to call as to
    compute. So slopes and biases are folded into the weights and all distances are computed at once. What is left are two
    products with a maximum between them, a sum, a threshold and a logistic function. Foreseen reuse is one more target, the
    last, without a threshold.

    The bias b of the hidden layers is not added, because relu(h + b) = max(h, -b) + b, and the effect of the last b is
    known beforehand. That constant is one more hidden unit, max(0, 1).
    """

    def __init__(
        self, trained: TrainedPredictor, layer_idx: int, lookahead: int, foresees_reuse: bool, row: _Row
    ) -> None:
        config, network = trained.config, trained.network
        steps = [k for k in range(1, lookahead + 1) if config.predicts(layer_idx, k)]
        self.targets = [(k, (layer_idx + k) % config.num_layers) for k in steps]
        """(steps ahead, layer) of each forecast."""
        self._foresees_reuse = foresees_reuse
        self.num_heads = len(steps) + foresees_reuse
        self._num_experts = config.num_experts
        self._top_k = config.top_k
        self._hard = config.kind == PUBLISHED
        self._is_short = len(steps) <= FEW_TARGETS and config.top_k < config.num_experts and not self._hard
        self._has_trunk = network.num_shared_rows() > 0
        kept = [k - 1 for k in steps]
        with torch.no_grad():
            self._offset = (0.5 * trained.offset[layer_idx, kept].float()).numpy()
            self._offsets: list[float] = self._offset.tolist()
            slope = 0.5 * trained.slope[layer_idx, kept].float()[:, None]
            if foresees_reuse:
                kept.append(config.lookahead)
                slope = torch.cat([slope, slope.new_ones(1, 1)])
            outer = network.outer[layer_idx, kept].float() * slope[..., None]  # [targets, E, width]
            constant = network.bias[layer_idx, kept].float() * slope
            weight, bias = network.folded(layer_idx, kept)
            fold = self._with_trunk if self._has_trunk else self._without_trunk
            weight, least, outer = fold(weight, bias, outer, constant, slope)
            self._least: Floats32 = least.numpy()
            self._outer: Floats32 = outer.contiguous().numpy()
            self._hidden_rows = self._least.shape[-1]
            self._by_torch = outer.shape[-2:].numel() > ONE_THREAD_ELEMENTS
            self._inner = _Product(weight, row)

    def _with_trunk(
        self, weight: torch.Tensor, bias: torch.Tensor, outer: torch.Tensor, constant: torch.Tensor, slope: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the first matrix, the least values of the hidden units, and the second matrix: one of each for all distances.

        In the first matrix, the linear part follows the hidden units.
        """
        width = outer.shape[-1]
        each = slope.expand(-1, self._num_experts).flatten()
        constant = constant + (bias[width:] * each).view_as(constant) + outer @ bias[:width]
        linear = weight[width:] * each[:, None]
        weight = torch.cat([weight[:width], weight.new_zeros(1, weight.shape[1]), linear])
        least = torch.cat([-bias[:width], bias.new_ones(1)])
        return weight, least, torch.cat([outer.flatten(0, 1).T, constant.view(1, -1)])

    def _without_trunk(
        self, weight: torch.Tensor, bias: torch.Tensor, outer: torch.Tensor, constant: torch.Tensor, slope: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the same where each distance has hidden units of its own: `[targets, 1, width]`, `[targets, width, E]`."""
        num_targets, _, width = outer.shape
        bias = bias.view(num_targets, width, 1)
        constant = constant[..., None] + outer @ bias
        weight = weight.view(num_targets, width, weight.shape[1])
        weight = torch.cat([weight, weight.new_zeros(num_targets, 1, weight.shape[-1])], 1).flatten(0, 1)
        least = torch.cat([-bias, bias.new_ones(num_targets, 1, 1)], 1).transpose(1, 2)
        return weight, least, torch.cat([outer, constant], 2).transpose(1, 2)

    def predict(self, gate_input: torch.Tensor) -> tuple[Floats32 | None, list[npt.NDArray[np.float64]]]:
        """Return what is foreseen from a gate's input `[n, H]`.

        Returns:
            Log odds of reuse `[E]`, the mean over the tokens; None: not trained. And for each target the probability `[E]`
            that any of the tokens uses an expert.
        """
        scores = self._scores(self._inner(gate_input))
        reuse: Floats32 | None = None
        if self._foresees_reuse:
            reuse, scores = scores[:, -1], scores[:, :-1]
            reuse = reuse[0] if len(reuse) == 1 else reuse.mean(axis=0)
        if len(scores) == 1 and self._is_short:
            return reuse, [self._one_token(*target) for target in zip(scores[0].tolist(), self._offsets, strict=True)]
        return reuse, list(any_token(self._per_token(scores)))

    def _one_token(self, scores: list[float], offset: float) -> npt.NDArray[np.float64]:
        """Compute `_per_token` in plain Python: with cold caches, a single operation of numpy takes longer than this."""
        ranked = sorted(scores)
        zero = 0.5 * (ranked[-self._top_k] + ranked[-self._top_k - 1]) - offset
        tanh = math.tanh  # the logistic function, which cannot overflow in this form
        return np.array([0.5 + 0.5 * tanh(score - zero) for score in scores])

    def _per_token(self, scores: Floats32) -> npt.NDArray[np.float64]:
        """Return probabilities `[n, targets, E]`, from how far scores lie above the selection threshold."""
        if self._num_experts <= self._top_k:
            return np.ones(scores.shape)
        if self._hard:
            return _top(scores, self._top_k)
        ranked = np.sort(scores, axis=-1)
        zero = 0.5 * (ranked[..., -self._top_k] + ranked[..., -self._top_k - 1]) - self._offset
        result: npt.NDArray[np.float64] = 0.5 + 0.5 * np.tanh(scores - zero[..., None], dtype=np.float64)
        return result

    def _scores(self, inner: Floats32) -> Floats32:
        """Return scores `[n, heads, E]`, times half their slope, from the first product `[n, rows]`."""
        shape = (len(inner), self.num_heads, -1)
        scores: Floats32
        if self._has_trunk:
            scores = self._by_outer(np.maximum(inner[:, : self._hidden_rows], self._least))
            scores += inner[:, self._hidden_rows :]
            return scores.reshape(shape)
        hidden = inner.reshape(shape).swapaxes(0, 1)
        scores = self._by_outer(np.maximum(hidden, self._least)).swapaxes(0, 1)
        return scores

    def _by_outer(self, hidden: Floats32) -> Floats32:
        """Return the second product, of `[.., n, hidden units]`."""
        product: Floats32
        if hidden.shape[-2] > 1 or self._by_torch:
            product = torch.matmul(torch.from_numpy(hidden), torch.from_numpy(self._outer)).numpy()
        else:
            product = hidden @ self._outer
        return product


def _top(scores: Floats32, count: int) -> npt.NDArray[np.float64]:
    """Return a high probability for the `count` largest scores of each token, and a low one for the others."""
    chosen = np.argpartition(-scores, count - 1, axis=-1)[..., :count]
    result = np.full(scores.shape, NOT_PREDICTED)
    np.put_along_axis(result, chosen, PREDICTED, axis=-1)
    return result


def check_fits(config: TrainedConfig, context: PredictorContext) -> None:
    """Raise ConfigError, naming the field, unless a predictor was trained for a model of this kind and size."""
    found = {
        "model_type": context.model_type,
        "num_layers": context.num_layers,
        "hidden_size": context.hidden_size,
        "num_experts": _common(context.num_experts),
        "top_k": _common(context.top_k),
    }
    mismatch = config.mismatch(**{name: value for name, value in found.items() if value is not None})
    if mismatch is not None:
        name, expected, value = mismatch
        raise ConfigError(
            f"The predictor was trained for {config.base_model or 'a model'} with {name} = {expected!r}, and this model "
            f'has {value!r}. Train one for it with `promoe-train`, or use predictor="gate".'
        )


def _common(values: Sequence[int]) -> int | list[int]:
    """Return the value that all layers have, or else each layer's."""
    return values[0] if len(set(values)) == 1 else list(values)
