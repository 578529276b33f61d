"""Memory that experts are moved into: huge-page regions, and the pool of slots that is made of them.

The pages behind a buffer decide how fast a disk can fill it: O_DIRECT pins every page of its target, and 4 KiB pages
are 512 times as many as 2 MiB pages. So regions are anonymous private mappings that start at a multiple of 2 MiB and
ask for huge pages. This module knows shapes and addresses. It does not know experts, files or policies.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from promoe.errors import ConfigError
from promoe.transfer.rows import ExpertRows, Row
from promoe.units import format_memory

if TYPE_CHECKING:
    from promoe.stores.layout import ExpertLayout, TensorSpec

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 * 1024 * 1024
SLOT_ALIGNMENT_BYTES = 64
# Linux 5.14; the mmap module of Python 3.10 to 3.13 does not name it.
MADV_POPULATE_WRITE = 23
POISON_BYTE = 0xFF  # every float dtype reads as NaN


class HugePageRegion:
    """`nbytes` of zeroed anonymous memory at a multiple of 2 MiB, in huge pages where the system offers them.

    Nothing is touched at creation, so a region costs only address space until it is written, unless `prefault` is set.
    A trailing part smaller than a huge page stays in 4 KiB pages: a small region takes no more than `nbytes`.

    The memory lives until the last tensor or memoryview on it is gone. There is deliberately no explicit unmapping: a
    tensor would then point into nothing.

    Args:
        nbytes: size, at least 1.
        prefault: back every page now, so that no transfer pays for page faults later.

    Raises:
        ConfigError: the size is not positive, or the system cannot map that much.
    """

    def __init__(self, nbytes: int, *, prefault: bool = False) -> None:
        if nbytes < 1:
            raise ConfigError(f"A memory region needs at least 1 byte. Got {nbytes} instead.")
        self.nbytes = nbytes
        try:
            self._mapping = _map_private(nbytes + HUGE_PAGE_BYTES)
        except (OSError, OverflowError, ValueError, MemoryError) as error:
            raise ConfigError(
                f"{format_memory(nbytes)} ({nbytes} bytes) of memory could not be mapped: {error}. Ask for less."
            ) from error
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._start = -base % HUGE_PAGE_BYTES
        self.address = base + self._start
        self.memory = memoryview(self._mapping)[self._start : self._start + nbytes]
        self._advise_huge_pages()
        if prefault:
            self._prefault()

    def tensor(self, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor over the region from `offset_bytes` on. It shares the memory and keeps it alive.

        It is a normal tensor also if asked for inside `torch.inference_mode`, so autograd may save it later.
        """
        count = torch.Size(shape).numel()
        end_bytes = offset_bytes + count * dtype.itemsize
        assert 0 <= offset_bytes <= end_bytes <= self.nbytes, (offset_bytes, shape, dtype, self.nbytes)
        with torch.inference_mode(False):
            # From the mapping itself, not from `memory`: releasing a memoryview must not let the mapping go.
            flat = torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=self._start + offset_bytes)
            return flat.view(shape)

    def give_back(self, offset_bytes: int) -> None:
        """Give the pages from `offset_bytes` on back to the system. They hold zeros when they are written again."""
        advice = getattr(mmap, "MADV_DONTNEED", None)
        start = -(-(self._start + offset_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        end = self._start + self.nbytes
        if advice is not None and start < end:
            self._mapping.madvise(advice, start, end - start)

    def fill(self, byte: int) -> None:
        """Write `byte` everywhere. Touches every page."""
        ctypes.memset(self.address, byte, self.nbytes)

    def _advise_huge_pages(self) -> None:
        whole_bytes = self.nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        advice = getattr(mmap, "MADV_HUGEPAGE", None)
        if advice is None or whole_bytes == 0:
            return
        try:
            self._mapping.madvise(advice, self._start, whole_bytes)
        except OSError as error:  # a kernel built without transparent huge pages
            logger.debug("no huge pages for %s: %s", format_memory(self.nbytes), error)

    def _prefault(self) -> None:
        page_bytes = -(-self.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self._mapping.madvise(MADV_POPULATE_WRITE, self._start, page_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise ConfigError(
                    f"{format_memory(self.nbytes)} were mapped but memory could not back them: {error}. Ask for less."
                ) from error
            self.fill(0)  # a kernel without the advice: writing zeros over zeros does the same


def _map_private(nbytes: int) -> mmap.mmap:
    # mmap's default for -1 is MAP_SHARED, which is shared memory: other huge-page rules, and counted as RssShmem.
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Pool(Protocol):
    """A fixed number of slots of one layout, in RAM or on a device."""

    layout: ExpertLayout
    num_slots: int
    nbytes: int

    def slot(self, idx: int) -> Any:
        """Return slot `idx` as links that fill such slots take it."""
        ...

    def address(self, idx: int) -> int:
        """Return the address at which slot `idx` starts."""
        ...

    def tensors(self, idx: int) -> Mapping[str, Any]:
        """Return views over slot `idx` by name, the same each time. Read them between `begin_read` and `end_read`."""
        ...

    def rows(self, experts: Sequence[int], slots: Sequence[int]) -> Mapping[int, Mapping[str, Any]]:
        """Expert id -> the tensors of the slot that it is in, for kernels."""
        ...

    def begin_read(self, slots: Sequence[int]) -> None:
        """Allow what the calling thread computes from now on to read these slots, whose experts are resident."""
        ...

    def end_read(self, slots: Sequence[int]) -> None:
        """Note that the calling thread has begun everything that reads these slots. Call it before they are given back."""
        ...

    def poison(self) -> None:
        """Fill every slot with NaN, for tests."""
        ...

    def room_for(self, num_slots: int) -> Any:
        """Allocate the memory that `resize` to so many slots needs beside what there is. This changes nothing else.

        Raises:
            ConfigError: there is not enough memory.
        """
        ...

    def resize(self, num_slots: int, kept: Mapping[int, int], room: Any) -> None:
        """Resize the pool, while nobody reads or writes a slot.

        Args:
            num_slots: at least 1.
            kept: slot whose bytes stay -> the slot that they are in afterwards.
            room: what `room_for` returned for that number.
        """
        ...

    def close(self) -> None:
        """Let the memory go as soon as the last view of it is gone. Closing twice is allowed."""
        ...


class SlotPool:
    """A pool of `num_slots` slots of one layout in fast memory.

    Slots follow each other without gaps from a 2 MiB boundary on, and those that `resize` adds from another one; a slot
    and each of its tensors is 64-byte aligned. The pool hands out the same tensor objects for a slot each time: whoever
    holds one sees what is loaded there next.

    Args:
        layout: how one expert lies in a slot.
        num_slots: at least 1.
        prefault: back all slots with memory now. By default a slot's pages appear when an expert is first loaded there.

    Raises:
        ConfigError: no slots, or the system cannot map `num_slots * layout.slot_bytes`.
    """

    def __init__(self, layout: ExpertLayout, num_slots: int, *, prefault: bool = False) -> None:
        if num_slots < 1:
            raise ConfigError(
                f"A slot pool needs at least 1 slot ({layout.slot_bytes} bytes). Got {num_slots} instead."
            )
        assert layout.slot_bytes % SLOT_ALIGNMENT_BYTES == 0, layout.slot_bytes
        for spec in layout.tensors:
            assert spec.offset_bytes % SLOT_ALIGNMENT_BYTES == 0, spec
        self.layout = layout
        self.num_slots = num_slots
        self.nbytes = num_slots * layout.slot_bytes
        # The slots are in these regions, in order. The last region may have room for more than there are.
        self._regions = [self._region_of(num_slots, prefault)]
        self._tensors: dict[int, Mapping[str, Row]] = {}

    def slot(self, idx: int) -> memoryview:
        """Return the writable bytes of slot `idx`, `layout.slot_bytes` long."""
        region, offset_bytes = self._locate(idx)
        return region.memory[offset_bytes : offset_bytes + self.layout.slot_bytes]

    def address(self, idx: int) -> int:
        """Return the virtual address of slot `idx`."""
        region, offset_bytes = self._locate(idx)
        return region.address + offset_bytes

    def tensors(self, idx: int) -> Mapping[str, Row]:
        """Return views over slot `idx` by name: a tensor of the spec's shape and dtype, or what its format makes of it.

        They are created once per slot. Their contents are what was last loaded there; the caller keeps the slot pinned
        while it reads. Do not change the mapping.
        """
        cached = self._tensors.get(idx)
        if cached is not None:
            return cached
        region, offset_bytes = self._locate(idx)
        views = {spec.name: self._view(region, offset_bytes, spec) for spec in self.layout.tensors}
        # One winner when two threads are first at once: setdefault is atomic.
        return self._tensors.setdefault(idx, views)

    def rows(self, experts: Sequence[int], slots: Sequence[int]) -> ExpertRows:
        """See `Pool.rows`."""
        return {expert: self.tensors(slot) for expert, slot in zip(experts, slots, strict=True)}

    def begin_read(self, slots: Sequence[int]) -> None:
        """Do nothing: when a transfer into RAM is over, the bytes are there."""

    def end_read(self, slots: Sequence[int]) -> None:
        """Do nothing: when a computation on the processor returns, it is over."""

    def poison(self) -> None:
        """Fill every slot with bytes 0xFF (NaN in every float dtype), so that a read before a load is seen in tests."""
        assert self._regions, "the pool is closed"
        for region in self._regions:
            region.fill(POISON_BYTE)

    def poison_slot(self, idx: int) -> None:
        """Fill one slot with NaN, unless the pool is closed, as it may be when a transfer fails late."""
        if not self._regions:
            return
        ctypes.memset(self.address(idx), POISON_BYTE, self.layout.slot_bytes)

    def close(self) -> None:
        """Let the memory go as soon as the last view of it is gone. Closing twice is allowed."""
        self._tensors = {}
        self._regions = []

    def room_for(self, num_slots: int) -> HugePageRegion | None:
        """See `Pool.room_for`. None: what there is suffices."""
        more = num_slots - self._slots_there()
        return self._region_of(more, prefault=False) if more > 0 else None

    def resize(self, num_slots: int, kept: Mapping[int, int], room: HugePageRegion | None) -> None:
        """See `Pool.resize`. What is kept is copied only if its slot goes."""
        slot_bytes = self.layout.slot_bytes
        if room is not None:
            self._regions.append(room)
        self.num_slots = max(num_slots, self.num_slots)
        for source, target in kept.items():
            if source != target:
                ctypes.memmove(self.address(target), self.address(source), slot_bytes)
        self._tensors = {idx: views for idx, views in self._tensors.items() if idx < num_slots}
        self.num_slots, self.nbytes = num_slots, num_slots * slot_bytes
        there = self._slots_there()
        while there - self._slots_in(self._regions[-1]) >= num_slots:
            there -= self._slots_in(self._regions.pop())
        self._regions[-1].give_back((num_slots - there + self._slots_in(self._regions[-1])) * slot_bytes)

    def _region_of(self, num_slots: int, prefault: bool) -> HugePageRegion:
        nbytes = num_slots * self.layout.slot_bytes
        try:
            return HugePageRegion(nbytes, prefault=prefault)
        except ConfigError as error:
            raise ConfigError(
                f"No memory for a cache of {num_slots} slots of {format_memory(self.layout.slot_bytes)}, "
                f"{format_memory(nbytes)} in all. Choose a smaller cache. ({error})"
            ) from error

    def _slots_there(self) -> int:
        """Return how many slots there is memory for."""
        return sum(self._slots_in(region) for region in self._regions)

    def _slots_in(self, region: HugePageRegion) -> int:
        return region.nbytes // self.layout.slot_bytes

    def _view(self, region: HugePageRegion, slot_bytes: int, spec: TensorSpec) -> Row:
        offset_bytes = slot_bytes + spec.offset_bytes
        if spec.format is not None:
            return spec.format.view(region.tensor(offset_bytes, (spec.nbytes,), torch.uint8))
        return region.tensor(offset_bytes, spec.shape, spec.dtype)

    def _locate(self, idx: int) -> tuple[HugePageRegion, int]:
        assert self._regions, "the pool is closed"
        assert 0 <= idx < self.num_slots, (idx, self.num_slots)
        for region in self._regions:
            if idx < (slots := self._slots_in(region)):
                return region, idx * self.layout.slot_bytes
            idx -= slots
        raise AssertionError("fewer slots in regions than in the pool")
