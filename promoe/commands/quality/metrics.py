"""Compares the logits and answers of two models. Pure: knows tensors and numbers, not models or files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Scores(NamedTuple):
    """What is measured of each predicted token; all `[tokens]`."""

    nll: torch.Tensor
    """Negative log-likelihood of the token that follows in the text, in nats, fp64."""
    kl: torch.Tensor
    """KL divergence KL(reference || model) of the distributions of that token, in nats, fp64."""
    agrees: torch.Tensor
    """Whether the most likely token is the reference's, bool."""

    @classmethod
    def empty(cls, count: int) -> Scores:
        """Return room for the scores of `count` tokens."""
        nll, kl = torch.empty((2, count), dtype=torch.float64)
        return cls(nll, kl, torch.empty(count, dtype=torch.bool))

    def put(self, start: int, part: Scores) -> None:
        """Write the scores of tokens from number `start` on."""
        for whole, tensor in zip(self, part, strict=True):
            whole[start : start + len(tensor)] = tensor


@dataclass(frozen=True)
class Figures:
    """Means over all predicted tokens. Standard errors (`..._error`) treat tokens as independent of each other.

    Attributes:
        loss: negative log-likelihood, in nats per token.
        loss_increase: the loss less the reference's.
        loss_increase_error: its standard error, token by token; nan for one token.
        kl: KL(reference || model), in nats per token.
        kl_error: its standard error; nan for one token.
        agreement: share (0..1) of tokens whose most likely prediction is the reference's.
    """

    loss: float
    loss_increase: float
    loss_increase_error: float
    kl: float
    kl_error: float
    agreement: float

    @property
    def perplexity(self) -> float:
        """`exp(loss)`."""
        return float(torch.tensor(self.loss, dtype=torch.float64).exp())  # inf, where `math.exp` would raise


def score(logits: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> Scores:
    """Return what is measured of each row.

    Args:
        logits: of the model, `[n, vocabulary]`, of any float dtype.
        reference: of the reference, likewise.
        targets: the tokens that follow in the text, `[n]`.
    """
    # In fp64: the divergences of 8 bits are not much larger than fp32's error of a sum over a large vocabulary.
    model_log, reference_log = (torch.log_softmax(one.double(), dim=1) for one in (logits, reference))
    shares = reference_log.exp()
    # What the reference rules out adds nothing. Where both do, the difference would be NaN.
    terms = torch.where(shares > 0, shares * (reference_log - model_log), 0.0)
    return Scores(
        nll=-model_log.gather(1, targets.unsqueeze(1)).squeeze(1),
        kl=terms.sum(dim=1),
        agrees=logits.argmax(dim=1) == reference.argmax(dim=1),
    )


def figures_of(scores: Scores, reference: Scores) -> Figures:
    """Return the means over tokens.

    Args:
        scores: of the model.
        reference: of the reference, for the same tokens.
    """
    increases = scores.nll - reference.nll
    return Figures(
        loss=float(scores.nll.mean()),
        loss_increase=float(increases.mean()),
        loss_increase_error=_standard_error(increases),
        kl=float(scores.kl.mean()),
        kl_error=_standard_error(scores.kl),
        agreement=float(scores.agrees.double().mean()),
    )


def _standard_error(values: torch.Tensor) -> float:
    return float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def same_tokens(answer: Sequence[int], reference: Sequence[int], most: int) -> int:
    """Return how many tokens two answers have in common before they differ; `most` if they are the same."""
    if list(answer) == list(reference):
        return most
    pairs = zip(answer, reference, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(answer), len(reference)))
