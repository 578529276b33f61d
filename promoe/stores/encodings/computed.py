"""Weights that a checkpoint keeps as the result of a formula: read in fp32, and rounded once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from promoe.stores.encodings.base import Encoding


@dataclass(frozen=True)
class PlusOne(Encoding):
    """A weight plus one: norms that multiply by `1 + weight`, in a format whose norms multiply by what is stored."""

    name = "1 + weight"

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """See `Encoding.decode`."""
        out.copy_(parts[0].float() - 1.0)


@dataclass(frozen=True)
class NegatedExponential(Encoding):
    """A weight whose exponential, negated, is stored."""

    name = "-exp(weight)"

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """See `Encoding.decode`."""
        out.copy_(torch.log(-parts[0].float()))
