"""Jamba: what the gate returns is a choice, or logits from which the block will choose, by version."""

from __future__ import annotations

import torch

from experts.adapters.layers import model_and_layer


@torch.inference_mode()
def test_the_choice_is_known_at_the_gate() -> None:
    _, layer = model_and_layer("jamba")
    output = layer.gate(torch.randn(5, 64))
    logits = output if isinstance(output, torch.Tensor) else output[0]
    chosen = layer.chosen(output)
    assert chosen is not None
    assert torch.equal(chosen.sort(dim=1).values, logits.topk(3).indices.sort(dim=1).values)
