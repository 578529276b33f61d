"""Draws tokens with noise that follows from the seed of a sequence and the position in its answer.

The most likely token after Gumbel noise was added to the logits is a sample of their softmax (Gumbel 1954). So answers do not
depend on what else is in a batch, nor on when.
"""

from __future__ import annotations

import torch

from promoe.runtime.sampling import Sampling


def with_noise(logits: torch.Tensor, sampling: Sampling, position: int) -> torch.Tensor:
    """Return logits `[vocabulary]` whose largest one is the token that is drawn.

    Args:
        logits: fp32.
        sampling: how tokens are drawn.
        position: tokens of the answer that came before.
    """
    if sampling.greedy:
        return logits
    left = _filtered(logits / sampling.temperature, sampling)
    generator = torch.Generator().manual_seed(_mixed(sampling.seed, position))
    noise = torch.empty(len(logits)).exponential_(generator=generator).log_()
    return left - noise.to(left.device)


def _filtered(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    if 0 < sampling.top_k < len(logits):
        least = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(0).cumsum(0) - ordered.softmax(0)
        left_out = before >= sampling.top_p
        left_out[0] = False
        logits = logits.masked_fill(torch.zeros_like(left_out).scatter(0, order, left_out), -torch.inf)
    return logits


def _mixed(seed: int, position: int) -> int:
    """Return another seed for each pair: neighbours must not share a stream of random numbers."""
    mixed = (seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ mixed >> 31) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ mixed >> 29) & 0x7FFFFFFFFFFFFFFF
