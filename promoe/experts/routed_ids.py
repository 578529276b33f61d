"""The experts that a layer's tokens choose, as the host needs them: in lists, wherever the index is.

Reading an index on a device means waiting for everything that leads to it. That is done once per visit of a layer, at its gate;
the experts' forward takes what was read there if it is passed the same tensor.
"""

from __future__ import annotations

import threading
from typing import NamedTuple, Protocol

import torch

from promoe.errors import PromoeError
from promoe.transfer.devices import Device, Queue

# Up to here ids are handled as Python lists, which is faster than tensor operations.
MAX_LISTED_IDS = 256


Chosen = tuple[torch.Tensor, list[list[int]] | None, list[int]]
"""What an index says: itself `[T, K]` in host memory; the experts of each token, `[T][K]` (None if there are many tokens); the
distinct ones in ascending order. A plain tuple: one is made twice per layer and token."""


class IdReader(Protocol):
    """Reads the indices of layers, which are called by name."""

    def at_gate(self, layer: str, index: torch.Tensor) -> Chosen:
        """What a layer's gate chose, `[T, K]`."""
        ...

    def at_experts(self, layer: str, index: torch.Tensor) -> Chosen:
        """What its experts are passed, which is the authority: between gate and experts some families change it.

        Raises:
            PromoeError: ids that were read before were changed in a way that cannot be seen from the host.
        """
        ...

    def check(self) -> None:
        """To be called at the end of a pass; raises as `at_experts` does."""
        ...


def chosen_experts(index: torch.Tensor) -> tuple[list[list[int]] | None, list[int]]:
    """The experts of each token `[T][K]` (None if there are many tokens), and the distinct ones in ascending order."""
    if index.numel() <= MAX_LISTED_IDS:
        tokens: list[list[int]] = index.tolist()
        if len(tokens) == 1:
            return tokens, sorted(set(tokens[0]))
        return tokens, sorted({expert_idx for token in tokens for expert_idx in token})
    return None, torch.unique(index).tolist()


class HostIds:
    """Indices in host memory are read where they lie."""

    def at_gate(self, layer: str, index: torch.Tensor) -> Chosen:
        """See `IdReader`."""
        tokens, experts = chosen_experts(index)
        return index, tokens, experts

    at_experts = at_gate

    def check(self) -> None:
        """Nothing is read before it is used."""


class _Reading(NamedTuple):
    """What was read at a gate, and from what."""

    layer: str
    source: torch.Tensor  # held, so that its memory is no other tensor's
    version: int | None
    chosen: Chosen

    def is_of(self, layer: str, index: torch.Tensor) -> bool:
        """Whether `index` is the very tensor, as far as the host can see."""
        read = self.source
        same = index is read or (
            index.data_ptr() == read.data_ptr()
            and index.shape == read.shape
            and index.stride() == read.stride()
            and index.dtype == read.dtype
            and index.device == read.device
        )
        return same and layer == self.layer and _version(index) == self.version


class _Local(threading.local):
    """Of each thread that runs the model."""

    def __init__(self) -> None:
        self.latest: _Reading | None = None
        self.unseen: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        """Layers whose experts were launched with ids that were read at the gate: these, and as they were by then."""
        self.spare: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        """Few ids in pinned memory that no copy goes to."""


class DeviceIds:
    """Indices on a device are copied to pinned memory. The host waits once per visit, for the copy at the gate.

    When the experts run, they are copied once more; whether they are the same is seen when the host waits next, for the next
    layer's ids or at the end of the pass.

    Args:
        device: where indices are.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._local = _Local()

    def at_gate(self, layer: str, index: torch.Tensor) -> Chosen:
        """See `IdReader`."""
        chosen = self._read(index)
        self._local.latest = _Reading(layer, index, _version(index), chosen)
        return chosen

    def at_experts(self, layer: str, index: torch.Tensor) -> Chosen:
        """See `IdReader`."""
        latest = self._local.latest
        if latest is None or not latest.is_of(layer, index):
            return self._read(index)
        self._local.unseen.append((layer, latest.chosen[0], self._copy(self._device.current(), index)))
        return latest.chosen

    def check(self) -> None:
        """See `IdReader`."""
        if self._local.unseen:
            self._wait_for(self._device.current())

    def _read(self, index: torch.Tensor) -> Chosen:
        queue = self._device.current()
        copied = self._copy(queue, index)
        self._wait_for(queue)
        on_host = copied.clone()
        self._keep(copied)
        return on_host, *chosen_experts(on_host)

    def _wait_for(self, queue: Queue) -> None:
        """Wait for the copies that were put into `queue`, and see what they say."""
        unseen, self._local.unseen = self._local.unseen, []
        queue.wait_on_host()
        if wrong := [layer for layer, read, used in unseen if not torch.equal(read, used)]:
            raise _changed_in_place(wrong)
        for _, _, used in unseen:
            self._keep(used)

    def _copy(self, queue: Queue, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` in pinned memory, once what `queue` has now is done."""
        shape, dtype = tensor.shape, tensor.dtype
        spare = self._local.spare.get((shape, dtype))
        on_host = spare.pop() if spare else self._device.allocate_pinned(tensor.nbytes).view(dtype).view(shape)
        queue.copy_to_host(on_host, tensor)
        return on_host

    def _keep(self, copied: torch.Tensor) -> None:
        """For the next of its kind, as decoding makes many alike; of long prompts each has a length of its own."""
        if copied.numel() <= MAX_LISTED_IDS:
            self._local.spare.setdefault((copied.shape, copied.dtype), []).append(copied)


def _version(tensor: torch.Tensor) -> int | None:
    """How often it was changed in place; None where torch does not count that."""
    return None if tensor.is_inference() else tensor._version


def _changed_in_place(layers: list[str]) -> PromoeError:
    return PromoeError(
        f"The ids of the experts that {', '.join(map(repr, layers))} was called with were changed in place between gate and "
        "experts, after they had been read. The output of this pass is wrong: weights of other experts were used. Let what "
        "changes them (a hook, a patch of the block) make a new tensor, which is read again, or leave out 'device'."
    )
