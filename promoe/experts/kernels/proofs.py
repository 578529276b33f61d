"""Prove that a kernel gives the bits of its reference. It is compared once for each kind of call, and the verdict is kept.

Only the model's own kernel is trusted to have the right bits. Before another kernel is used for a kind of call (a
layer, dtypes, a number of rows: everything that bits may depend on), its result is compared with the reference's. A
kernel that differed once is never used again for that kind of call.
"""

from __future__ import annotations

from collections.abc import Hashable
from weakref import WeakKeyDictionary

import torch
from torch import nn


class Proof:
    """What is known about the bits of one kind of call.

    Attributes:
        same: whether the bits were those of the reference; None: no comparison has given a verdict yet.
    """

    __slots__ = ("same",)

    def __init__(self) -> None:
        self.same: bool | None = None

    def compare(self, found: torch.Tensor, expected: torch.Tensor) -> bool:
        """Compare a result with the reference's, keep the verdict, and return whether the two were the same.

        If NaN was expected (in padding, for example), a difference gives no verdict, because NaN differs from itself.
        """
        same = found.dtype == expected.dtype and torch.equal(found, expected)
        if same or not bool(expected.isnan().any()):
            self.keep(same)
        return same

    def keep(self, same: bool) -> bool:
        """Keep a verdict, and return it. A kernel that differed once is never trusted again."""
        self.same = same and self.same is not False
        return same


_OF_MODULES: WeakKeyDictionary[nn.Module, dict[Hashable, Proof]] = WeakKeyDictionary()
_OF_FORMATS: dict[Hashable, Proof] = {}


def proof_of(kind: Hashable, experts: nn.Module | None = None) -> Proof:
    """Return the proof of a kind of call.

    Args:
        kind: the kernel, and everything that its bits may depend on.
        experts: the module that is called. The proof is kept as long as the module. None: the bits do not depend on it.
    """
    proofs = _OF_FORMATS if experts is None else _OF_MODULES.get(experts)
    if proofs is None:
        proofs = _OF_MODULES.setdefault(experts, {})  # type: ignore[arg-type]
    found = proofs.get(kind)
    return proofs.setdefault(kind, Proof()) if found is None else found
