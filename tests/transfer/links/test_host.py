from __future__ import annotations

import errno

import pytest
import torch

from promoe.scheduler import ExpertKey
from promoe.stores.base import Chunk
from promoe.stores.host import HostStore
from promoe.transfer.links import HostLink, Link
from promoe.transfer.memory import HugePageRegion, SlotPool

from .conftest import MakeStore


def test_every_expert_of_a_host_store_arrives_in_its_slot() -> None:
    banks = [
        {"up": torch.randn(3, 40, 30), "down": torch.randn(3, 30, 40).to(torch.bfloat16), "bias": torch.randn(3, 7)},
        {"up": torch.randn(2, 300, 100), "down": torch.randn(2, 9)},
    ]
    store = HostStore(banks, chunk_bytes=4096)
    link = HostLink(store)
    assert isinstance(link, Link)
    for layer_idx, bank in enumerate(banks):
        num_experts = store.num_experts[layer_idx]
        pool = SlotPool(store.layouts[layer_idx], num_experts)
        pool.poison()
        for expert_idx in range(num_experts):
            slot = num_experts - 1 - expert_idx
            for chunk in store.chunks(ExpertKey(layer_idx, expert_idx)):
                link.transfer(chunk, pool.slot(slot), pool.address(slot))
            for name, tensor in bank.items():
                assert torch.equal(pool.tensors(slot)[name], tensor[expert_idx])
        pool.close()


def test_conversion_on_arrival(make_store: MakeStore) -> None:
    source = torch.randn(100)
    chunk = Chunk(128, 200, 0, 4, 400, torch.float32, torch.bfloat16)
    link = HostLink(make_store([b"skip" + source.view(torch.uint8).numpy().tobytes()], [[chunk]]))
    slot = HugePageRegion(500)
    link.transfer(chunk, slot.memory, slot.address)
    arrived = torch.frombuffer(slot.memory, dtype=torch.bfloat16, count=100, offset=128)
    assert torch.equal(arrived, source.to(torch.bfloat16))
    assert bytes(slot.memory[:128]) == bytes(128)
    assert bytes(slot.memory[328:]) == bytes(172)


def test_a_closed_link_refuses() -> None:
    store = HostStore([{"up": torch.zeros(1, 4)}])
    link = HostLink(store, workers=2)
    assert (link.describe(), link.workers) == ("host memory", 2)
    link.close()
    link.close()
    slot = HugePageRegion(64)
    with pytest.raises(OSError, match="closed") as raised:
        link.transfer(store.chunks(ExpertKey(0, 0))[0], slot.memory, slot.address)
    assert raised.value.errno == errno.EBADF
