"""Samples of one sequence: their distribution, and what they depend on."""

from __future__ import annotations

import torch

from promoe.runtime.noise import with_noise
from promoe.runtime.sampling import Sampling

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -8.0])


def drawn(sampling: Sampling, count: int = 4000) -> torch.Tensor:
    tokens = torch.stack([with_noise(LOGITS, sampling, position).argmax() for position in range(count)])
    return tokens.bincount(minlength=len(LOGITS)) / count


def test_without_temperature_the_logits_are_as_they_were() -> None:
    assert with_noise(LOGITS, Sampling(), 3) is LOGITS


def test_tokens_are_drawn_from_the_softmax() -> None:
    for temperature in (0.5, 1.0, 2.0):
        expected = (LOGITS / temperature).softmax(0)
        assert (drawn(Sampling(temperature, seed=1)) - expected).abs().max() < 0.03


def test_unlikely_tokens_are_left_out() -> None:
    assert drawn(Sampling(1.0, top_k=2, seed=1), 500).nonzero().flatten().tolist() == [0, 1]
    # The first has 64% of the probability, and the first two 88%.
    assert drawn(Sampling(1.0, top_p=0.6, seed=1), 500).nonzero().flatten().tolist() == [0]
    assert drawn(Sampling(1.0, top_p=0.7, seed=1), 500).nonzero().flatten().tolist() == [0, 1]
    assert drawn(Sampling(1.0, top_p=0.0, seed=1), 50).nonzero().flatten().tolist() == [0]


def test_a_seed_and_a_position_say_it_all() -> None:
    flat = torch.zeros(1000)
    tokens = {
        (seed, position): int(with_noise(flat, Sampling(1.0, seed=seed), position).argmax())
        for seed in (-1, 0, 1, 2**63 - 1)
        for position in range(50)
    }
    torch.manual_seed(5)
    assert all(
        token == int(with_noise(flat, Sampling(1.0, seed=seed), position).argmax())
        for (seed, position), token in tokens.items()
    )
    assert len(set(tokens.values())) > 150
