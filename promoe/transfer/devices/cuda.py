"""CUDA GPUs as devices.

Only memory with pages of its own is pinned. CUDA registers whole pages, and refuses copies of memory that is registered
in part, and the first and last page of a small tensor belong to its neighbours, too. From 32 MiB on, malloc gives a
block pages of its own. Smaller tensors are copied through pinned buffers, which takes the host time.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from promoe.errors import ConfigError
from promoe.transfer.devices.base import Pinned
from promoe.units import format_memory

PAGE_BYTES = 4096
# A block of this size that malloc gives has pages of its own (glibc's largest threshold). Pages that others share must not
# be registered: CUDA refuses copies of memory that is registered in part.
OWN_PAGES_BYTES = 32 * 2**20

logger = logging.getLogger(__name__)
_side_streams: dict[torch.device, torch.cuda.Stream] = {}


class CudaEvent:
    """A place in a stream."""

    __slots__ = ("raw",)

    def __init__(self, raw: torch.cuda.Event) -> None:
        self.raw = raw

    def wait_on_host(self) -> None:
        """Block this thread, but not the interpreter, until the place is reached."""
        self.raw.synchronize()


class CudaQueue:
    """A stream.

    Args:
        stream: torch's.
    """

    __slots__ = ("_stream", "key")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self.key: Hashable = stream.cuda_stream

    def mark(self) -> CudaEvent:
        """Record an event. Waiting for it on the host blocks the thread, so that no core spins."""
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return CudaEvent(event)

    def wait(self, event: Any) -> None:
        """Let the stream wait; see `Queue.wait`."""
        self._stream.wait_event(event.raw)

    def wait_on_host(self) -> None:
        """Wait and spin: being woken takes twice as long as the usual wait."""
        event = torch.cuda.Event()
        event.record(self._stream)
        event.synchronize()

    def running(self) -> AbstractContextManager[object]:
        """Make it torch's current stream while the context lasts."""
        if torch.cuda.current_device() == self._stream.device_index:
            return _Current(self._stream)
        stream: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return stream

    def copy_all(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy to the device."""
        with self.running():
            for destination, source in copies:
                destination.copy_(source, non_blocking=True)

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy to the host."""
        with self.running():
            destination.copy_(source, non_blocking=True)


class _Current:
    """Does what `torch.cuda.stream` does for a stream of the current device, in a tenth of its time.

    Args:
        stream: current while the context lasts.
    """

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before: tuple[int, int, int] = torch._C._cuda_getCurrentStream(self._stream.device_index)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        stream_id, device_index, device_type = self._before
        torch._C._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)


class _CurrentQueue(CudaQueue):
    """The stream that is its thread's current one already."""

    __slots__ = ()

    def running(self) -> AbstractContextManager[object]:
        """Do nothing."""
        return nullcontext()


class CudaDevice:
    """One GPU.

    Args:
        device: "cuda" or "cuda:1".

    Raises:
        ConfigError: there is no such GPU.
    """

    def __init__(self, device: str | torch.device) -> None:
        wanted = torch.device(device)
        count = torch.cuda.device_count()
        if not torch.cuda.is_available() or (wanted.index or 0) >= count:
            found = f"{count} GPUs" if torch.cuda.is_available() else "no GPU that this build of torch can use"
            raise ConfigError(
                f"The 'device' argument asks for \"{wanted}\". Found {found}: torch {torch.__version__}. Use "
                'device="cpu", or install a build of torch for your GPU.'
            )
        self.torch_device = torch.device("cuda", torch.cuda.current_device() if wanted.index is None else wanted.index)
        self._streams: dict[tuple[int, int, int], _CurrentQueue] = {}  # by torch's name; there are some dozens

    @property
    def name(self) -> str:
        """The driver's name for it."""
        name: str = torch.cuda.get_device_name(self.torch_device)
        return name

    def free_bytes(self) -> int:
        """Return what the driver says is free, and what torch keeps for reuse."""
        free_bytes: int = torch.cuda.mem_get_info(self.torch_device)[0]
        reserved, allocated = (f(self.torch_device) for f in (torch.cuda.memory_reserved, torch.cuda.memory_allocated))
        return free_bytes + int(reserved) - int(allocated)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate device memory, filled with zeros. torch's allocator aligns to 512 bytes."""
        try:
            with torch.inference_mode(False):
                memory = torch.zeros(nbytes, dtype=torch.uint8, device=self.torch_device)
            # The first copies, in a stream of their own, must not come before the zeros.
            self.current().mark().wait_on_host()
            return memory
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"No memory for a cache of {format_memory(nbytes)} on {self.torch_device}, which has "
                f"{format_memory(self.free_bytes())} free. Choose a smaller cache."
            ) from error

    def allocate_pinned(self, nbytes: int) -> torch.Tensor:
        """Allocate pinned host memory, or ordinary memory with a warning where the system gives none."""
        with torch.inference_mode(False):
            try:
                return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:
                logger.warning("No pinned memory (%s): copies to %s are slower.", error, self.torch_device)
                return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def current(self) -> CudaQueue:
        """Return the calling thread's stream.

        Called several times per layer, where torch.cuda.current_stream takes 20 µs.
        """
        which: tuple[int, int, int] = torch._C._cuda_getCurrentStream(self.torch_device.index)
        queue = self._streams.get(which)
        if queue is None:
            queue = self._streams[which] = _CurrentQueue(torch.cuda.current_stream(self.torch_device))
        return queue

    def new_queue(self) -> CudaQueue:
        """Return a new stream."""
        return CudaQueue(torch.cuda.Stream(self.torch_device))

    def side_queue(self) -> CudaQueue:
        """Return one stream for all callers: cuBLAS keeps a workspace of up to 32 MiB for each stream that it worked in."""
        if self.torch_device not in _side_streams:
            _side_streams.setdefault(self.torch_device, torch.cuda.Stream(self.torch_device))
        return CudaQueue(_side_streams[self.torch_device])

    def pin(self, tensors: Sequence[torch.Tensor], own_pages: bool = False) -> Pinned:
        """Register the pages of the tensors' memory with the driver; see `Device.pin`."""
        runtime: Any = torch.cuda.cudart()
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        found = {address: address + storage.nbytes() for address, storage in storages.items() if _is_pinned(storage)}
        # No page may be given back while it is registered.
        keep = [
            storage
            for address, storage in storages.items()
            if address not in found and (own_pages or storage.nbytes() >= OWN_PAGES_BYTES)
        ]
        registered: list[int] = []
        refused_bytes = 0
        for start, end in page_ranges([(storage.data_ptr(), storage.nbytes()) for storage in keep]):
            if runtime.cudaHostRegister(start, end - start, 0) == runtime.cudaError.success:
                registered.append(start)
                found[start] = end
            else:
                refused_bytes += end - start
                self._forget_error()

        def undo() -> None:
            while registered:
                runtime.cudaHostUnregister(registered.pop())
            keep.clear()

        return Pinned(found.items(), refused_bytes, undo)

    def _forget_error(self) -> None:
        """Launch something, since the runtime reports a failure once more at the next launch."""
        try:
            torch.zeros(1, device=self.torch_device)
        except RuntimeError as error:
            logger.debug("after memory could not be pinned: %s", error)


def _is_pinned(storage: torch.UntypedStorage) -> bool:
    """Return whether a storage is pinned from its first byte to its last."""
    whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    return whole[:1].is_pinned() and whole[-1:].is_pinned()


def page_ranges(blocks: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the pages of blocks (address, bytes), as disjoint ranges [start, end): a page is registered once."""
    found: list[tuple[int, int]] = []
    for address, nbytes in sorted(blocks):
        start, end = address // PAGE_BYTES * PAGE_BYTES, -(-(address + nbytes) // PAGE_BYTES) * PAGE_BYTES
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found
