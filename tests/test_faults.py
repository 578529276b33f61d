from __future__ import annotations

import random

import pytest
import torch
from faults import DelayedLink, FailingLink

from promoe.links import HostLink, Link
from promoe.memory import SlotPool
from promoe.scheduler.keys import ExpertKey
from promoe.stores.host import HostStore


@pytest.fixture
def store() -> HostStore:
    return HostStore([{"up": torch.randn(4, 8)}])


def test_delays_lie_around_the_transfer_and_depend_on_the_seed(store: HostStore) -> None:
    pool = SlotPool(store.layouts[0], 1)
    pool.poison()
    drawn: list[list[float]] = []
    for _ in range(2):
        sleeps_s: list[float] = []
        link = DelayedLink(HostLink(store, workers=3), random.Random(3), 0.25, sleeps_s.append)
        assert isinstance(link, Link)
        assert link.workers == 3
        for expert_idx in range(4):
            link.transfer(store.chunks(ExpertKey(0, expert_idx))[0], pool.slot(0), pool.address(0))
            assert torch.equal(pool.tensors(0)["up"], store._tensors[0][expert_idx])
        drawn.append(sleeps_s)
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 4  # the same before and after a transfer, another for the next
    assert all(0 <= sleep_s <= 0.125 for sleep_s in drawn[0])
    link.close()
    with pytest.raises(OSError, match="closed"):
        link.transfer(store.chunks(ExpertKey(0, 0))[0], pool.slot(0), pool.address(0))


def test_chosen_transfers_fail_and_leave_garbage(store: HostStore) -> None:
    pool = SlotPool(store.layouts[0], 4)
    chunks = [store.chunks(ExpertKey(0, expert_idx))[0] for expert_idx in range(4)]
    link = FailingLink(HostLink(store), lambda chunk: chunk is chunks[2])
    assert isinstance(link, Link)
    for idx, chunk in enumerate(chunks):
        if idx == 2:
            with pytest.raises(OSError, match="injected failure of 32 bytes"):
                link.transfer(chunk, pool.slot(idx), pool.address(idx))
            assert pool.tensors(idx)["up"][:4].isnan().all()
        else:
            link.transfer(chunk, pool.slot(idx), pool.address(idx))
            assert torch.equal(pool.tensors(idx)["up"], store._tensors[0][idx])
    assert link.failures == 1
    link.close()
    with pytest.raises(OSError, match="closed"):
        link.transfer(chunks[0], pool.slot(0), pool.address(0))
