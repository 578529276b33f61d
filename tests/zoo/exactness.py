"""Runs one tiny model unpatched and served from few slots, and compares everything that it returns, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from served import LinkOver, check_integrity, config, plain_link
from transformers import PreTrainedModel

import promoe
from promoe.experts.moe_layers import MoELayer, find_moe_layers


@contextmanager
def served(model: PreTrainedModel, slots: int, **arguments: Any) -> Iterator[PreTrainedModel]:
    """`model` patched with `slots` slots per layout of expert, which hold NaN before and after their experts."""
    defaults: dict[str, Any] = {"predictor": "gate", "link": LinkOver(plain_link), "config": config()}
    promoe.patch(model, cache=cache_bytes(find_moe_layers(model), slots), **(defaults | arguments))
    try:
        yield model
        check_integrity(model)
    finally:
        promoe.unpatch(model)


def cache_bytes(layers: list[MoELayer], slots: int) -> int:
    """A cache size that gives each layout of expert about `slots` slots."""
    by_layout: dict[Any, int] = {}
    total = sum(layer.num_experts * layer.layout.slot_bytes for layer in layers)
    for layer in layers:
        by_layout[layer.layout] = by_layout.get(layer.layout, 0) + layer.num_experts
    # Layouts share the budget by their experts' bytes: the one with the fewest experts must get its slots.
    return max(-(-slots * total // count) for count in by_layout.values())


@torch.inference_mode()
def outputs(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Everything that a forward returns, caches left out, then the same of a forward of one token after it."""
    prefill = model(**inputs)
    found = _tensors(prefill)
    if getattr(prefill, "past_key_values", None) is not None and not model.config.is_encoder_decoder:
        name = next(iter(inputs))
        found += _tensors(model(**{name: inputs[name][:, -1:]}, past_key_values=prefill.past_key_values))
    return found


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, (tuple, list)):
        return [tensor for part in output for tensor in _tensors(part)]
    items = output.items() if isinstance(output, dict) else ()
    return [tensor for name, part in items if name != "past_key_values" for tensor in _tensors(part)]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """All bits are the same, and none of them is NaN."""
    assert len(found) == len(expected) > 0, f"{len(found)} tensors, expected {len(expected)}"
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"output {number}: {(one.float() - other.float()).abs().max():.3g} off"
