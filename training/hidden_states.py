"""Kinds of predictors that go by hidden states: they predict a layer's experts from the gate input of an earlier layer.

    gate         the target layer's own gate, applied to the earlier gate input; nothing is fitted or learned
    linear       ridge regression from the earlier gate input to the experts that are chosen
    sklearn-mlp  a small multi-layer perceptron of scikit-learn, fitted to the same
    trained      a predictor that `promoe-train fit` trained

Gate inputs are read a block of tokens and one layer at a time, so a trace may be much larger than memory. Knows traces and
predictors; not measures.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from promoe.predictors.base import gate_weight
from promoe.predictors.gate import selection_probability
from promoe.predictors.trained import TrainedPredictor, above_threshold
from promoe.training.baselines import Kind, Scores, spread, used
from promoe.training.recorded_traces import RecordedTrace
from promoe.training.routing_traces import RoutingTrace, TraceError

# The gate inputs of so many tokens are in memory as float32 at once.
BLOCK_TOKENS = 8192
# Each pair of layers is fitted on so many tokens. All pairs of a dozen layers and four lookaheads then take about 10 s
# (linear) and a minute (sklearn-mlp) on two cores.
LINEAR_TOKENS = 20_000
MLP_TOKENS = 8192
MLP_WIDTH, MLP_EPOCHS, MLP_BATCH, MLP_LEARNING_RATE = 64, 16, 512, 5e-3


def records_of(trace: RoutingTrace) -> RecordedTrace:
    """Return where a trace's gate inputs are."""
    assert trace.recorded is not None, "a trace of ids only reached a kind that needs hidden states"
    return trace.recorded


def blocks(trace: RoutingTrace, layer_idx: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield one layer's gate inputs of all tokens, a block at a time: (first token, float32 `[n, hidden_size]`)."""
    records = records_of(trace)
    for start in range(0, trace.num_tokens, BLOCK_TOKENS):
        stop = min(start + BLOCK_TOKENS, trace.num_tokens)
        rows = slice(trace.first_row + start, trace.first_row + stop)
        yield start, records.layer_inputs(layer_idx, rows).float()


class FromGateInput(Kind):
    """A kind that predicts layer j at lookahead k from the gate input of layer j - k, or of layer 0 as ProMoE does.

    Layer 0 itself is not predicted.
    """

    def scores(self, trace: RoutingTrace, layer_idx: int, lookahead: int) -> Scores | None:
        """Return scores, see `Kind.scores`."""
        source = max(0, layer_idx - lookahead)
        return None if layer_idx == 0 else self.scores_from(trace, source, layer_idx - source)

    @abstractmethod
    def scores_from(self, trace: RoutingTrace, source: int, distance: int) -> Scores | None:
        """Return scores of the layer `distance` after `source`, which may be one of the next token's; None: not predicted."""


class _AcrossTokens(FromGateInput):
    """A kind that also looks from a token's last layers to the first layers of the next token."""

    def next_token_scores(self, trace: RoutingTrace, layer_idx: int, lookahead: int) -> Scores | None:
        """Return scores, see `Kind.next_token_scores`."""
        source = trace.num_layers + layer_idx - lookahead
        return self.scores_from(trace, source, lookahead) if 0 <= source < trace.num_layers else None


class Gate(_AcrossTokens):
    """Applies the target layer's gate weights to the earlier gate input, as `predictors.gate` does."""

    def __init__(self, fitted_on: RoutingTrace) -> None:
        self._top_k = fitted_on.top_k
        gates = records_of(fitted_on).gates
        self._gates = [gate_scores(gate, i, fitted_on.num_experts) for i, gate in enumerate(gates)]

    def scores_from(self, trace: RoutingTrace, source: int, distance: int) -> Scores:
        """Return what the gate ranks experts by."""
        gate = self._gates[(source + distance) % trace.num_layers]
        return _mapped(trace, source, gate)

    def probabilities(self, scores: Scores, layer_idx: int, lookahead: int) -> Scores:
        """Return what the runtime's gate predictor assumes before it is calibrated."""
        logits = torch.from_numpy(np.ascontiguousarray(scores))
        chosen = logits.topk(self._top_k, dim=-1).indices
        return selection_probability(logits, chosen, scores.shape[1]).astype(np.float32)


def gate_scores(
    tensors: dict[str, torch.Tensor], layer_idx: int, num_experts: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function by which a gate of these parameters ranks experts: `[n, hidden_size]` -> `[n, num_experts]`.

    It gives logits, or DeepSeek-V3's sigmoid(logits) + e_score_correction_bias. Groups of experts are ignored.

    Raises:
        TraceError: there is no matrix with a row per expert.
    """
    named = {name: tensor.float().squeeze(0) for name, tensor in tensors.items()}
    weight = gate_weight(named.values(), num_experts)
    if weight is None:
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        raise TraceError(
            f"The gate of MoE layer {layer_idx} has no weight of {num_experts} rows, one per expert; it has "
            f"{found or 'nothing'}. Leave 'gate' out of --kinds."
        )
    per_expert = {name: tensor for name, tensor in named.items() if tuple(tensor.shape) == (num_experts,)}
    correction = next((t for name, t in per_expert.items() if name.endswith("e_score_correction_bias")), None)
    bias = next((t for name, t in per_expert.items() if name.endswith("bias") and t is not correction), None)

    def scores(x: torch.Tensor) -> torch.Tensor:
        logits = F.linear(x, weight, bias)
        return logits if correction is None else logits.sigmoid() + correction

    return scores


class Trained(_AcrossTokens):
    """A predictor that `promoe-train fit` trained: the scores of its networks, and calibrated probabilities."""

    def __init__(self, predictor: TrainedPredictor) -> None:
        self._predictor = predictor

    def scores_from(self, trace: RoutingTrace, source: int, distance: int) -> Scores | None:
        """Return the scores of the networks; None at distances for which they were not trained."""
        predictor = self._predictor
        if not predictor.config.predicts(source, distance):
            return None
        with torch.inference_mode():
            weight, bias = predictor.network.folded(source, range(distance))

        def scores(x: torch.Tensor) -> torch.Tensor:
            inner = F.linear(x, weight, bias)[None]
            return predictor.network.scores(inner, slice(source, source + 1))[0, -1]

        return _mapped(trace, source, scores)

    def probabilities(self, scores: Scores, layer_idx: int, lookahead: int) -> Scores:
        """Return probabilities as `TrainedPredictor.log_odds` gives them."""
        predictor, source = self._predictor, max(0, layer_idx - lookahead)
        step = layer_idx - source - 1
        distance = above_threshold(torch.from_numpy(scores), predictor.config.top_k)
        result: Scores = (distance * predictor.slope[source, step] + predictor.offset[source, step]).sigmoid().numpy()
        return result


def _mapped(trace: RoutingTrace, layer_idx: int, function: Callable[[torch.Tensor], torch.Tensor]) -> Scores:
    """Apply a function to one layer's gate inputs of all tokens."""
    result = np.empty((trace.num_tokens, trace.num_experts), dtype=np.float32)
    with torch.inference_mode():
        for start, x in blocks(trace, layer_idx):
            result[start : start + len(x)] = function(x).numpy()
    return result


class _Fitted(FromGateInput):
    """A kind that scikit-learn fits for each pair of layers, on tokens that are spread evenly over those given.

    Args:
        fitted_on: a recorded trace.
        max_tokens: at most so many of its tokens are used.
    """

    def __init__(self, fitted_on: RoutingTrace, max_tokens: int) -> None:
        self._fitted_on = fitted_on
        self._tokens = spread(fitted_on.num_tokens, max_tokens)
        self._models: dict[tuple[int, int], Any] = {}

    def scores_from(self, trace: RoutingTrace, source: int, distance: int) -> Scores:
        """Return the scores of a model that is fitted when it is first asked for."""
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # scikit-learn depends on it

        pair = (source, source + distance)
        # NumPy's threads and torch's wait for each other while spinning: on two cores, two threads are up to ten times
        # slower here than one.
        with threadpool_limits(1, user_api="blas"):
            if pair not in self._models:
                chosen = used(self._fitted_on, pair[1])[self._tokens]
                self._models[pair] = self._fit(self._inputs(source), chosen)
            model = self._models[pair]
            return _mapped(trace, source, lambda x: torch.from_numpy(self._predict(model, x.numpy())))

    def _inputs(self, layer_idx: int) -> npt.NDArray[np.float32]:
        pieces = []
        for start, x in blocks(self._fitted_on, layer_idx):
            mine = self._tokens[(self._tokens >= start) & (self._tokens < start + len(x))]
            pieces.append(x[torch.from_numpy(mine - start)].numpy())
        return np.concatenate(pieces)

    def _fit(self, inputs: npt.NDArray[np.float32], chosen: Scores) -> Any:
        """Fit a model from standardised gate inputs `[n, hidden_size]` to 0/1 `[n, num_experts]`."""
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # it stops after MLP_EPOCHS on purpose
            return make_pipeline(StandardScaler(), self._estimator(len(inputs))).fit(inputs, chosen)

    @abstractmethod
    def _estimator(self, num_tokens: int) -> Any:
        """Return the estimator of scikit-learn to fit on so many tokens."""

    @abstractmethod
    def _predict(self, model: Any, inputs: npt.NDArray[np.float32]) -> Scores:
        """Return a model's scores `[n, num_experts]`."""


class Linear(_Fitted):
    """Ridge regression on standardised gate inputs, all experts of a layer at once."""

    def __init__(self, fitted_on: RoutingTrace) -> None:
        super().__init__(fitted_on, LINEAR_TOKENS)

    def _estimator(self, num_tokens: int) -> Any:
        from sklearn.linear_model import Ridge

        return Ridge(alpha=1.0)

    def _predict(self, model: Any, inputs: npt.NDArray[np.float32]) -> Scores:
        scores: Scores = model.predict(inputs).astype(np.float32)
        return scores


class SklearnMlp(_Fitted):
    """One hidden layer on standardised gate inputs, a logistic output per expert."""

    def __init__(self, fitted_on: RoutingTrace) -> None:
        super().__init__(fitted_on, MLP_TOKENS)

    def _estimator(self, num_tokens: int) -> Any:
        from sklearn.neural_network import MLPClassifier

        return MLPClassifier(
            (MLP_WIDTH,),
            max_iter=MLP_EPOCHS,
            batch_size=min(MLP_BATCH, num_tokens),
            learning_rate_init=MLP_LEARNING_RATE,
            random_state=0,
        )

    def _predict(self, model: Any, inputs: npt.NDArray[np.float32]) -> Scores:
        scores: Scores = model.predict_proba(inputs).astype(np.float32)
        return scores

    def probabilities(self, scores: Scores, layer_idx: int, lookahead: int) -> Scores:
        """Return the scores, which are probabilities."""
        return scores


HIDDEN_KINDS: dict[str, Callable[[RoutingTrace], Kind]] = {"gate": Gate, "linear": Linear, "sklearn-mlp": SklearnMlp}
