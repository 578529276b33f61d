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
        version = None if tensor.is_inference() else tensor._version
        return cls(registry, name, tensor, tensor.data_ptr(), version)

    def change(self, may_move: bool) -> str:
        """What was done to it since; "" if nothing. Something else in its place is none where it `may_move`."""
        tensor = self.tensor
        if self.version is not None and tensor._version != self.version:
            return "wrote to"
        if may_move:
            return ""
        if self.registry.get(self.name) is not tensor:
            return "replaced"
        return "gave other data to" if tensor.data_ptr() != self.address else ""


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
        for seen in self._stacks:
            registry, name, tensor, address, version = seen
            # On the path of every layer: nothing is called where nothing has changed.
            if (
                version is None
                or tensor._version != version
                or registry.get(name) is not tensor
                or tensor.data_ptr() != address
            ):
                self._look_at(seen)
        for tensors in self._by_expert:
            for expert_idx in ids:
                self._look_at(tensors[expert_idx])

    def _look_at(self, seen: _Seen) -> None:
        # Accelerate takes weights away, and brings them back for each call.
        if change := seen.change(may_move="_hf_hook" in vars(self._layer.experts)):
            raise self._changed(seen, change)

    def _changed(self, seen: _Seen, change: str) -> PatchStateError:
        return PatchStateError(
            f"After patching, something {change} {seen.name!r} of {self._layer.name!r}, whose experts are served from there: "
            "slots may hold what it was before. Unpatch the model, which gives it all of its present weights, and patch it "
            "again after such changes."
        )
