"""A model on the meta device while it is opened: its MoE layers, and the dtypes that loading will give it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from promoe.experts.adapters.base import set_tensor
from promoe.experts.moe_layers import MoELayer, find_moe_layers
from promoe.stores.checkpoint_names import BankSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def find_layers(model: PreTrainedModel, load_config: Any) -> list[MoELayer]:
    """Return the MoE layers of a model on the meta device, with experts in the dtypes that loading would give them."""
    layers = find_moe_layers(model, allow_meta=True)
    kept = _patterns(load_config.dtype_plan)
    changed = False
    for layer in layers:
        for bank in layer.tensors:
            for path in bank.paths:
                full_name = f"{layer.name}.{path}"
                dtype = next((dtype for pattern, dtype in kept.items() if pattern.search(full_name)), bank.dtype)
                if dtype != bank.dtype:
                    empty = torch.empty(bank.stack_shape, dtype=dtype, device="meta")
                    set_tensor(layer.experts, path, torch.nn.Parameter(empty, requires_grad=False))
                    changed = True
    return find_moe_layers(model, allow_meta=True) if changed else layers


def as_loaded(model: PreTrainedModel, dtype_plan: Mapping[str, torch.dtype] | None) -> None:
    """Tie the weights of a model on the meta device, and set the dtypes in which they would be loaded."""
    model.tie_weights()
    patterns, kept = _patterns(dtype_plan), set(model.state_dict())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        dtype = next((dtype for pattern, dtype in patterns.items() if pattern.search(name)), tensor.dtype)
        if dtype != tensor.dtype and tensor.is_floating_point() and name in kept:
            tensor.data = tensor.data.to(dtype)


def dtype_of(name: str, load_config: Any) -> torch.dtype:
    """Return the dtype in which a tensor of the checkpoint will be loaded."""
    kept = _patterns(load_config.dtype_plan)
    found: torch.dtype = load_config.dtype or torch.get_default_dtype()
    return next((dtype for pattern, dtype in kept.items() if pattern.search(name)), found)


def _patterns(dtype_plan: Mapping[str, torch.dtype] | None) -> dict[re.Pattern[str], torch.dtype]:
    """Return Transformers' `dtype_plan` with its name patterns compiled."""
    return {re.compile(glob.replace("*", ".*")): dtype for glob, dtype in (dtype_plan or {}).items()}


def bank_specs(layer: MoELayer) -> list[BankSpec]:
    """Return the tensors of a layer's experts in the form in which stores plan them."""
    return [
        BankSpec(
            tensor.name,
            tuple(f"{layer.name}.{path}" for path in tensor.paths),
            layer.num_experts,
            tensor.shape,
            tensor.dtype,
            tensor.stack_shape,
        )
        for tensor in layer.tensors
    ]
