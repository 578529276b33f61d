"""Detect changes of the experts' tensors in RAM after a model was patched.

Slots hold copies of these tensors. If somebody wrote to them, experts in slots would still have the old weights, while
experts that are fetched later would have the new ones. The model would silently mix both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from promoe.errors import PatchStateError
from promoe.experts.adapters.base import owner_of
from promoe.experts.moe_layers import MoELayer


class _TensorState(NamedTuple):
    """The state of a registered tensor at the time of patching."""

    registry: dict[str, torch.Tensor]
    name: str
    tensor: torch.Tensor
    address: int
    version: int | None  # torch's counter of changes in place; None: torch does not count them

    @classmethod
    def of(cls, registry: dict[str, torch.Tensor], name: str) -> _TensorState:
        tensor = registry[name]
        version = None if tensor.is_inference() else tensor._version
        return cls(registry, name, tensor, tensor.data_ptr(), version)

    @property
    def has_equal_replacement(self) -> bool:
        """Whether the module now has another tensor with the same values."""
        now, then = self.registry.get(self.name), self.tensor
        if now is None or now is then or (now.device, now.dtype, now.shape) != (then.device, then.dtype, then.shape):
            return False
        return torch.equal(now, then)


class LiveWeights:
    """Watches a layer's expert tensors for changes.

    Writes through `.data` are not noticed, because torch does not count them.

    Args:
        layer: the layer, at the time of patching.
    """

    def __init__(self, layer: MoELayer) -> None:
        self._layer = layer
        self._may_move = False
        seen = [[_TensorState.of(*owner_of(layer.experts, path)) for path in tensor.paths] for tensor in layer.tensors]
        self._stacks = [tensors[0] for tensors in seen if len(tensors) == 1]
        self._by_expert = [tensors for tensors in seen if len(tensors) > 1]

    def check(self, ids: Sequence[int]) -> None:
        """Check the tensors of the experts `ids`.

        Raises:
            PatchStateError: one of them was changed or replaced since the model was patched.
        """
        for seen in self._stacks:
            self._check(seen)
        for tensors in self._by_expert:
            for expert_idx in ids:
                self._check(tensors[expert_idx])

    def _check(self, seen: _TensorState) -> None:
        registry, name, tensor, address, version = seen
        # This runs for every layer of every token, so an unchanged tensor costs comparisons only.
        if version is not None and tensor._version != version:
            raise self._changed("wrote to", name)
        if not self._may_move and (registry.get(name) is not tensor or tensor.data_ptr() != address):
            self._check_moved(seen)

    def _check_moved(self, seen: _TensorState) -> None:
        """Raise PatchStateError unless accelerate, which takes weights away and brings the same ones back, moved it."""
        if seen.has_equal_replacement or any("_hf_hook" in vars(part) for part in self._layer.experts.modules()):
            self._may_move = True
            return
        how = "replaced" if seen.registry.get(seen.name) is not seen.tensor else "gave other data to"
        raise self._changed(how, seen.name)

    def _changed(self, how: str, name: str) -> PatchStateError:
        return PatchStateError(
            f"After patching, something {how} {name!r} of {self._layer.name!r}, from which experts are fetched. "
            "Slots may still hold the old weights. Unpatch the model, which then uses its present weights, and patch it "
            "again after such changes."
        )
