"""A trained predictor at work for one model: its networks folded into two products per layer visit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from promoe.errors import ConfigError
from promoe.scheduler.reuse import LearnedReuse

from .base import Forecast, LayerVisit, PredictorContext, ReuseForecast, any_token
from .linear_fit import ONE_THREAD_ELEMENTS
from .trained import PUBLISHED, TrainedConfig, TrainedPredictor

# What the published configuration says of an expert: among the top-k, or not.
PREDICTED, NOT_PREDICTED = 0.99, 0.01
Floats32 = npt.NDArray[np.float32]
# Up to so many, one token's probabilities are computed in plain Python.
FEW_TARGETS = 2


class LearnedPredictor:
    """Forecasts with a trained predictor's networks.

    Args:
        trained: for this model.
        context: the model.
        lookahead: largest distance to forecast, as far as it was trained for; "promoe-paper" has one of its own.

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
        foresees_reuse = self.reuse is not None and self.reuse.foreseen is not None
        self._layers = [
            _LayerPredictor(trained, layer_idx, farthest, foresees_reuse, row) for layer_idx in range(config.num_layers)
        ]

    def predict(self, visit: LayerVisit) -> list[Forecast | ReuseForecast]:
        """The layer's own next visits, if that was trained, and one forecast per distance that was, nearest first."""
        layer = self._layers[visit.layer_idx]
        if not layer.num_heads:
            return []
        reuse, probabilities = layer.predict(visit.gate_input)
        forecasts: list[Forecast | ReuseForecast] = [] if reuse is None else [ReuseForecast(visit.layer_idx, reuse)]
        forecasts += [Forecast(*target, one) for target, one in zip(layer.targets, probabilities, strict=True)]
        return forecasts


class _Row:
    """One token's gate input in fp32, for numpy: always the same memory, which spares two operations at each visit."""

    def __init__(self, hidden_size: int) -> None:
        with torch.inference_mode(False):  # what is made in that mode can only be written in it
            self._tensor = torch.empty(1, hidden_size)
        self._array: Floats32 = self._tensor.numpy()

    def holding(self, gate_input: torch.Tensor) -> Floats32:
        """`gate_input[1, H]`, until the next call."""
        self._tensor.copy_(gate_input)
        return self._array


class _Product:
    """`x[n, H]` times a matrix: `[n, rows]` in fp32.

    Of one token by numpy: beside a model that takes less time than torch's in bf16, though it reads twice the bytes.

    Args:
        weight: `[rows, H]`.
        row: where that one token's input goes.
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
    """What is predicted from one layer: `TrainedPredictor.log_odds`, for few tokens and above all for one.

    After a model's products nothing of this is in the processor's caches, and an operation takes ten times as long to
    call as to compute. So slopes and biases are folded into the weights, all distances are computed at once, and what is
    left are two products with a maximum between them, a sum, a threshold and a logistic function. What reuse is foreseen is one
    more target, the last, without a threshold. The bias b of the hidden
    layers is not added: relu(h + b) = max(h, -b) + b, and what the last b leads to is known beforehand. That constant is one
    more hidden unit, max(0, 1).
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
        """First matrix, least values of the hidden units, second matrix: one of each for all distances.

        In the first the linear part stands behind the hidden units.
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
        """The same, with hidden units of each distance's own: `[targets, 1, width]` and `[targets, width, E]`."""
        num_targets, _, width = outer.shape
        bias = bias.view(num_targets, width, 1)
        constant = constant[..., None] + outer @ bias
        weight = weight.view(num_targets, width, weight.shape[1])
        weight = torch.cat([weight, weight.new_zeros(num_targets, 1, weight.shape[-1])], 1).flatten(0, 1)
        least = torch.cat([-bias, bias.new_ones(num_targets, 1, 1)], 1).transpose(1, 2)
        return weight, least, torch.cat([outer, constant], 2).transpose(1, 2)

    def predict(self, gate_input: torch.Tensor) -> tuple[Floats32 | None, list[npt.NDArray[np.float64]]]:
        """Log odds of reuse `[E]`, the mean over the tokens, and of each target the probability `[E]` that any of them uses an
        expert, from `[n, H]`."""
        scores = self._scores(self._inner(gate_input))
        reuse: Floats32 | None = None
        if self._foresees_reuse:
            reuse, scores = scores[:, -1], scores[:, :-1]
            reuse = reuse[0] if len(reuse) == 1 else reuse.mean(axis=0)
        if len(scores) == 1 and self._is_short:
            return reuse, [self._one_token(*target) for target in zip(scores[0].tolist(), self._offsets, strict=True)]
        return reuse, list(any_token(self._per_token(scores)))

    def _one_token(self, scores: list[float], offset: float) -> npt.NDArray[np.float64]:
        """`_per_token` in plain Python: one operation of numpy, cold, takes longer than this."""
        ranked = sorted(scores)
        zero = 0.5 * (ranked[-self._top_k] + ranked[-self._top_k - 1]) - offset
        tanh = math.tanh  # the logistic function; unlike exp, without an overflow to guard against
        return np.array([0.5 + 0.5 * tanh(score - zero) for score in scores])

    def _per_token(self, scores: Floats32) -> npt.NDArray[np.float64]:
        """Probabilities `[n, targets, E]`: how far scores lie above the middle of the last chosen and the first not."""
        if self._num_experts <= self._top_k:
            return np.ones(scores.shape)
        if self._hard:
            return _top(scores, self._top_k)
        ranked = np.sort(scores, axis=-1)
        zero = 0.5 * (ranked[..., -self._top_k] + ranked[..., -self._top_k - 1]) - self._offset
        result: npt.NDArray[np.float64] = 0.5 + 0.5 * np.tanh(scores - zero[..., None], dtype=np.float64)
        return result

    def _scores(self, inner: Floats32) -> Floats32:
        """`[n, heads, E]`, times half their slope, from `[n, rows]`."""
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
        """The second product, of `[.., n, hidden units]`."""
        product: Floats32
        if hidden.shape[-2] > 1 or self._by_torch:
            product = torch.matmul(torch.from_numpy(hidden), torch.from_numpy(self._outer)).numpy()
        else:
            product = hidden @ self._outer
        return product


def _top(scores: Floats32, count: int) -> npt.NDArray[np.float64]:
    """The `count` largest of each token as predicted, the others as not."""
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
    """What all layers have, or what each has."""
    return values[0] if len(set(values)) == 1 else list(values)
