"""Losses for scores over experts, given which were chosen and what the gate itself thought."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A function of scores, chosen 0/1 and the gate's log probabilities, all `[..., E]`, that returns `[...]`."""


def bce(scores: torch.Tensor, chosen: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return binary cross-entropy: each expert by itself, chosen or not."""
    return F.binary_cross_entropy_with_logits(scores, chosen, reduction="none").sum(-1)


def kl(scores: torch.Tensor, chosen: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return the Kullback-Leibler divergence of softmax(scores) from the gate's own distribution."""
    return F.kl_div(scores.log_softmax(-1), gate, log_target=True, reduction="none").sum(-1)


def ce_kl(scores: torch.Tensor, chosen: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of softmax(scores) with the chosen experts in equal parts, plus `kl`."""
    log_p = scores.log_softmax(-1)
    cross_entropy = -(log_p * chosen).sum(-1) / chosen.sum(-1).clamp_min(1)
    return cross_entropy + F.kl_div(log_p, gate, log_target=True, reduction="none").sum(-1)


def ranking(scores: torch.Tensor, chosen: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return the logistic loss of each pair of a chosen expert and one that is not, per chosen expert."""
    ids = chosen.topk(int(chosen.sum(-1).max()), dim=-1).indices  # few: not every pair of experts is looked at
    pairs = F.softplus(scores[..., None, :] - scores.gather(-1, ids)[..., None])
    wanted = chosen.gather(-1, ids)[..., None] * (1 - chosen[..., None, :])
    return (pairs * wanted).sum((-1, -2)) / chosen.sum(-1).clamp_min(1)


LOSSES: dict[str, Loss] = {"bce": bce, "kl": kl, "ce_kl": ce_kl, "ranking": ranking}
