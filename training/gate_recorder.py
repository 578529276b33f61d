"""Records a model's gates during forward passes: what each gate read and what it answered, per sequence and token.

It only hooks gates, so it works on a patched model as on any other. Knows models; not files or prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from promoe.errors import UnsupportedModelError
from promoe.experts.gate_output import gate_logits
from promoe.experts.moe_layers import MoELayer


@dataclass(frozen=True)
class GateRecord:
    """One pass of B sequences of T tokens through all gates. Padding is recorded like other tokens.

    Args:
        token_ids: `[B, T]`.
        gate_inputs: bfloat16 `[B, T, layers, hidden_size]`.
        gate_logits: float32 `[B, T, sum of experts]`.
        experts: int16 `[B, T, sum of top_k]`.
    """

    token_ids: npt.NDArray[np.int32]
    gate_inputs: torch.Tensor
    gate_logits: npt.NDArray[np.float32]
    experts: npt.NDArray[np.int16]


class GateRecorder:
    """A context in which every pass of a model is recorded.

    A pass that cannot be recorded raises UnsupportedModelError: the model does not read `input_ids`, a gate did not run, or a
    gate does not say what it chose.

    Args:
        model: a model whose forward takes `input_ids`.
        layers: the model's MoE layers.
    """

    def __init__(self, model: nn.Module, layers: Sequence[MoELayer]) -> None:
        self._model = model
        self._layers = layers
        self._input_ids: torch.Tensor | None = None
        self._gates: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._records: list[GateRecord] = []
        self._undo = ExitStack()

    def __enter__(self) -> GateRecorder:
        with ExitStack() as undo:
            undo.callback(self._model.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
            undo.callback(self._model.register_forward_hook(self._end).remove)
            for layer in self._layers:
                undo.callback(layer.gate.register_forward_hook(self._tap(layer), with_kwargs=True).remove)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()
        self._gates.clear()

    def take(self) -> list[GateRecord]:
        """Return the passes since the last call, in order."""
        records, self._records = self._records, []
        return records

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            raise UnsupportedModelError(
                f"{type(model).__name__} was called without input_ids [sequences, tokens]: only models that read text can "
                "be recorded. Choose one that does."
            )
        self._input_ids = ids
        self._gates.clear()

    def _tap(self, layer: MoELayer) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
        def on_gate(gate: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            chosen = layer.chosen(output)
            logits = gate_logits(output, layer.num_experts)
            if not tensors or chosen is None or logits is None or layer.top_k not in (None, chosen.shape[-1]):
                raise UnsupportedModelError(
                    f"{layer.gate_name!r} ({type(gate).__name__}) does not return logits over its {layer.num_experts} "
                    f"experts and the ids of {layer.top_k} chosen ones, or hides its input: its routing cannot be "
                    "recorded. Choose a model of another family."
                )
            # Copied at once: later layers may write over what the gate read and returned.
            self._gates[layer.layer_idx] = (
                tensors[0].detach().to(torch.bfloat16, copy=True),
                logits.detach().to(torch.float32, copy=True),
                chosen.to(torch.int16),
            )

        return on_gate

    def _end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        missing = [layer.gate_name for layer in self._layers if layer.layer_idx not in self._gates]
        if missing:
            raise UnsupportedModelError(
                f"The gates {missing} of {type(model).__name__} did not run in this forward: it cannot be recorded. Undo "
                "what replaces the forward of its MoE blocks (use_kernels, another patch)."
            )
        assert self._input_ids is not None, "a pass ended that did not begin"
        shape = self._input_ids.shape
        taken = [self._gates[layer.layer_idx] for layer in self._layers]
        inputs, logits, chosen = ([x.reshape(*shape, -1) for x in tensors] for tensors in zip(*taken, strict=True))
        self._records.append(
            GateRecord(
                token_ids=self._input_ids.to("cpu", torch.int32, copy=True).numpy(),
                gate_inputs=torch.stack(inputs, dim=2).cpu(),
                gate_logits=torch.cat(logits, dim=2).cpu().numpy(),
                experts=torch.cat(chosen, dim=2).cpu().numpy(),
            )
        )
        self._gates.clear()
