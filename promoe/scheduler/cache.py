"""Slots and the experts in them: states, pins, leases. One pool; policy-free bookkeeping.

    ABSENT -> LOADING(slot, done, in flight) -> RESIDENT -> ABSENT
              LOADING -> DRAINING -> ABSENT        failed, withdrawn or reclaimed while chunks were in flight

A slot is re-let only when nothing is in flight to it, and every chunk carries the generation under which its slot was
let. A late chunk that overwrote another expert's slot would be a silent wrong weight; this module excludes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ABSENT, LOADING, RESIDENT, DRAINING = range(4)


@dataclass(slots=True)
class Load:
    """An expert on its way into a slot (LOADING or DRAINING)."""

    slot: int
    generation: int
    num_chunks: int
    speculative: bool
    issued: int = 0
    in_flight: int = 0
    done_bytes: int = 0
    failed: bool = False

    @property
    def complete(self) -> bool:
        """Every chunk arrived."""
        return self.issued == self.num_chunks and self.in_flight == 0 and not self.failed


class ExpertCache:
    """The slots of one pool. Experts are named by their code, an int below `num_codes` that the scheduler assigns."""

    def __init__(self, num_slots: int, num_codes: int) -> None:
        self.num_slots = num_slots
        # bytearray for fast scalar access from Python, with a numpy view on the same bytes for whole-cache questions.
        self.state = bytearray(num_codes)
        self.pins = bytearray(num_codes)
        self.states = np.frombuffer(self.state, dtype=np.uint8)
        self.pin_counts = np.frombuffer(self.pins, dtype=np.uint8)
        self.slot_of: dict[int, int] = {}  # RESIDENT experts
        self.loads: dict[int, Load] = {}  # LOADING and DRAINING experts
        self.owner: list[int | None] = [None] * num_slots
        self.num_pinned = 0  # experts with at least one pin, whatever their state
        self._generation = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Slots that belong to no expert."""
        return len(self._free)

    def pin(self, code: int) -> None:
        """Keep the expert, or the right to a slot for it, until `unpin`."""
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

    def start_load(self, code: int, num_chunks: int, speculative: bool) -> Load:
        """Let a free slot to an ABSENT expert."""
        assert self.state[code] == ABSENT, f"expert code {code} is in state {self.state[code]}"
        slot = self._free.pop()
        self._generation[slot] += 1
        load = self.loads[code] = Load(slot, self._generation[slot], num_chunks, speculative)
        self.owner[slot] = code
        self.state[code] = LOADING
        return load

    def finish_load(self, code: int) -> None:
        """LOADING -> RESIDENT."""
        load = self.loads.pop(code)
        assert load.complete and self.state[code] == LOADING, load
        self.slot_of[code] = load.slot
        self.state[code] = RESIDENT

    def abandon_load(self, code: int) -> None:
        """LOADING -> DRAINING, and on to ABSENT at once when nothing is in flight."""
        self.state[code] = DRAINING
        self.settle(code)

    def settle(self, code: int) -> bool:
        """DRAINING -> ABSENT if the last chunk in flight has come back; says whether it did."""
        load = self.loads[code]
        if load.in_flight:
            return False
        del self.loads[code]
        self._release(code, load.slot)
        return True

    def evict(self, code: int) -> None:
        """RESIDENT -> ABSENT. Weights are read-only: eviction is a drop, no copy back exists."""
        assert self.state[code] == RESIDENT and self.pins[code] == 0, (code, self.state[code], self.pins[code])
        self._release(code, self.slot_of.pop(code))

    def _release(self, code: int, slot: int) -> None:
        self.owner[slot] = None
        self.state[code] = ABSENT
        self._free.append(slot)

    def check_integrity(self) -> None:
        """Conservation of slots; raises AssertionError with all the numbers."""
        loading = sum(self.state[code] == LOADING for code in self.loads)
        draining = len(self.loads) - loading
        counts = (len(self._free), loading, draining, len(self.slot_of), self.num_slots)
        assert sum(counts[:4]) == self.num_slots, f"free, loading, draining, resident, slots = {counts}"
        held = {code: load.slot for code, load in self.loads.items()} | self.slot_of
        assert len(set(held.values())) == len(held), f"two experts in one slot: {held}"
        assert all(self.owner[slot] == code for code, slot in held.items()), (held, self.owner)
        assert set(self._free).isdisjoint(held.values()), (self._free, held)
        by_state = {s: int((self.states == s).sum()) for s in (LOADING, RESIDENT, DRAINING)}
        assert by_state == {LOADING: loading, RESIDENT: len(self.slot_of), DRAINING: draining}, (by_state, counts)
        assert all(self.state[code] == DRAINING for code, load in self.loads.items() if load.failed), self.loads
        assert int((self.pin_counts > 0).sum()) == self.num_pinned <= self.num_slots, (self.num_pinned, counts)
