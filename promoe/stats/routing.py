"""Records which experts the gates of a model choose, pass by pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn

from promoe.stats.counts import Phase


class RoutedLayer(Protocol):
    """What a recorder needs of an MoE layer (`promoe.experts.moe_layers.MoELayer`)."""

    @property
    def layer_idx(self) -> int:
        """The layer's position among the model's MoE layers."""
        ...

    @property
    def gate(self) -> nn.Module:
        """The module whose forward chooses experts."""
        ...

    def chosen(self, gate_output: Any) -> torch.Tensor | None:
        """Return the experts `[T, K]` that a gate's output chooses; None if it does not tell."""
        ...


@dataclass(frozen=True)
class RoutedPass:
    """The routing of one forward pass of a model."""

    phase: Phase
    visits: list[tuple[int, list[list[int]]]] = field(default_factory=list)
    """(MoE layer, experts of each token `[num_tokens][top_k]`), in the order of execution."""


class RoutingRecorder:
    """Records the routing of a model's passes while its context lasts, for one unpadded sequence at a time.

    The model may be patched or not; its routing is the same. Recording takes a few microseconds per layer and pass, so
    record in a run that is not timed.

    Args:
        model: the model.
        layers: its MoE layers.
    """

    def __init__(self, model: nn.Module, layers: Sequence[RoutedLayer]) -> None:
        self._model = model
        self._layers = layers
        self._raw: list[list[tuple[int, torch.Tensor]]] = []
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> RoutingRecorder:
        self._undo = [self._model.register_forward_pre_hook(self._begin).remove]
        self._undo += [layer.gate.register_forward_hook(self._on_gate(layer)).remove for layer in self._layers]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for undo in self._undo:
            undo()

    def take(self) -> list[RoutedPass]:
        """Return the passes since the start or the last `take`, in order."""
        raw, self._raw = self._raw, []
        passes = []
        for visits in raw:
            tokens = [(layer_idx, index.tolist()) for layer_idx, index in visits]
            decode = all(len(rows) == 1 for _, rows in tokens)
            passes.append(RoutedPass("decode" if decode else "prefill", tokens))
        return passes

    def _begin(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        self._raw.append([])

    def _on_gate(self, layer: RoutedLayer) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def on_gate(gate: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            index = layer.chosen(output)
            if index is not None:
                self._raw[-1].append((layer.layer_idx, index))

        return on_gate
