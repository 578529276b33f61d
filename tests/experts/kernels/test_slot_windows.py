"""Grouped products over slots of a device: those of torch over the stack of experts, wherever experts are."""

from __future__ import annotations

import random

import pytest
import torch
from fake_device import FakeDevice
from torch import nn

from promoe.experts.kernels import slot_windows
from promoe.experts.kernels.bank import CallRows, SlotBank
from promoe.experts.kernels.slot_windows import SlotOrder
from promoe.stores.layout import ExpertLayout
from promoe.transfer.device_pool import DevicePool
from promoe.transfer.rows import SlotRows

EXPERTS, ROWS, COLUMNS = 8, 24, 40


def stack_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(EXPERTS, ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).to(dtype)


def in_slots(stack: torch.Tensor, slots: dict[int, int], num_slots: int = 12) -> SlotRows:
    """Experts of a stack in slots of a pool, among others that hold NaN; each tensor after another of odd length."""
    layout = ExpertLayout.of({"first": ((3,), torch.int8), "w": (stack.shape[1:], stack.dtype)})
    pool = DevicePool(layout, num_slots, FakeDevice())
    for expert, slot in slots.items():
        pool.tensors(slot)["w"].copy_(stack[expert])
    return pool.rows(list(slots), list(slots.values()))


def bank_of(rows: SlotRows, stack: torch.Tensor, ids: list[int] | None) -> SlotBank:
    return SlotBank("w", CallRows(rows, ids), stack.shape, stack.dtype, stack.device)


@pytest.mark.parametrize("max_groups", [1023, 4, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_grouped_products_are_torchs_over_the_stack(
    seed: int, transposed: bool, dtype: torch.dtype, max_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_windows, "MAX_GROUPS", max_groups)
    draw, stack = random.Random(seed), stack_of(dtype)
    experts = sorted(draw.sample(range(EXPERTS), draw.choice((1, 3, EXPERTS))))
    rows = in_slots(stack, dict(zip(experts, draw.sample(range(12), len(experts)), strict=True)))
    ids = sorted(draw.choices(experts, k=20))
    offs = torch.bincount(torch.tensor(ids), minlength=EXPERTS).cumsum(0).to(torch.int32)
    x = torch.randn(len(ids), COLUMNS if transposed else ROWS).to(dtype)
    bank = bank_of(rows, stack, ids)
    for _ in range(2):  # a kernel asks once per projection
        found = nn.functional.grouped_mm(x, bank.mT if transposed else bank, offs=offs)
        assert torch.equal(found, nn.functional.grouped_mm(x, stack.mT if transposed else stack, offs=offs))


def test_the_product_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once per window of slots, over all slots between the first and the last."""
    calls: list[tuple[int, ...]] = []
    original = torch._grouped_mm

    def note(x: torch.Tensor, stack: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(stack.shape))
        return original(x, stack, offs=offs)

    monkeypatch.setattr(slot_windows.torch, "_grouped_mm", note)
    stack = stack_of(torch.float32)
    rows = in_slots(stack, {0: 9, 1: 3, 5: 4})
    order = SlotOrder([9, 3, 4], [1, 2, 1], stack.device)
    order.multiply(torch.randn(4, ROWS), rows.stacks["w"])
    assert calls == [(7, ROWS, COLUMNS)]


def test_gathered_rows_are_copies_of_slots() -> None:
    stack = stack_of(torch.float32)
    rows = in_slots(stack, {5: 0, 1: 7, 2: 3})
    for ids in ([5, 1, 5, 2], [1], [2, 2], []):
        for known in (ids, None):  # a family's own loop may ask for experts that only it knows
            bank = bank_of(rows, stack, known)
            for _ in range(2):
                gathered = bank[torch.tensor(ids, dtype=torch.int64)]
                assert torch.equal(gathered, stack[ids])
                assert gathered.is_contiguous()


def test_an_expert_that_is_not_there_raises() -> None:
    stack = stack_of(torch.float32)
    bank = bank_of(in_slots(stack, {5: 0}), stack, [3])
    offs = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1], dtype=torch.int32)
    for use in (
        lambda: bank[torch.tensor([3])],
        lambda: nn.functional.grouped_mm(torch.randn(1, ROWS), bank, offs=offs),
    ):
        with pytest.raises(AssertionError, match="expert 3 has no 'w' here"):
            use()
