"""The hot path of a patched model: what runs once or twice per MoE layer and token.

A gate's output becomes a hint to the engine and an input for the predictor. The experts' forward becomes a visit of the
engine.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import nn

from promoe.errors import PromoeError
from promoe.experts.adapters.base import changed_since
from promoe.experts.kernels.fast import FastProducts
from promoe.experts.layer_call import LayerCall, check_no_grad
from promoe.experts.moe_layers import MoELayer
from promoe.experts.routed_ids import DeviceIds, HostIds, IdReader
from promoe.model import attach
from promoe.model.changed_weights import LiveWeights
from promoe.model.passes import PassObserver, PassState, stack
from promoe.predictors import LayerVisit
from promoe.runtime.prediction import Forecaster
from promoe.scheduler.many_tokens import MOST_SHOWN, shown, uses_most
from promoe.stats.tracing import COMPUTE
from promoe.transfer.devices import Device
from promoe.transfer.engine import Engine
from promoe.transfer.rows import ExpertRows, FirstRows, Row

_NO_CAPTURE = (
    "A CUDA graph was being captured while the experts ran. During capture it is not known which experts a token needs, so "
    "their weights cannot be fetched. Generate without graphs: no static cache, no torch.compile(mode='reduce-overhead')."
)
# Up to this many rows, a matmul is limited by reading the weights.
MEMORY_BOUND_ROWS = 6


class Runtime:
    """Runs the experts of one model's MoE layers through an engine.

    Attributes:
        on_device: whether the model computes on a device, not on the CPU.

    Args:
        layers: the model's MoE layers, in order.
        engine: an engine that was started.
        forecaster: runs the predictor; None: no prefetching.
        passes: watches the model's forward passes.
        min_group_bytes: see `PromoeConfig`.
        stream: see `PromoeConfig`.
        device: the device that the model computes on; None: the CPU.
        live: whether experts are served from the layers' own tensors.
        fast: makes products with other bits than the unmodified model's; None: the bits are the same.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        engine: Engine,
        forecaster: Forecaster | None,
        passes: PassObserver,
        min_group_bytes: int = 0,
        stream: bool = True,
        device: Device | None = None,
        live: bool = False,
        fast: FastProducts | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self.engine = engine
        self.forecaster = forecaster
        self.passes = passes
        self.fast = fast
        self._min_group_bytes = min_group_bytes
        self._stream = stream
        self._block_forwards = [type(layer.block).forward for layer in layers]
        self._live = [LiveWeights(layer) for layer in layers] if live else []
        self.on_device = device is not None
        self._ids: IdReader = HostIds() if device is None else DeviceIds(device)
        self._experts_code: CodeType | None = None  # the code object that all forwards returned by `run` share

    @property
    def predictor_failed(self) -> bool:
        """Whether the predictor has failed, so that experts are only fetched on demand."""
        return self.forecaster is not None and self.forecaster.failed

    @property
    def visiting(self) -> bool:
        """Whether this thread is inside a layer's experts' forward (as a signal handler or a hook may be).

        The thread's stack is examined, because Ctrl-C could leave a flag set.
        """
        return any(frame.f_code is self._experts_code for frame in stack(sys._getframe()))

    def close(self) -> None:
        """Stop the predictor and the engine. Calling it again does nothing."""
        if self.forecaster is not None:
            self.forecaster.close()
        self.engine.close()

    def tap(self, layer: MoELayer) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
        """Return the forward hook for a layer's gate.

        The hook returns None, because a value would replace the gate's output. The runtime and the layer refer to
        gates, so the hook does not keep them alive. The layer's experts do.
        """
        self_ref, layer_idx = weakref.ref(self), layer.layer_idx

        def on_gate(gate: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            runtime = self_ref()
            if runtime is not None and runtime.layers[layer_idx].is_alive:  # otherwise somebody keeps only the gate
                runtime._gate_chose(runtime.layers[layer_idx], args, kwargs, output)

        return on_gate

    def _gate_chose(self, layer: MoELayer, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        present = layer.block._modules.get(layer.own_name)
        if present is not layer.experts:
            raise changed_since(f"replaced {layer.name!r} by a {type(present).__name__}")
        index = layer.chosen(output)
        if index is None:
            return
        _refuse_capture(index)
        on_host, tokens, ids = self._ids.at_gate(layer.name, index)
        if layer.num_ids > layer.num_experts:
            ids = _with_weights(layer, ids)
        state = self.passes.current()
        state.gated.add(layer.layer_idx)
        state.hint = (layer.layer_idx, ids, self.engine.hint(layer.layer_idx, ids))
        state.to_predict = None
        if self._stream and uses_most(len(index), len(ids), layer.num_experts):
            if layer is not self.layers[-1]:
                self.engine.stream(layer.layer_idx + 1)
        elif (
            self.forecaster is not None
            and self.forecaster.of_use
            and (len(index) <= MOST_SHOWN or state.phase == "decode")
        ):
            self._predict(layer, state, args, kwargs, on_host if tokens is None else tokens)

    def run(self, layer: MoELayer) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return a layer's experts' forward: `(hidden_states[T, H], top_k_index[T, K], top_k_weights[T, K]) -> [T, H]`."""

        def forward(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():  # tensors in slots never require a gradient, but the experts' own tensors may
                check_no_grad(hidden, weights, *layer.parameters())
            _refuse_capture(hidden)
            start_s = time.perf_counter()
            state = self.passes.current()
            state.entered.add(layer.layer_idx)
            on_host, tokens, ids = self._ids.at_experts(layer.name, index)
            hits = state.hits_at_gate(layer.layer_idx, ids)
            real_tokens = state.real_tokens(on_host, tokens)
            if layer.num_ids > layer.num_experts:
                ids, real_tokens = _with_weights(layer, ids), [_with_weights(layer, one) for one in real_tokens]
            if self._live:
                self._live[layer.layer_idx].check(ids)
            call = LayerCall(layer, hidden, index, weights, tokens, on_host if self.on_device else None, self.fast)
            visit = self.engine.visit(layer.layer_idx, ids, real_tokens, state.num_sequences, hits, state.phase)
            try:
                with visit:
                    predict = partial(self._predict_beside, layer, state)
                    # The predictor's queue waits for everything that is in the device's queue by now.
                    if self.on_device:
                        predict()
                    rows = visit.all_rows()
                    if rows is not None:
                        result = call.run_resident(_watched(rows, state, predict))
                    else:
                        at_once = (
                            self.on_device
                            or call.depends_on_groups
                            or self._work_bytes(layer, len(ids), index.numel()) < self._min_group_bytes
                        )
                        begin = not at_once and any(self.engine.first_names[layer.layer_idx]) and call.can_begin
                        if at_once or not visit.anything_ready:  # it waits before it computes
                            predict()
                        groups = visit.groups(at_once, begin)
                        result = call.run_groups(_watched(rows, state, predict) for rows in groups)
            except BaseException:
                visit.close()  # Ctrl-C may come just before the context ends, which then does not close the visit
                raise
            if (tracer := self.engine.tracer) is not None:
                tracer.span(
                    COMPUTE,
                    f"experts L{layer.layer_idx}",
                    start_s,
                    time.perf_counter(),
                    layer=layer.layer_idx,
                    experts=len(ids),
                    tokens=len(index),
                )
            return result

        self._experts_code = forward.__code__
        return forward

    @staticmethod
    def _work_bytes(layer: MoELayer, num_experts: int, num_pairs: int) -> float:
        """Return the cost of computing a layer, as bytes of weights that take as long to read.

        With few rows, a matmul takes as long as reading its weights.
        """
        return layer.layout.payload_bytes * max(num_experts, num_pairs / MEMORY_BOUND_ROWS)

    def _predict(
        self,
        layer: MoELayer,
        state: PassState,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        chosen: list[list[int]] | torch.Tensor,
    ) -> None:
        assert self.forecaster is not None
        if not args:  # with keyword arguments only, it is not known which one is the gate's input
            return
        gate_input = args[0].detach() if args[0].requires_grad else args[0]
        shape = tuple(gate_input.shape)
        if len(shape) != 2:
            gate_input = gate_input.reshape(-1, shape[-1])
        few = len(gate_input) <= MOST_SHOWN
        own = gate_input.clone() if few else gate_input
        tokens = chosen if isinstance(chosen, list) else chosen.tolist()
        if layer.num_ids > layer.num_experts:
            tokens = [_with_weights(layer, one) for one in tokens]
        visit = LayerVisit(state.pass_idx, state.phase, layer.layer_idx, own, tokens, args[1:], kwargs, shape[:-1])
        if not few:
            visit = visit.of_some(shown(len(gate_input)))
        # The hint comes before the visit that it announces, so the visit will be the scheduler's next step.
        origin_step = self.engine.scheduler.step + 1
        if self.forecaster.in_forward:
            self.forecaster.visit(origin_step, visit)
        else:
            state.to_predict = (origin_step, visit)

    def _predict_beside(self, layer: MoELayer, state: PassState) -> None:
        """Start the predictor's thread, unless that was done for this visit.

        The time for it is just before the forward multiplies or waits. Earlier, both threads would need the interpreter,
        and the forward would lose as much time as the prediction takes (`benchmarks/predict_latency.py` prints that).
        """
        if state.to_predict is None:
            return
        origin_step, visit = state.to_predict
        state.to_predict = None
        if self.forecaster is not None and visit.layer_idx == layer.layer_idx:
            self.forecaster.visit(origin_step, visit)

    def check_entered(self, state: PassState, model: nn.Module) -> None:
        """Check that a pass of `model` ran all its experts through promoe.

        A layer whose gate ran must have run its experts. A layer that the pass left out must still be in the model as
        it was patched.

        Raises:
            PromoeError: a block or its experts were replaced after patching (by a fused kernel, for example), or ids
                were changed after they had been read.
        """
        self._ids.check()
        if len(state.entered) == len(self.layers):
            return
        left_out = [layer for layer in self.layers if layer.layer_idx not in state.entered]
        if missed := [layer for layer in left_out if layer.layer_idx in state.gated]:
            raise _bypass_error(missed, "The gates of MoE layers {} fired but their experts")
        block_forwards = self._block_forwards
        if gone := [layer for layer in left_out if attach.was_replaced(model, layer, block_forwards[layer.layer_idx])]:
            raise _bypass_error(gone, "MoE layers {}")


class _WatchedRows(dict[int, Mapping[str, Row]]):
    """Rows that call `on_read` when a kernel reads an expert's tensors, which it does just before it multiplies."""

    def __init__(self, rows: ExpertRows, on_read: Callable[[], None]) -> None:
        super().__init__(rows)
        self._on_read = on_read

    def __getitem__(self, expert: int) -> Mapping[str, Row]:
        self._on_read()
        return super().__getitem__(expert)


def _watched(rows: ExpertRows, state: PassState, on_read: Callable[[], None]) -> ExpertRows:
    """Return rows that call `on_read`, if the predictor has not been started yet. `FirstRows` stay what they are."""
    return rows if state.to_predict is None or isinstance(rows, FirstRows) else _WatchedRows(rows, on_read)


def _refuse_capture(tensor: torch.Tensor) -> None:
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise PromoeError(_NO_CAPTURE)


def _bypass_error(layers: Sequence[MoELayer], what: str) -> PromoeError:
    return PromoeError(
        f"{what.format([layer.layer_idx for layer in layers])} did not run through promoe: something replaced "
        f"{layers[0].name!r}, its forward or that of its block after patching (use_kernels, another patch). The output of "
        "this pass may be wrong. Unpatch the model, and patch it after whatever changes its modules (load it without "
        "use_kernels)."
    )


def _with_weights(layer: MoELayer, ids: list[int]) -> list[int]:
    """Leave out the ids that need no weights, because nothing has to be fetched for them."""
    return [idx for idx in ids if idx < layer.num_experts]
