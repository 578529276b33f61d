"""Experts that are served from a model's own tensors in RAM: whether these are still what they were when it was patched.

Slots hold copies. A write to the tensors would reach the experts that are fetched after it, and not those that are in slots: an
answer from old and new weights, which nobody would notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from promoe.errors import PatchStateError
from promoe.experts.adapters.base import owner_of
from promoe.experts.moe_layers import MoELayer


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

    @property
    def came_back(self) -> bool:
        """Whether the module has another tensor with the same values in its place."""
        now, then = self.registry.get(self.name), self.tensor
        if now is None or now is then or (now.device, now.dtype, now.shape) != (then.device, then.dtype, then.shape):
            return False
        return torch.equal(now, then)


class LiveWeights:
    """A layer's expert tensors, watched. What is written through `.data` is not seen: torch does not count it.

    Args:
        layer: as it is patched.
    """

    def __init__(self, layer: MoELayer) -> None:
        self._layer = layer
        self._may_move = False
        seen = [[_Seen.of(*owner_of(layer.experts, path)) for path in tensor.paths] for tensor in layer.tensors]
        self._stacks = [tensors[0] for tensors in seen if len(tensors) == 1]
        self._by_expert = [tensors for tensors in seen if len(tensors) > 1]

    def check(self, ids: Sequence[int]) -> None:
        """Whether the tensors of these experts are what they were.

        Raises:
            PatchStateError: they are not.
        """
        for seen in self._stacks:
            self._check(seen)
        for tensors in self._by_expert:
            for expert_idx in ids:
                self._check(tensors[expert_idx])

    def _check(self, seen: _Seen) -> None:
        registry, name, tensor, address, version = seen
        # On the path of every layer: nothing is called where nothing has changed.
        if version is not None and tensor._version != version:
            raise self._changed("wrote to", name)
        if not self._may_move and (registry.get(name) is not tensor or tensor.data_ptr() != address):
            self._look_at(seen)

    def _look_at(self, seen: _Seen) -> None:
        """Accelerate takes weights away and brings them back, for each call or for good; that changes nothing."""
        if seen.came_back or any("_hf_hook" in vars(part) for part in self._layer.experts.modules()):
            self._may_move = True
            return
        how = "replaced" if seen.registry.get(seen.name) is not seen.tensor else "gave other data to"
        raise self._changed(how, seen.name)

    def _changed(self, how: str, name: str) -> PatchStateError:
        return PatchStateError(
            f"After patching, something {how} {name!r} of {self._layer.name!r}, whose experts are served from there: "
            "slots may hold what it was before. Unpatch the model, which gives it all of its present weights, and patch it "
            "again after such changes."
        )
