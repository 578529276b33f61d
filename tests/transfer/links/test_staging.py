from __future__ import annotations

import threading

import pytest
import torch

from promoe.stores.base import Chunk
from promoe.transfer.links.staging import Staging, convert_into_slot
from promoe.transfer.memory import HugePageRegion


def test_a_threads_buffer_is_reused_and_grows() -> None:
    staging = Staging()
    first = staging.region(1000)
    assert staging.region(500) is first
    assert staging.region(first.nbytes) is first
    larger = staging.region(first.nbytes + 1)
    assert larger.nbytes > first.nbytes
    assert staging.region(10) is larger
    assert larger.address % 4096 == 0


def test_each_thread_has_its_own_buffer() -> None:
    staging = Staging()
    mine = staging.region(1000)
    theirs: list[HugePageRegion] = []
    thread = threading.Thread(target=lambda: theirs.append(staging.region(1000)))
    thread.start()
    thread.join()
    assert theirs[0] is not mine
    assert theirs[0].address != mine.address


@pytest.mark.parametrize("offset_bytes", [0, 3, 4])
def test_conversion_from_any_byte_rounds_as_torch_does(offset_bytes: int) -> None:
    for count in (1, 32_767, 32_768, 98_309):
        source = torch.randn(count)
        source[::7] *= 1e30
        region = HugePageRegion(count * 4 + offset_bytes)
        region.memory[offset_bytes:] = source.view(torch.uint8).numpy().data
        chunk = Chunk(0, count * 2, 0, 0, count * 4, torch.float32, torch.bfloat16)
        slot = HugePageRegion(count * 2)
        convert_into_slot(chunk, region, offset_bytes, slot.memory)
        assert torch.equal(slot.tensor(0, (count,), torch.bfloat16), source.to(torch.bfloat16))
