"""The contract between a model that is served and a predictor: what it is given, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from promoe.scheduler.reuse import LearnedReuse
from promoe.stats.counts import Phase


@dataclass(frozen=True, slots=True)
class PredictorContext:
    """The model that a predictor serves.

    Args:
        gates: the gate module of each MoE layer, in order.
        num_experts: routed experts of each MoE layer.
        top_k: experts per token of each MoE layer.
        model_type: the model's family in Transformers; None: unknown.
        chosen: for each MoE layer, the function that reads the chosen ids `[T, K]` from its gate's output; None: find
            them by their dtype.
        num_ids: ids that each gate may choose. Those from `num_experts` on need no weights.
    """

    gates: Sequence[nn.Module]
    num_experts: Sequence[int]
    top_k: Sequence[int]
    model_type: str | None = None
    chosen: Sequence[Callable[[Any], torch.Tensor | None]] | None = None
    num_ids: Sequence[int] | None = None

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return len(self.gates)

    @property
    def hidden_size(self) -> int | None:
        """Size of the gate input, from the first gate's weight `[num_experts, hidden_size]`; None: there is no such weight."""
        weight = gate_weight(self.gates[0].parameters(), self.num_experts[0])
        return None if weight is None else weight.shape[1]


def gate_weight(tensors: Iterable[torch.Tensor], num_experts: int) -> torch.Tensor | None:
    """Return a gate's weight, the first of its tensors that is `[num_experts, hidden_size]`; None: it has none."""
    return next((tensor for tensor in tensors if tensor.dim() == 2 and len(tensor) == num_experts), None)


@dataclass(frozen=True, slots=True)
class LayerVisit:
    """One pass of tokens through one gate.

    Args:
        pass_idx: number of this forward pass of the model.
        phase: "prefill" or "decode".
        layer_idx: MoE layer.
        gate_input: `[num_tokens, hidden_dim]`, a copy without gradients that the predictor may keep. Of many sequences that
            are decoded together, it has some. Predictors are not asked about long prompts.
        chosen: experts chosen for each of these tokens, `[num_tokens][top_k]`.
        gate_args: the gate's positional arguments after its input.
        gate_kwargs: the gate's keyword arguments.
        token_shape: shape of the tokens in the gate's call, `(num_tokens,)` or `(sequences, tokens)`; () if unknown.
        all_tokens: how many tokens passed the gate, if these are some of them; 0: these are all. What is forecast of some is
            then taken to hold for the others.
    """

    pass_idx: int
    phase: Phase
    layer_idx: int
    gate_input: torch.Tensor
    chosen: Sequence[Sequence[int]]
    gate_args: tuple[Any, ...] = ()
    gate_kwargs: dict[str, Any] = field(default_factory=dict)
    token_shape: tuple[int, ...] = ()
    all_tokens: int = 0

    def of_some(self, tokens: slice) -> LayerVisit:
        """Return the visit of some of its tokens, in copies."""
        gate_input = self.gate_input[tokens].clone()
        shape = (*(1 for _ in self.token_shape[1:]), len(gate_input))

        def some(value: Any) -> Any:
            if not self.is_of_tokens(value):
                return value
            rest = value.shape[max(1, len(self.token_shape)) :]
            return value.reshape(-1, *rest)[tokens].reshape(*shape, *rest).clone()

        return replace(
            self,
            gate_input=gate_input,
            chosen=self.chosen[tokens],
            gate_args=tuple(map(some, self.gate_args)),
            gate_kwargs={name: some(value) for name, value in self.gate_kwargs.items()},
            token_shape=shape,
            all_tokens=len(self.gate_input),
        )

    def is_of_tokens(self, value: Any) -> bool:
        """Return whether a gate's argument holds one entry per token: whether its first dimensions are the tokens'."""
        shape = self.token_shape or (len(self.gate_input),)
        # A vector of floats is a bias of the experts, of which there may be as many as tokens.
        is_bias = isinstance(value, torch.Tensor) and value.dim() == 1 and value.is_floating_point()
        return isinstance(value, torch.Tensor) and not is_bias and tuple(value.shape[: len(shape)]) == shape


@dataclass(frozen=True, slots=True)
class Forecast:
    """The probability that a later visit uses each expert.

    Args:
        steps_ahead: how many layer visits later. It counts on into the next pass: layer 0 of the next token is
            `num_layers - i` steps from layer i.
        layer_idx: the layer of that visit.
        probabilities: `[num_experts]`.
    """

    steps_ahead: int
    layer_idx: int
    probabilities: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ReuseForecast:
    """How likely the layer's next visits use each of its experts. Eviction goes by it, if `Traits.foresees_reuse`.

    Args:
        layer_idx: the layer that was just visited.
        log_odds: `[num_experts]`, that one of the next `promoe.scheduler.reuse.HORIZON_VISITS` visits uses the expert.
    """

    layer_idx: int
    log_odds: npt.NDArray[np.float32]


class Predictor(Protocol):
    """Answers a layer visit with forecasts of later ones. Called by one thread at a time, in the order of the visits.

    Only `predict` is required. A predictor may also have the attributes of `Traits`, which say what else it can do.
    """

    def predict(self, visit: LayerVisit) -> Sequence[Forecast | ReuseForecast]:
        """Return forecasts for layers after this visit, nearest first. May keep state; must not modify the visit."""
        ...


@dataclass(frozen=True, slots=True)
class Traits:
    """What a predictor can do besides `predict`. Each field is an attribute that a predictor may have, with its default.

    Args:
        quick: it predicts in less time than it takes to hand a visit to another thread, some 0.4 ms. Then it runs in the
            forward if the model computes on every core, and otherwise, like any other, in a thread of its own.
        needs_every_visit: it has to be asked about every visit but those of long prompts. Of others, visits are skipped when
            they come faster than they are predicted from, or when a forecast could have no effect.
        reuse: what the reuse prior starts from; None: nothing was learned of the model.
    """

    quick: bool = False
    needs_every_visit: bool = False
    reuse: LearnedReuse | None = None

    @classmethod
    def of(cls, predictor: Predictor | None) -> Traits:
        """Return a predictor's traits; those that it does not mention, and all of no predictor, have their defaults."""
        return cls(
            quick=bool(getattr(predictor, "quick", False)),
            needs_every_visit=bool(getattr(predictor, "needs_every_visit", False)),
            reuse=getattr(predictor, "reuse", None),
        )

    @property
    def foresees_reuse(self) -> bool:
        """Whether it answers with `ReuseForecast`s, for eviction, too."""
        return self.reuse is not None and self.reuse.foreseen is not None


def any_token(per_token: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the probability `[...]` that at least one of the tokens `[num_tokens, ...]` uses an expert, 1 - prod(1 - p)."""
    result: npt.NDArray[np.float64] = per_token[0] if len(per_token) == 1 else 1.0 - np.prod(1.0 - per_token, axis=0)
    return result


def horizon(layer_idx: int, lookahead: int, num_layers: int) -> list[tuple[int, int]]:
    """Return (steps ahead, layer) of the next `lookahead` visits, which may reach into the next pass."""
    return [(k, (layer_idx + k) % num_layers) for k in range(1, min(lookahead, num_layers) + 1)]
