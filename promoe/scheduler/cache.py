"""The slots of one pool and the experts in them: states, pins, leases. It follows no policy.

    ABSENT -> LOADING(slot, done, in flight) -> RESIDENT -> ABSENT
              LOADING -> DRAINING -> ABSENT        failed, withdrawn or reclaimed while chunks were in flight

A slot goes to another expert only when nothing is in flight to it, and every chunk carries the generation under which
its slot was assigned. So a late chunk cannot overwrite another expert's weights, which nobody would notice.

All layers whose experts look alike share one pool, so its slots go to the layers whose experts are reused. If each
layer had its own slots, no policy could keep anything in a cache of little more than top-k experts per layer.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

ABSENT, LOADING, RESIDENT, DRAINING = range(4)


@dataclass(slots=True)
class Load:
    """An expert on its way into a slot (LOADING or DRAINING). Its chunks are sent in order and arrive in any order."""

    slot: int
    generation: int
    num_chunks: int
    issued: int = 0
    # The chunks in flight (of a transfer of several, the first one). A count would not do: a completion that is reported
    # twice must not be taken for that of another chunk.
    pending: set[int] = field(default_factory=set)
    done_bytes: int = 0

    @property
    def in_flight(self) -> int:
        """The number of transfers that were sent and have not come back."""
        return len(self.pending)

    def has_first(self, count: int) -> bool:
        """Return whether the first `count` chunks have arrived."""
        return self.issued >= count and all(chunk_idx >= count for chunk_idx in self.pending)

    @property
    def all_issued(self) -> bool:
        """Whether all chunks were sent."""
        return self.issued == self.num_chunks


class ExpertCache:
    """The slots of one pool. An expert is named by its code, an int below `num_codes` that the scheduler assigns."""

    def __init__(self, num_slots: int, num_codes: int) -> None:
        self.num_slots = num_slots
        # Fast to index from Python; the numpy views of the same bytes answer questions about the whole cache.
        self.state = bytearray(num_codes)
        self.pins = array("I", bytes(4 * num_codes))  # visits that need it now
        self.states = np.frombuffer(self.state, dtype=np.uint8)
        self.pin_counts = np.frombuffer(self.pins, dtype=np.uint32)
        self.slot_of: dict[int, int] = {}  # RESIDENT experts
        self.loads: dict[int, Load] = {}  # LOADING and DRAINING experts
        self.owner: list[int | None] = [None] * num_slots
        self.on_release: Callable[[int], None] | None = None  # called with each slot whose expert has gone
        self.num_pinned = 0  # experts with at least one pin, whatever their state
        self._generation = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """The number of slots without an expert."""
        return len(self._free)

    def pin(self, code: int) -> None:
        """Keep the expert, or reserve a slot for it, until `unpin`."""
        if self.pins[code] == 0:
            assert self.num_pinned < self.num_slots, f"{self.num_pinned} experts pinned, {self.num_slots} slots"
            self.num_pinned += 1
        self.pins[code] += 1

    def unpin(self, code: int) -> None:
        """Undo one `pin`."""
        assert self.pins[code] > 0, f"expert code {code} is not pinned"
        self.pins[code] -= 1
        if self.pins[code] == 0:
            self.num_pinned -= 1

    def start_load(self, code: int, num_chunks: int) -> Load:
        """Assign a free slot to an ABSENT expert, which becomes LOADING."""
        assert self.state[code] == ABSENT, f"expert code {code} is in state {self.state[code]}"
        slot = self._free.pop()
        self._generation[slot] += 1
        load = self.loads[code] = Load(slot, self._generation[slot], num_chunks)
        self.owner[slot] = code
        self.state[code] = LOADING
        return load

    def finish_load(self, code: int) -> None:
        """Make a LOADING expert RESIDENT: all of its chunks have arrived."""
        load = self.loads.pop(code)
        assert self.state[code] == LOADING, f"expert code {code} is in state {self.state[code]}"
        assert load.all_issued, load
        assert not load.pending, load
        self.slot_of[code] = load.slot
        self.state[code] = RESIDENT

    def abandon_load(self, code: int) -> None:
        """Give up a LOADING expert: it becomes DRAINING, or ABSENT if nothing is in flight."""
        assert self.state[code] == LOADING, f"expert code {code} is in state {self.state[code]}"
        self.state[code] = DRAINING
        self.settle(code)

    def settle(self, code: int) -> bool:
        """Make a DRAINING expert ABSENT if nothing is in flight any more. Returns whether it did."""
        load = self.loads[code]
        if load.pending:
            return False
        del self.loads[code]
        self._release(code, load.slot)
        return True

    def evict(self, code: int) -> None:
        """Make a RESIDENT expert ABSENT. Weights are read-only, so nothing is copied back."""
        assert self.state[code] == RESIDENT, f"expert code {code} is in state {self.state[code]}"
        assert self.pins[code] == 0, f"expert code {code} has {self.pins[code]} pins"
        self._release(code, self.slot_of.pop(code))

    def kept_slots(self, num_slots: int) -> dict[int, int]:
        """Return where residents would be with `num_slots` slots, as old slot -> new slot."""
        free = (slot for slot in range(num_slots) if slot >= self.num_slots or self.owner[slot] is None)
        return {slot: slot if slot < num_slots else next(free) for slot in sorted(self.slot_of.values())}

    def resize(self, num_slots: int, kept: Mapping[int, int]) -> None:
        """Change the number of slots. `kept` is what `kept_slots` returned; the experts have moved accordingly."""
        assert not self.loads, f"on their way: {self.loads}"
        assert not self.num_pinned, f"{self.num_pinned} experts pinned"
        assert len(self.slot_of) <= num_slots, f"{len(self.slot_of)} residents, {num_slots} slots"
        # Never fewer: a slot that is added again must not start with a generation that it had before.
        self._generation += [0] * (num_slots - len(self._generation))
        self.num_slots = num_slots
        self.slot_of = {code: kept[slot] for code, slot in self.slot_of.items()}
        self.owner = [None] * num_slots
        for code, slot in self.slot_of.items():
            self.owner[slot] = code
        self._free = [slot for slot in range(num_slots - 1, -1, -1) if self.owner[slot] is None]

    def _release(self, code: int, slot: int) -> None:
        self.owner[slot] = None
        self.state[code] = ABSENT
        self._free.append(slot)
        if self.on_release is not None:
            self.on_release(slot)

    def check_integrity(self) -> None:
        """Check that no slot is lost or held twice; raise AssertionError with all the numbers."""
        loading = sum(self.state[code] == LOADING for code in self.loads)
        draining = len(self.loads) - loading
        counts = (len(self._free), loading, draining, len(self.slot_of), self.num_slots)
        assert sum(counts[:4]) == self.num_slots, f"free, loading, draining, resident, slots = {counts}"
        held = {code: load.slot for code, load in self.loads.items()} | self.slot_of
        assert len(held) == len(self.loads) + len(self.slot_of), f"resident and loading: {self.loads}, {self.slot_of}"
        assert len({*held.values(), *self._free}) == self.num_slots, f"a slot held twice: {held}, free {self._free}"
        assert all(self.owner[slot] == code for code, slot in held.items()), (held, self.owner)
        by_state = np.bincount(self.states, minlength=4)[1:].tolist()
        assert by_state == [loading, len(self.slot_of), draining], f"{by_state} experts by state, {counts}"
        for code, load in self.loads.items():
            assert all(chunk_idx < load.issued <= load.num_chunks for chunk_idx in load.pending), (code, load)
            assert load.pending or (self.state[code] == LOADING and load.done_bytes), f"{code} is stuck: {load}"
            assert load.pending or not load.all_issued, f"expert code {code} is complete but not resident: {load}"
        num_pinned = int(np.count_nonzero(self.pin_counts))
        assert num_pinned == self.num_pinned <= self.num_slots, (num_pinned, self.num_pinned, counts)
