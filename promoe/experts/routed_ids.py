"""Read the ids of the experts that a layer's tokens chose into host memory, as lists.

To read ids from a device, the host has to wait until the device has computed them. That is done once per visit of a
layer, at its gate. If the experts' forward is passed the same tensor, it uses what was read there.

The host cannot see a change in place on a device. So the ids are copied once more when the experts run, and a
difference raises an error that names the layer. Which rows belong to which group is computed on the host from the same
copy: `batched_mm` and `grouped_mm` ask the device for nothing.
"""

from __future__ import annotations

import threading
from typing import NamedTuple, Protocol

import torch

from promoe.errors import PromoeError
from promoe.scheduler import most_needed_first
from promoe.transfer.devices import Device, Queue

# Up to this many ids, Python lists are faster than tensor operations.
MAX_LISTED_IDS = 256

Chosen = tuple[torch.Tensor, list[list[int]] | None, list[int]]
"""What was read from an index: the ids `[T, K]` in host memory, the experts of each token `[T][K]` (None if there are many
tokens), and the distinct experts, those of most tokens first. It is a plain tuple because two are made per layer and token."""


class IdReader(Protocol):
    """Reads the indices of layers, which are identified by name."""

    def at_gate(self, layer: str, index: torch.Tensor) -> Chosen:
        """Read `index[T, K]`, which a layer's gate chose."""
        ...

    def at_experts(self, layer: str, index: torch.Tensor) -> Chosen:
        """Read `index[T, K]`, which a layer's experts are called with. In some families it is not what the gate chose.

        Raises:
            PromoeError: ids that were read before were changed in place, which the host could not see.
        """
        ...

    def check(self) -> None:
        """Check the ids that were read, at the end of a pass. Raises the same errors as `at_experts`."""
        ...


def chosen_experts(index: torch.Tensor) -> tuple[list[list[int]] | None, list[int]]:
    """Return the experts of each token `[T][K]` (None if there are many), and the distinct ones, those of most tokens first."""
    if index.numel() <= MAX_LISTED_IDS:
        tokens: list[list[int]] = index.tolist()
        if len(tokens) == 1:
            return tokens, sorted(set(tokens[0]))
        return tokens, most_needed_first(tokens)
    experts, counts = torch.unique(index, return_counts=True)
    return None, experts[counts.argsort(descending=True, stable=True)].tolist()


class HostIds:
    """Reads indices that are in host memory."""

    def at_gate(self, layer: str, index: torch.Tensor) -> Chosen:
        """See `IdReader`."""
        tokens, experts = chosen_experts(index)
        return index, tokens, experts

    at_experts = at_gate

    def check(self) -> None:
        """Do nothing: ids are read when they are used, so they cannot have changed."""


class _Reading(NamedTuple):
    """The ids that were read at a gate, and the tensor they were read from."""

    layer: str
    source: torch.Tensor  # kept alive, so that no other tensor gets its memory
    version: int | None
    chosen: Chosen

    def is_of(self, layer: str, index: torch.Tensor) -> bool:
        """Return whether `index` is the same unchanged tensor, as far as the host can see."""
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
    """The state of each thread that runs the model."""

    def __init__(self) -> None:
        self.latest: _Reading | None = None
        self.unchecked: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        """Layers whose experts were started with ids from the gate: the ids at the gate, and a copy made at the experts."""
        self.spare: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        """Small buffers in pinned memory that are free for the next copy."""


class DeviceIds:
    """Reads indices that are on a device, by copying them to pinned memory. The host waits once per visit, at the gate.

    When the experts run, the ids are copied once more. The two copies are compared when the host waits the next time,
    for the next layer's ids or at the end of the pass.

    Args:
        device: the device that the indices are on.
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
        self._local.unchecked.append((layer, latest.chosen[0], self._copy(self._device.current(), index)))
        return latest.chosen

    def check(self) -> None:
        """See `IdReader`."""
        if self._local.unchecked:
            self._wait_for(self._device.current())

    def _read(self, index: torch.Tensor) -> Chosen:
        queue = self._device.current()
        copied = self._copy(queue, index)
        self._wait_for(queue)
        on_host = copied.clone()
        self._keep(copied)
        return on_host, *chosen_experts(on_host)

    def _wait_for(self, queue: Queue) -> None:
        """Wait for the copies in `queue`, and compare the ids at the experts with those that were read at the gate."""
        unchecked, self._local.unchecked = self._local.unchecked, []
        queue.wait_on_host()
        if wrong := [layer for layer, read, used in unchecked if not torch.equal(read, used)]:
            raise _changed_in_place(wrong)
        for _, _, used in unchecked:
            self._keep(used)

    def _copy(self, queue: Queue, tensor: torch.Tensor) -> torch.Tensor:
        """Return pinned memory that has the values of `tensor` as soon as `queue` has done its present work."""
        shape, dtype = tensor.shape, tensor.dtype
        spare = self._local.spare.get((shape, dtype))
        on_host = spare.pop() if spare else self._device.allocate_pinned(tensor.nbytes).view(dtype).view(shape)
        queue.copy_to_host(on_host, tensor)
        return on_host

    def _keep(self, copied: torch.Tensor) -> None:
        """Keep a small buffer for the next copy of the same shape, as decoding makes many.

        Those of long prompts are not kept, because nearly every prompt has another length.
        """
        if copied.numel() <= MAX_LISTED_IDS:
            self._local.spare.setdefault((copied.shape, copied.dtype), []).append(copied)


def _version(tensor: torch.Tensor) -> int | None:
    """Return torch's counter of changes in place; None: torch does not count them for this tensor."""
    return None if tensor.is_inference() else tensor._version


def _changed_in_place(layers: list[str]) -> PromoeError:
    return PromoeError(
        f"The ids of the experts that {', '.join(map(repr, layers))} was called with were changed in place between gate and "
        "experts, after they had been read. The output of this pass is wrong, because weights of other experts were used. "
        "Change the hook or patch that does this so that it makes a new tensor, which is read again, or leave out 'device'."
    )
