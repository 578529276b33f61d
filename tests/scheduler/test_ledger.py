"""What became of every byte: used, wasted or pending; nothing twice, nothing lost."""

from __future__ import annotations

from promoe.scheduler.budget import WasteBudget
from promoe.scheduler.ledger import Ledger

from .replay import Tally


def ledger() -> tuple[Ledger, Tally]:
    tally = Tally()
    return Ledger(tally, WasteBudget(0.5, 0.025, 1000)), tally


def test_prefetched_bytes_are_pending_until_asked_for() -> None:
    book, tally = ledger()
    book.arrived(0, 7, "prefetch", 10, pinned=False)
    book.arrived(0, 7, "prefetch", 5, pinned=False)
    assert (tally.moved, tally.used, book.pending_bytes()) == ({"prefetch": 15}, 0, 15)
    book.asked(0, 7)
    assert (tally.used, book.pending_bytes()) == (15, 0)
    book.asked(0, 7)
    book.dropped(0, 7)
    assert tally.used == 15
    assert not tally.wasted_bytes


def test_bytes_that_arrive_for_a_pinned_expert_are_used_at_once() -> None:
    book, tally = ledger()
    book.arrived(0, 7, "prefetch", 10, pinned=True)
    book.arrived(0, 7, "demand", 10, pinned=True)
    assert tally.used == 10
    book.dropped(0, 7)
    assert not tally.wasted_bytes


def test_bytes_dropped_unasked_are_wasted_by_cause() -> None:
    book, tally = ledger()
    book.arrived(0, 7, "prefetch", 10, pinned=False)
    book.arrived(0, 7, "demand", 3, pinned=False)  # a hint that no visit followed
    book.arrived(1, 8, "prefetch", 4, pinned=False)
    assert book.pending_bytes() == 14
    book.dropped(0, 7)
    assert tally.wasted_bytes == {"prefetch": 10, "demand": 3}
    assert book.pending_bytes() == 4


def test_hinted_bytes_that_are_asked_for_are_neither_used_nor_wasted() -> None:
    book, tally = ledger()
    book.arrived(0, 7, "demand", 3, pinned=False)
    book.asked(0, 7)
    book.dropped(0, 7)
    assert tally.used == 0
    assert not tally.wasted_bytes


def test_bytes_that_arrive_in_a_lost_slot_are_wasted() -> None:
    book, tally = ledger()
    book.arrived_late(0, "prefetch", 10)
    assert tally.moved == tally.wasted_bytes == {"prefetch": 10}
    assert book.pending_bytes() == 0


def test_what_is_moved_and_wasted_is_put_on_the_budget() -> None:
    budget = WasteBudget(0.5, 0.1, 100)
    ledger = Ledger(Tally(), budget)
    ledger.arrived(0, 1, "prefetch", 50, pinned=False)
    ledger.arrived(0, 2, "demand", 50, pinned=False)
    ledger.dropped(0, 2)  # a hint that no visit followed: no prediction
    assert budget.threshold == 0.5
    ledger.dropped(0, 1)
    assert budget.threshold == 0.75
    ledger.arrived_late(0, "prefetch", 40)
    assert budget.threshold == 0.5 + 0.5 * (50 - 4 + 40) / 100
    ledger.arrived_late(0, "demand", 60)
    assert budget.threshold == 0.5 + 0.5 * (50 - 4 + 40 - 6) / 100
