"""Watches a model's gates during forward passes: what each read and what it answered, per sequence and token.

Hooks on the gates alone, so it works on a patched model as on any other. Knows models; not files or prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from promoe.errors import UnsupportedModelError
from promoe.moe_layers import MoELayer, gate_indices


@dataclass(frozen=True)
class GateRecord:
    """One pass of B sequences of T tokens through all gates.

    Args:
        token_ids: `[B, T]`.
        real: `[B, T]`, False where there is padding.
        gate_inputs: bfloat16 `[B, T, layers, hidden_size]`.
        gate_logits: float32 `[B, T, sum of experts]`.
        experts: int16 `[B, T, sum of top_k]`.
    """

    token_ids: npt.NDArray[np.int32]
    real: npt.NDArray[np.bool_]
    gate_inputs: torch.Tensor
    gate_logits: npt.NDArray[np.float32]
    experts: npt.NDArray[np.int16]


class GateRecorder:
    """Context in which every pass of a model is recorded.

    Args:
        model: whose forward takes `input_ids`.
        layers: its MoE layers.
    """

    def __init__(self, model: nn.Module, layers: Sequence[MoELayer]) -> None:
        self._model = model
        self._layers = layers
        self._gates: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._input_ids: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None
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

    def take(self) -> list[GateRecord]:
        """The passes since the last call, in order."""
        records, self._records = self._records, []
        return records

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            raise UnsupportedModelError(
                f"{type(model).__name__} was called without input_ids [sequences, tokens]: only models that read text can "
                "be recorded."
            )
        self._input_ids, self._mask = ids, kwargs.get("attention_mask")
        self._gates.clear()

    def _tap(self, layer: MoELayer) -> Any:
        def on_gate(gate: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            gate_input = args[0] if args else kwargs.get("hidden_states")
            chosen = gate_indices(output)
            logits = gate_logits(output, layer.num_experts)
            if gate_input is None or chosen is None or logits is None:
                raise UnsupportedModelError(
                    f"{layer.gate_name!r} ({type(gate).__name__}) does not return logits over its {layer.num_experts} "
                    "experts and the chosen ids, or hides its input: its routing cannot be recorded."
                )
            self._gates[layer.layer_idx] = (gate_input.detach(), logits.detach(), chosen)

        return on_gate

    def _end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if len(self._gates) < len(self._layers):
            missing = [layer.gate_name for layer in self._layers if layer.layer_idx not in self._gates]
            raise UnsupportedModelError(f"The gates {missing} did not run in this forward: they cannot be recorded.")
        assert self._input_ids is not None
        shape = tuple(self._input_ids.shape)
        taken = [self._gates[idx] for idx in range(len(self._layers))]
        inputs = [x.reshape(*shape, -1).to(torch.bfloat16) for x, _, _ in taken]
        logits = [x.reshape(*shape, -1).float() for _, x, _ in taken]
        chosen = [x.reshape(*shape, -1).to(torch.int16) for _, _, x in taken]
        self._records.append(
            GateRecord(
                token_ids=self._input_ids.cpu().numpy().astype(np.int32),
                real=self._real(shape),
                gate_inputs=torch.stack(inputs, dim=2).cpu(),
                gate_logits=torch.cat(logits, dim=2).cpu().numpy(),
                experts=torch.cat(chosen, dim=2).cpu().numpy(),
            )
        )

    def _real(self, shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
        mask = self._mask
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            return np.ones(shape, dtype=np.bool_)
        result: npt.NDArray[np.bool_] = mask[:, -shape[1] :].bool().cpu().numpy()
        return result


def gate_logits(output: Any, num_experts: int) -> torch.Tensor | None:
    """The first floating tensor `[..., num_experts]` of a gate's output: logits, or what stands for them."""
    parts = output if isinstance(output, tuple | list) else (output,)
    for part in parts:
        if isinstance(part, torch.Tensor) and part.is_floating_point() and part.shape[-1] == num_experts:
            return part
    return None
