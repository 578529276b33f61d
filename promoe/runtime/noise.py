"""Noise that follows from the seed of a sequence and the position in its answer.

The most likely token after Gumbel noise was added to the logits is a sample of their softmax (Gumbel 1954). So answers do not
depend on what else is in a batch, nor on when.
"""

from __future__ import annotations

import torch


def with_noise(logits: torch.Tensor, seed: int, position: int) -> torch.Tensor:
    """Return logits `[vocabulary]` whose largest one is the token that is drawn.

    Args:
        logits: in fp32; divided by the temperature, and -inf for tokens that are left out.
        seed: the sequence's seed.
        position: number of tokens of the answer that came before.
    """
    generator = torch.Generator().manual_seed(_mixed(seed, position))
    noise = torch.empty(len(logits)).exponential_(generator=generator).log_()
    return logits - noise.to(logits.device)


def _mixed(seed: int, position: int) -> int:
    """Return another seed for each pair: neighbours must not share a stream of random numbers."""
    mixed = (seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ mixed >> 31) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ mixed >> 29) & 0x7FFFFFFFFFFFFFFF
