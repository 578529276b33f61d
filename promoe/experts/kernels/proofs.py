"""Whether a kernel has the bits of its reference. It is compared once for each kind of call, and the verdict is kept.

No kernel but the model's own is trusted to have the right bits: before it is used for a kind of call (a layer, dtypes,
a number of rows, whatever bits may depend on), its result is compared with the reference's. One that differed once is
never used again for that kind of call.
"""

from __future__ import annotations

from collections.abc import Hashable
from weakref import WeakKeyDictionary

import torch
from torch import nn


class Proof:
    """What is known of one kind of call.

    Attributes:
        same: whether the bits were those of the reference; None: nothing that was compared has told so far.
    """

    __slots__ = ("same",)

    def __init__(self) -> None:
        self.same: bool | None = None

    def compare(self, found: torch.Tensor, expected: torch.Tensor) -> bool:
        """Compare a result with the reference's, keep the verdict, and return whether this one was the same.

        Results that differ say nothing where NaN was expected (of padding, say), because NaN differs from itself.
        """
        same = found.dtype == expected.dtype and torch.equal(found, expected)
        if same or not bool(expected.isnan().any()):
            self.keep(same)
        return same

    def keep(self, same: bool) -> bool:
        """Keep a verdict, and return it. A kernel whose bits differed once is not trusted any more."""
        self.same = same and self.same is not False
        return same


_OF_MODULES: WeakKeyDictionary[nn.Module, dict[Hashable, Proof]] = WeakKeyDictionary()
_OF_FORMATS: dict[Hashable, Proof] = {}


def proof_of(kind: Hashable, experts: nn.Module | None = None) -> Proof:
    """Return what is known of a kind of call.

    Args:
        kind: everything that bits may depend on, with the kernel itself.
        experts: the module that was called, which the proof goes with; None: the kind says it all.
    """
    proofs = _OF_FORMATS if experts is None else _OF_MODULES.get(experts)
    if proofs is None:
        proofs = _OF_MODULES.setdefault(experts, {})  # type: ignore[arg-type]
    found = proofs.get(kind)
    return proofs.setdefault(kind, Proof()) if found is None else found
