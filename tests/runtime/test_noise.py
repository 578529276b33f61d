"""Samples of one sequence: their distribution, and what they depend on."""

from __future__ import annotations

import torch

from promoe.runtime.noise import with_noise

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -8.0])


def drawn(logits: torch.Tensor, count: int = 4000) -> torch.Tensor:
    tokens = torch.stack([with_noise(logits, 1, position).argmax() for position in range(count)])
    return tokens.bincount(minlength=len(logits)) / count


def test_tokens_are_drawn_from_the_softmax() -> None:
    for temperature in (0.5, 1.0, 2.0):
        expected = (LOGITS / temperature).softmax(0)
        assert (drawn(LOGITS / temperature) - expected).abs().max() < 0.03


def test_tokens_that_were_left_out_are_not_drawn() -> None:
    left = LOGITS.index_fill(0, torch.tensor([0, 3, 4]), -torch.inf)
    assert drawn(left, 500).nonzero().flatten().tolist() == [1, 2]


def test_a_seed_and_a_position_say_it_all() -> None:
    flat = torch.zeros(1000)
    tokens = {
        (seed, position): int(with_noise(flat, seed, position).argmax())
        for seed in (-1, 0, 1, 2**63 - 1)
        for position in range(50)
    }
    torch.manual_seed(5)
    assert all(token == int(with_noise(flat, seed, position).argmax()) for (seed, position), token in tokens.items())
    assert len(set(tokens.values())) > 150
