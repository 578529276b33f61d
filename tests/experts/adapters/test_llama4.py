"""Llama 4: rows of every token for every expert, zeros where it was not chosen."""

from __future__ import annotations

import pytest
import torch

from experts.adapters.layers import Recorded, model_and_layer


def rows_for(chosen: list[int], tokens: int = 3) -> torch.Tensor:
    """`[E * T, H]`: each of the chosen experts has one token, all else is zero."""
    rows = torch.zeros(8, tokens, 64)
    for number, expert in enumerate(chosen):
        rows[expert, number % tokens] = torch.randn(64)
    return rows.view(-1, 64)


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("chosen", [[4], [1, 6], [0, 2, 3, 7], list(range(8)), []])
@torch.inference_mode()
def test_experts_without_tokens_are_left_out(chosen: list[int], size: int) -> None:
    """With the bits of the stock product over all experts, however many are computed at once."""
    _, layer = model_and_layer("llama4")
    rows, recorded = rows_for(chosen), Recorded(layer, size)
    found = layer.adapter.call(layer.experts, recorded)(rows)
    assert torch.equal(found, layer.experts(rows))
    assert recorded.needed == chosen


@torch.inference_mode()
def test_the_choice_is_that_of_the_largest_logits() -> None:
    _, layer = model_and_layer("llama4")
    output = layer.gate(torch.randn(5, 64))
    chosen = layer.chosen(output)
    assert chosen is not None
    scores = output[0]
    assert torch.equal(chosen.sort(dim=1).values, scores.topk(3).indices.sort(dim=1).values)
