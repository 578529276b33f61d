from __future__ import annotations

import gc
import os
import sys
import threading
import weakref

import pytest
import torch

from promoe.errors import ConfigError
from promoe.stores.layout import ExpertLayout, TensorSpec
from promoe.transfer.memory import HUGE_PAGE_BYTES, HugePageRegion, SlotPool

MIB = 1024 * 1024
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")


def small_layout() -> ExpertLayout:
    return ExpertLayout.of(
        {"gate_up_proj": ((6, 5), torch.bfloat16), "down_proj": ((5, 3), torch.float32), "bias": ((7,), torch.float32)}
    )


def mapping_of(address: int) -> dict[str, str]:
    """Return the smaps entry of the mapping that holds `address`, or nothing if there is none."""
    inside, entry = False, {}
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            name, _, rest = line.partition(" ")
            if "-" in name and not name.endswith(":"):
                if inside:
                    break
                start, end = (int(part, 16) for part in name.split("-"))
                inside = start <= address < end
            elif inside:
                entry[name.rstrip(":")] = rest.strip()
    return entry


def resident_bytes(address: int) -> int:
    return int(mapping_of(address)["Rss"].split()[0]) * 1024


def test_slots_follow_each_other_from_a_huge_page_boundary() -> None:
    pool = SlotPool(small_layout(), 5)
    assert pool.address(0) % HUGE_PAGE_BYTES == 0
    assert pool.nbytes == 5 * small_layout().slot_bytes
    for idx in range(5):
        assert pool.address(idx) == pool.address(0) + idx * pool.layout.slot_bytes
        assert len(pool.slot(idx)) == pool.layout.slot_bytes


def test_tensors_are_views_of_their_slot_and_of_no_other() -> None:
    layout = small_layout()
    pool = SlotPool(layout, 3)
    for idx in range(3):
        pool.slot(idx)[:] = bytes([idx + 1]) * layout.slot_bytes
    for idx in range(3):
        tensors = pool.tensors(idx)
        assert list(tensors) == ["gate_up_proj", "down_proj", "bias"]
        for spec in layout.tensors:
            tensor = tensors[spec.name]
            assert (tensor.shape, tensor.dtype) == (spec.shape, spec.dtype)
            assert tensor.is_contiguous()
            assert tensor.data_ptr() == pool.address(idx) + spec.offset_bytes
            assert tensor.data_ptr() % 64 == 0
            assert set(tensor.view(torch.uint8).flatten().tolist()) == {idx + 1}
    before = bytes(pool.slot(0)) + bytes(pool.slot(2))
    pool.tensors(1)["down_proj"].fill_(1.5)
    spec = layout.tensors[1]
    written = pool.slot(1)[spec.offset_bytes : spec.offset_bytes + spec.nbytes]
    assert torch.frombuffer(written, dtype=torch.float32).eq(1.5).all()
    assert bytes(pool.slot(0)) + bytes(pool.slot(2)) == before


def test_a_slots_tensors_are_the_same_objects_each_time() -> None:
    pool = SlotPool(small_layout(), 2)
    assert pool.tensors(1) is pool.tensors(1)
    assert pool.tensors(0)["bias"] is pool.tensors(0)["bias"]
    assert pool.tensors(0)["bias"] is not pool.tensors(1)["bias"]


def test_threads_that_are_first_at_once_get_the_same_tensors() -> None:
    pool = SlotPool(small_layout(), 50)
    seen: list[list[int]] = []
    start = threading.Barrier(4)

    def ask() -> None:
        start.wait()
        seen.append([id(pool.tensors(idx)["bias"]) for idx in range(50)])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 4
    assert all(ids == seen[0] for ids in seen)


def test_tensors_made_inside_inference_mode_can_be_saved_by_autograd() -> None:
    pool = SlotPool(small_layout(), 1)
    with torch.inference_mode():
        weight = pool.tensors(0)["down_proj"]
    assert not weight.is_inference()
    hidden = torch.ones(2, 3, requires_grad=True)
    torch.nn.functional.linear(hidden, weight).sum().backward()
    assert hidden.grad is not None


@linux_only
def test_a_pool_costs_no_memory_until_it_is_written() -> None:
    layout = ExpertLayout.of({"weight": ((MIB,), torch.uint8)})
    pool = SlotPool(layout, 32)
    assert resident_bytes(pool.address(5)) == 0
    pool.slot(0)[0] = 1
    assert 0 < resident_bytes(pool.address(5)) <= HUGE_PAGE_BYTES


@linux_only
def test_prefault_backs_the_whole_pool_at_once() -> None:
    layout = ExpertLayout.of({"weight": ((MIB,), torch.uint8)})
    pool = SlotPool(layout, 8, prefault=True)
    assert resident_bytes(pool.address(0)) >= 8 * MIB
    assert bytes(pool.slot(7)) == bytes(MIB)


@linux_only
def test_prefault_without_the_kernels_help_touches_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("promoe.transfer.memory.MADV_POPULATE_WRITE", 99)  # EINVAL, as on kernels before 5.14
    region = HugePageRegion(4 * MIB, prefault=True)
    assert resident_bytes(region.address) >= 4 * MIB


@linux_only
@pytest.mark.skipif(not os.path.exists("/sys/kernel/mm/transparent_hugepage"), reason="kernel without huge pages")
def test_memory_is_private_and_asks_for_whole_huge_pages() -> None:
    large = HugePageRegion(5 * MIB)
    flags = mapping_of(large.address)["VmFlags"].split()
    assert "hg" in flags
    assert "sh" not in flags  # private: not counted as shared memory
    small = HugePageRegion(8192)
    small.fill(1)
    assert "hg" not in mapping_of(small.address)["VmFlags"].split()


@pytest.mark.parametrize("num_slots", [1 << 50, 1 << 70])
def test_a_pool_larger_than_the_address_space_names_slots_and_bytes(num_slots: int) -> None:
    layout = small_layout()
    with pytest.raises(ConfigError, match=rf"{num_slots} slots .* in all. Choose a smaller cache") as raised:
        SlotPool(layout, num_slots)
    assert str(num_slots * layout.slot_bytes) in str(raised.value)


@pytest.mark.parametrize("num_slots", [0, -3])
def test_a_pool_needs_a_slot(num_slots: int) -> None:
    with pytest.raises(ConfigError, match=f"at least 1 slot .* Got {num_slots} instead"):
        SlotPool(small_layout(), num_slots)


def test_a_region_needs_a_byte() -> None:
    with pytest.raises(ConfigError, match="at least 1 byte"):
        HugePageRegion(0)


def test_views_outlive_close() -> None:
    pool = SlotPool(small_layout(), 2)
    tensor, slot = pool.tensors(1)["bias"], pool.slot(0)
    tensor.fill_(3.0)
    pool.close()
    pool.close()
    del pool
    gc.collect()
    slot[:] = bytes(len(slot))
    assert tensor.tolist() == [3.0] * 7


def test_a_released_memoryview_leaves_the_tensors_alive() -> None:
    pool = SlotPool(small_layout(), 1)
    tensor = pool.tensors(0)["bias"].fill_(2.0)
    with pool.slot(0) as slot:
        slot[0] = 0
    (region,) = pool._regions
    region.memory.release()
    del region
    pool.close()
    gc.collect()
    assert tensor.tolist() == [2.0] * 7


def test_memory_goes_with_the_last_view() -> None:
    pool = SlotPool(small_layout(), 2)
    mapping = weakref.ref(pool._regions[0]._mapping)
    tensor = pool.tensors(0)["bias"]
    pool.close()
    pool.poison_slot(0)  # a transfer that was left behind may fail yet
    gc.collect()
    assert mapping() is not None
    del tensor
    gc.collect()
    assert mapping() is None


def test_a_closed_pool_hands_out_nothing() -> None:
    pool = SlotPool(small_layout(), 2)
    pool.close()
    for call in (pool.slot, pool.address, pool.tensors):
        with pytest.raises(AssertionError, match="closed"):
            call(0)


@pytest.mark.parametrize("idx", [-1, 2])
def test_a_slot_outside_the_pool_is_a_bug(idx: int) -> None:
    pool = SlotPool(small_layout(), 2)
    for call in (pool.slot, pool.address, pool.tensors):
        with pytest.raises(AssertionError):
            call(idx)


def test_a_layout_that_breaks_alignment_is_a_bug() -> None:
    crooked = ExpertLayout((TensorSpec("weight", (4,), torch.float32, 32),), 128)
    with pytest.raises(AssertionError):
        SlotPool(crooked, 1)
    with pytest.raises(AssertionError):
        SlotPool(ExpertLayout((TensorSpec("weight", (4,), torch.float32, 0),), 96), 1)


def test_a_tensor_outside_its_region_is_a_bug() -> None:
    region = HugePageRegion(64)
    assert region.tensor(32, (4, 2), torch.float32).shape == (4, 2)
    for offset_bytes in (-4, 36):
        with pytest.raises(AssertionError):
            region.tensor(offset_bytes, (4, 2), torch.float32)


def test_poison_is_nan_in_every_float_dtype() -> None:
    dtypes = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float16, "d": torch.float64}
    pool = SlotPool(ExpertLayout.of({name: ((9,), dtype) for name, dtype in dtypes.items()}), 3)
    pool.poison()
    for idx in range(3):
        assert all(tensor.isnan().all() for tensor in pool.tensors(idx).values())


# -- resizing -------------------------------------------------------------------------------------------------------


def filled(num_slots: int) -> SlotPool:
    """Make a pool in which every byte of slot i is i + 1."""
    pool = SlotPool(small_layout(), num_slots)
    for idx in range(num_slots):
        pool.slot(idx)[:] = bytes([idx + 1]) * pool.layout.slot_bytes
    return pool


def contents(pool: SlotPool) -> list[int]:
    found = []
    for idx in range(pool.num_slots):
        (value,) = set(bytes(pool.slot(idx)))
        assert all((tensor.view(torch.uint8) == value).all() for tensor in pool.tensors(idx).values())
        found.append(value)
    return found


def test_more_slots_leave_the_others_where_they_are() -> None:
    pool = filled(3)
    tensors, addresses = pool.tensors(1), [pool.address(idx) for idx in range(3)]
    pool.resize(5, {0: 0, 1: 1, 2: 2}, pool.room_for(5))
    assert [pool.address(idx) for idx in range(3)] == addresses
    assert pool.tensors(1) is tensors
    assert contents(pool) == [1, 2, 3, 0, 0]
    assert pool.nbytes == 5 * pool.layout.slot_bytes
    pool.resize(9, {idx: idx for idx in range(5)}, pool.room_for(9))
    pool.slot(8)[:] = bytes([9]) * pool.layout.slot_bytes
    assert contents(pool) == [1, 2, 3, 0, 0, 0, 0, 0, 9]
    assert len({pool.address(idx) for idx in range(9)}) == 9
    pool.poison()
    assert contents(pool) == [255] * 9


@pytest.mark.parametrize("grown", [False, True])
def test_of_fewer_slots_what_is_kept_moves(grown: bool) -> None:
    pool = filled(3)
    if grown:  # of two regions
        pool.resize(5, {0: 0, 1: 1, 2: 2}, pool.room_for(5))
        pool.slot(4)[:] = bytes([5]) * pool.layout.slot_bytes
        pool.resize(2, {4: 0, 1: 1}, pool.room_for(2))
        assert contents(pool) == [5, 2]
    else:
        pool.resize(2, {2: 0, 1: 1}, pool.room_for(2))
        assert contents(pool) == [3, 2]
    with pytest.raises(AssertionError):
        pool.address(2)
    pool.resize(4, {0: 0, 1: 1}, pool.room_for(4))
    assert contents(pool)[1:2] == [2]
    assert len(pool._regions) == 1 + (4 > 3)
    pool.close()
    with pytest.raises(AssertionError, match="closed"):
        pool.address(0)


@linux_only
def test_memory_of_slots_that_go_is_given_back() -> None:
    layout = ExpertLayout.of({"w": (torch.Size([1024, 1024]), torch.float32)})
    pool = SlotPool(layout, 6, prefault=True)
    address = pool.address(0)
    assert resident_bytes(address) >= pool.nbytes
    pool.resize(2, {0: 0, 1: 1}, pool.room_for(2))
    assert pool.nbytes <= resident_bytes(address) <= pool.nbytes + HUGE_PAGE_BYTES
    pool.resize(3, {0: 0, 1: 1}, pool.room_for(3))
    assert not pool.tensors(2)["w"].any()


def test_more_slots_than_there_is_memory_for_change_nothing() -> None:
    pool = filled(2)
    with pytest.raises(ConfigError, match="Choose a smaller cache"):
        pool.resize(2**50, {0: 0, 1: 1}, pool.room_for(2**50))
    assert contents(pool) == [1, 2]
    assert pool.num_slots == 2
