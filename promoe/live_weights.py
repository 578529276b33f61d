"""Experts that are served from a model's own tensors in RAM: whether these are still what they were when it was patched.

Slots hold copies. A write to the tensors would reach the experts that are fetched after it, and not those that are in slots: an
answer from old and new weights, which nobody would notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from promoe.adapters.base import owner_of
from promoe.errors import PatchStateError
from promoe.moe_layers import MoELayer


class _Seen(NamedTuple):
    """A registered tensor as it was."""

    registry: dict[str, torch.Tensor]
    name: str
    tensor: torch.Tensor
    address: int
    version: int | None  # None: torch does not count its changes

    @classmethod
    def of(cls, registry: dict[str, torch.Tensor], name: str) -> _Seen:
        tensor = registry[name]
        return cls(registry, name, tensor, tensor.data_ptr(), _version(tensor))

    def change(self, may_move: bool) -> str:
        """What was done to it since; "" if nothing. Something else in its place is none where it `may_move`."""
        if _version(self.tensor) != self.version:
            return "wrote to"
        if may_move:
            return ""
        if self.registry.get(self.name) is not self.tensor:
            return "replaced"
        return "gave other data to" if self.tensor.data_ptr() != self.address else ""


class LiveWeights:
    """A layer's expert tensors, watched. What is written through `.data` is not seen: torch does not count it.

    Args:
        layer: as it is patched.
    """

    def __init__(self, layer: MoELayer) -> None:
        self._layer = layer
        seen = [[_Seen.of(*owner_of(layer.experts, path)) for path in tensor.paths] for tensor in layer.tensors]
        self._stacks = [tensors[0] for tensors in seen if len(tensors) == 1]
        self._by_expert = [tensors for tensors in seen if len(tensors) > 1]

    def check(self, ids: Sequence[int]) -> None:
        """Whether the tensors of these experts are what they were.

        Raises:
            PatchStateError: they are not.
        """
        may_move = hasattr(
            self._layer.experts, "_hf_hook"
        )  # accelerate takes weights away and brings them back, call by call
        for seen in self._stacks:
            if change := seen.change(may_move):
                raise self._changed(seen, change)
        for tensors in self._by_expert:
            for expert_idx in ids:
                if change := tensors[expert_idx].change(may_move):
                    raise self._changed(tensors[expert_idx], change)

    def _changed(self, seen: _Seen, change: str) -> PatchStateError:
        return PatchStateError(
            f"After patching, something {change} {seen.name!r} of {self._layer.name!r}, whose experts are served from there: "
            "slots may hold what it was before. Unpatch the model, which gives it all of its present weights, and patch it "
            "again after such changes."
        )


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
