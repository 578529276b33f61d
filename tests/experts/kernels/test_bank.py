from __future__ import annotations

import pytest
import torch
from torch import nn

from promoe.experts.adapters.base import module_with
from promoe.experts.kernels.bank import CallRows, SlotBank

STACK = torch.arange(6 * 4 * 8, dtype=torch.float32).view(6, 4, 8) / 10
ROWS = {expert: {"w": STACK[expert].clone()} for expert in (5, 0, 3)}


def bank_of(rows: dict[int, dict[str, torch.Tensor]] = ROWS, ids: list[int] | None = None) -> SlotBank:
    return SlotBank("w", CallRows(rows, ids), torch.Size((6, 4, 8)), torch.float32, torch.device("cpu"))


def test_it_looks_like_the_stack() -> None:
    bank = bank_of()
    assert (bank.shape, bank.size(), bank.size(1), bank.ndim, bank.dim()) == (STACK.shape, STACK.shape, 4, 3, 3)
    assert (bank.dtype, bank.device) == (STACK.dtype, STACK.device)
    assert bank.data_ptr() % 64 == 0
    assert bank.transpose(-2, -1).shape == bank.mT.shape == bank.transpose(1, 2).shape == (6, 8, 4)


def test_one_expert_is_the_slots_own_tensor() -> None:
    bank = bank_of()
    assert bank[3] is ROWS[3]["w"]
    assert bank[torch.tensor(5)] is ROWS[5]["w"]
    assert torch.equal(bank.mT[3], STACK[3].T)


@pytest.mark.parametrize("known", [True, False])
def test_several_experts_are_gathered_and_one_expert_several_times_is_not_copied(known: bool) -> None:
    for ids in ([3, 0, 3, 5], [5], [0, 0, 0], []):
        index = torch.tensor(ids, dtype=torch.int64)
        gathered = bank_of(ids=ids if known else None)[index]
        assert torch.equal(gathered, STACK[index])
        assert gathered.shape == STACK[index].shape
        if len(set(ids)) == 1:
            assert gathered.data_ptr() == ROWS[ids[0]]["w"].data_ptr()


def test_ids_that_do_not_fit_the_index_are_our_bug() -> None:
    with pytest.raises(AssertionError, match="2 ids, the kernel asks for 3"):
        bank_of(ids=[3, 0])[torch.tensor([3, 0, 5])]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_grouped_mm_equals_torchs(transposed: bool, known: bool) -> None:
    ids = [0, 0, 3, 5, 5, 5]
    counts = torch.bincount(torch.tensor(ids), minlength=6)
    offs = counts.cumsum(0).to(torch.int32)
    x = torch.randn(6, 8 if transposed else 4)
    bank = bank_of(ids=ids if known else None)
    expected = nn.functional.grouped_mm(x, STACK.mT if transposed else STACK, offs=offs)
    weight = bank.transpose(-2, -1) if transposed else bank
    assert torch.equal(nn.functional.grouped_mm(x, weight, offs=offs), expected)
    assert torch.equal(torch._grouped_mm(x, weight, offs=offs), expected)
    assert torch.equal(torch.ops.transformers.grouped_mm_fallback(x, weight, offs=offs), expected)


def test_grouped_mm_is_out_of_reach_of_autocast() -> None:
    x, offs = torch.randn(2, 4), torch.tensor([1, 1, 1, 1, 1, 2], dtype=torch.int32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = nn.functional.grouped_mm(x, bank_of(), offs=offs)
    assert product.dtype == torch.float32


def test_an_expert_without_a_row_raises() -> None:
    bank = bank_of()
    offs = torch.tensor([0, 1, 1, 1, 1, 1], dtype=torch.int32)
    for use in (
        lambda: bank[1],
        lambda: bank[torch.tensor(1)],
        lambda: bank[torch.tensor([0, 1])],
        lambda: nn.functional.grouped_mm(torch.randn(1, 4), bank, offs=offs),
    ):
        with pytest.raises(AssertionError, match=r"expert 1 has no 'w' here; ready: \[0, 3, 5\]"):
            use()


def test_any_other_use_is_an_error() -> None:
    bank = bank_of()
    for use in (
        lambda: bank[1:3],
        lambda: bank[torch.tensor([[0, 3]])],
        lambda: bank.mT[torch.tensor([0, 3])],
        lambda: bank.transpose(0, 1),
        lambda: torch.matmul(torch.randn(2, 4), bank),
        lambda: torch.bmm(torch.randn(6, 2, 4), bank),
        lambda: nn.functional.linear(torch.randn(2, 8), bank),
    ):
        with pytest.raises((NotImplementedError, TypeError)):
            use()


def test_view_overlays_the_registered_parameter_and_shares_the_rest() -> None:
    module = nn.Linear(3, 4)
    module.flag = "old"
    weight = torch.ones(4, 3)
    stand_in = module_with(module, {"weight": weight, "flag": "new"})
    assert isinstance(stand_in, nn.Linear)
    assert stand_in.weight is weight
    assert stand_in.bias is module.bias
    assert stand_in.flag == "new"
    assert module.flag == "old"
    assert isinstance(module.weight, nn.Parameter)
    x = torch.randn(2, 3)
    assert torch.equal(type(module).forward(stand_in, x), nn.functional.linear(x, weight, module.bias))
