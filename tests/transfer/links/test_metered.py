from __future__ import annotations

import threading
from typing import Any, cast

import pytest
from waiting import WAIT_S

from promoe.stores import Chunk
from promoe.transfer.links import Link
from promoe.transfer.links.metered import MeteredLink

CHUNK = cast(Chunk, None)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class HeldLink(Link):
    """A link whose transfers last until the test lets them go."""

    workers = 3
    copies_from_ram = True
    mode = "direct"

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.closed = False

    def transfer(self, chunk: Chunk, destination: Any, address: int) -> None:
        self.begun.release()
        assert self.go.acquire(timeout=WAIT_S)
        if address < 0:
            raise OSError("a bad address")

    def describe(self) -> str:
        return "held"

    def close(self) -> None:
        self.closed = True


def test_time_counts_once_however_many_transfers_are_under_way() -> None:
    link, clock = HeldLink(), Clock()
    meter = MeteredLink(link, clock)
    threads = [threading.Thread(target=meter.transfer, args=(CHUNK, None, 0)) for _ in range(2)]
    clock.now_s = 1.0
    assert meter.busy_s() == 0.0
    threads[0].start()
    assert link.begun.acquire(timeout=WAIT_S)
    clock.now_s = 3.0
    threads[1].start()
    assert link.begun.acquire(timeout=WAIT_S)
    clock.now_s = 4.0
    assert meter.busy_s() == 3.0, "also while they are under way"
    link.go.release()
    link.go.release()
    for thread in threads:
        thread.join(WAIT_S)
    assert meter.busy_s() == 3.0
    clock.now_s = 9.0
    assert meter.busy_s() == 3.0, "nothing since"


def test_a_transfer_that_fails_counts_too_and_its_error_comes_through() -> None:
    link = HeldLink()
    meter = MeteredLink(link, iter(map(float, range(9))).__next__)  # a second from each look at the clock to the next
    link.go.release()
    with pytest.raises(OSError, match="a bad address"):
        meter.transfer(CHUNK, None, -1)
    assert meter.busy_s() == meter.busy_s() == 1.0, "nothing is under way any more"
    link.go.release()
    meter.transfer(CHUNK, None, 0)
    assert meter.busy_s() == 2.0


def test_it_is_the_link_in_all_else() -> None:
    link = HeldLink()
    meter = MeteredLink(link)
    assert isinstance(meter, Link)
    assert (meter.workers, meter.copies_from_ram, meter.describe(), meter.mode) == (3, True, "held", "direct")
    meter.close()
    assert link.closed
