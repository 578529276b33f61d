from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from stores.checkpoints import save
from transformers import AutoModelForCausalLM

from promoe.experts.moe_layers import find_moe_layers
from promoe.model.opening import bank_specs
from promoe.scheduler import ExpertKey
from promoe.stores import Chunk, FileStore, Store
from promoe.stores.host import HostStore
from promoe.transfer.links import Fault, FaultyLink, FileLink, HostLink, Link
from promoe.transfer.links.faults import Plan
from promoe.transfer.links.verified import VerifiedLink
from promoe.transfer.memory import SlotPool

MODES: tuple[Any, ...] = ("first", "always")


@pytest.fixture
def store() -> HostStore:
    return HostStore([{"up": torch.randn(4, 8)}])


def numbers(*wrong: int) -> Plan:
    return lambda number, chunk: Fault("wrong") if number in wrong else None


class Reads:
    """A store that counts its own reads."""

    def __init__(self, store: Store) -> None:
        self.count = 0
        self._read, store.read = store.read, self._count  # type: ignore[method-assign]

    def _count(self, chunk: Chunk, destination: memoryview) -> None:
        self.count += 1
        self._read(chunk, destination)


def moves(link: Link, store: Store, pool: SlotPool, expert_idx: int = 0) -> None:
    for chunk in store.chunks(ExpertKey(0, expert_idx)):
        link.transfer(chunk, pool.slot(0), pool.address(0))


@pytest.mark.parametrize("mode", MODES)
def test_a_first_transfer_is_compared_with_a_second_read(store: HostStore, mode: Any) -> None:
    pool = SlotPool(store.layouts[0], 1)
    link = VerifiedLink(FaultyLink(HostLink(store), numbers(0, 1)), store, mode)
    for _ in range(2):  # nothing is remembered of what was wrong
        with pytest.raises(
            OSError, match=r"32 bytes .* a second read of them \(CRC-32 [0-9a-f]{8}, expected [0-9a-f]{8}"
        ):
            moves(link, store, pool)
    moves(link, store, pool)
    assert torch.equal(pool.tensors(0)["up"], store._tensors[0][0])


@pytest.mark.parametrize("mode", MODES)
def test_a_later_transfer_is_compared_with_the_first_if_always(store: HostStore, mode: Any) -> None:
    pool, reads = SlotPool(store.layouts[0], 1), Reads(store)
    link = VerifiedLink(FaultyLink(HostLink(store), numbers(1)), store, mode)
    moves(link, store, pool)
    assert reads.count == 2
    if mode == "first":
        moves(link, store, pool)
        assert not torch.equal(pool.tensors(0)["up"], store._tensors[0][0])
    else:
        with pytest.raises(OSError, match="differ from those that came first"):
            moves(link, store, pool)
    moves(link, store, pool)
    assert torch.equal(pool.tensors(0)["up"], store._tensors[0][0])
    assert reads.count == 4, "read twice the first time alone"


def test_tensors_that_somebody_writes_are_noticed(store: HostStore) -> None:
    pool, link = SlotPool(store.layouts[0], 1), VerifiedLink(HostLink(store), store, "always")
    for expert_idx in range(4):
        moves(link, store, pool, expert_idx)
    store._tensors[0][2, 3] += 1
    for expert_idx in (0, 1, 3):
        moves(link, store, pool, expert_idx)
    with pytest.raises(OSError, match="nothing writes to the checkpoint or the model"):
        moves(link, store, pool, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_converted_chunks_agree_whatever_the_way(tmp_path: Path, dtype: torch.dtype) -> None:
    """The second read is converted in other memory."""
    save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    store = FileStore.open(tmp_path, model, [bank_specs(layer) for layer in find_moe_layers(model)])
    pool = SlotPool(store.layouts[0], 1)
    for read_mode in ("page_cache", "direct"):
        link = VerifiedLink(FileLink(store, read_mode), store, "always")  # type: ignore[arg-type]
        for expert_idx in (0, 5, 0):
            moves(link, store, pool, expert_idx)
        link.close()
    store.close()


def test_bytes_changed_without_a_date_are_noticed(tmp_path: Path) -> None:
    """A fingerprint of the file cannot see them."""
    (file,) = save(tmp_path).glob("*.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    store = FileStore.open(tmp_path, model, [bank_specs(layer) for layer in find_moe_layers(model)])
    pool, link = SlotPool(store.layouts[0], 1), VerifiedLink(FileLink(store, "page_cache"), store, "always")
    moves(link, store, pool)
    before, chunk = file.stat(), store.chunks(ExpertKey(0, 0))[0]
    with file.open("r+b") as written:
        written.seek(chunk.source_offset_bytes + 100)
        written.write(b"other")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(OSError, match="differ from those that came first"):
        moves(link, store, pool)
    link.close()
    store.close()


def test_it_is_the_other_links_in_all_else(store: HostStore) -> None:
    link = VerifiedLink(HostLink(store, workers=3), store, "first")
    assert isinstance(link, Link)
    assert (link.workers, link.copies_from_ram) == (3, True)
    assert link.describe() == "host memory, verified (first)"
    link.close()
    with pytest.raises(OSError, match="closed"):
        moves(link, store, SlotPool(store.layouts[0], 1))
