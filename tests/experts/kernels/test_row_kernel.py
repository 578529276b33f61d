"""The row kernel is used where it gives the stock kernel's bits, and only there."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tiny_models import MOE_FAMILIES, build, token_ids
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from experts.test_layer_call import Call, Slots, assert_same, experts_layer, random_call, record_calls
from promoe.experts import layer_call
from promoe.experts.combine import WeightedSum
from promoe.experts.kernels import choosing
from promoe.experts.kernels.choosing import Kernels
from promoe.experts.kernels.row_kernel import RowKernel
from promoe.experts.moe_layers import MoELayer
from promoe.experts.pairs import FEW_PAIRS, Selection
from promoe.experts.scratch import PartSpace
from promoe.transfer.rows import ExpertRows


class Spy:
    """Counts the calls of the stock kernel and of the row kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stock = self.own = 0
        call_stock, call_own, part = Kernels.stock, RowKernel.__call__, RowKernel.part

        def stock(*args: Any, **kwargs: Any) -> torch.Tensor:
            self.stock += 1
            return call_stock(*args, **kwargs)

        def own(kernel: RowKernel, *args: Any) -> list[torch.Tensor]:
            self.own += 1
            return call_own(kernel, *args)

        def own_part(kernel: RowKernel, *args: Any) -> torch.Tensor:
            self.own += 1
            return part(kernel, *args)

        monkeypatch.setattr(Kernels, "stock", stock)
        monkeypatch.setattr(RowKernel, "__call__", own)
        monkeypatch.setattr(RowKernel, "part", own_part)

    def counts(self) -> tuple[int, int]:
        """(stock, own) since the last time."""
        found = self.stock, self.own
        self.stock = self.own = 0
        return found


def layer_of(kind: str = "deepseek_v3", implementation: str = "grouped_mm") -> MoELayer:
    return experts_layer(kind, implementation, torch.float32, hidden=64, intermediate=32, num_experts=6)


def check(call: Call, slots: Slots) -> None:
    with torch.no_grad():
        assert_same(call.resident(slots, with_ids=True), call.expected)
        assert_same(call.grouped(slots, [[e] for e in reversed(call.needed)], with_ids=True), call.expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_it_is_proved_by_the_first_rows_of_a_layer_and_used_from_then_on(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(family, dtype=dtype, experts_implementation="grouped_mm", num_experts=8, top_k=4)
    calls = record_calls(model, [{"input_ids": token_ids(1, n, seed=n)} for n in (1, 1, 3)])
    num_layers = len({call.layer.layer_idx for call in calls})
    spy = Spy(monkeypatch)
    for i, call in enumerate(calls):
        slots = Slots(call.layer, num_slots=9)
        with torch.no_grad():
            assert_same(call.resident(slots, with_ids=True), call.expected)
        assert spy.counts() == ((1, 1) if i < num_layers else (0, 1))
        with torch.no_grad():
            assert_same(call.grouped(slots, [[e] for e in call.needed], with_ids=False), call.expected)
        assert spy.counts() == (0, len(call.needed))


def test_where_its_bits_differ_the_stock_kernel_is_used_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = ALL_EXPERTS_FUNCTIONS["grouped_mm"]

    def doubled(self: nn.Module, *args: torch.Tensor) -> torch.Tensor:
        return 2 * stock(self, *args)

    ALL_EXPERTS_FUNCTIONS["grouped_mm"] = doubled
    try:
        layer = layer_of()
        calls = [random_call(layer, tokens, 3, torch.float32, torch.float32, seed=tokens) for tokens in (1, 2, 4)]
        slots = Slots(layer, num_slots=8)
        spy = Spy(monkeypatch)
        check(calls[0], slots)
        assert spy.counts()[1] == 1  # it was tried once
        for call in calls[1:]:
            check(call, slots)
        assert spy.counts()[1] == 0
    finally:
        ALL_EXPERTS_FUNCTIONS["grouped_mm"] = stock
    # The verdict was about the other kernel.
    check(random_call(layer, 1, 3, torch.float32, torch.float32), slots)
    assert spy.counts()[1] > 1


def test_each_dtype_of_the_input_is_proved_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of()
    slots = Slots(layer, num_slots=8)
    spy = Spy(monkeypatch)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        call = random_call(layer, 1, 3, dtype, dtype)
        with torch.no_grad():
            assert_same(call.resident(slots, with_ids=True), call.expected)
    assert spy.counts() == (2, 3)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_other_implementations_never_use_it(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(implementation=implementation)
    spy = Spy(monkeypatch)
    check(random_call(layer, 2, 3, torch.float32, torch.float32), Slots(layer, num_slots=8))
    stock, own = spy.counts()
    assert stock > 0
    assert own == 0


def test_many_pairs_go_through_it_where_they_run_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of()
    slots = Slots(layer, num_slots=8)
    few = random_call(layer, FEW_PAIRS // 4, 4, torch.float32, torch.float32)
    many = random_call(layer, FEW_PAIRS // 4 + 1, 4, torch.float32, torch.float32)
    check(few, slots)
    spy = Spy(monkeypatch)
    with torch.no_grad():
        assert_same(many.resident(slots, with_ids=True), many.expected)
        assert spy.counts() == (1, 0)  # one stock call is the whole layer
        groups = [[e] for e in many.needed]
        assert_same(many.grouped(slots, groups, with_ids=True), many.expected)
        assert spy.counts() == (1, len(groups))  # what few rows proved is not taken for granted of many
        assert_same(many.grouped(slots, groups, with_ids=False), many.expected)
        assert spy.counts() == (0, len(groups))


@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_long_prompt_is_computed_in_parts(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole experts, however they come, and never more at once than their intermediates may take."""
    layer = experts_layer(kind, "grouped_mm", dtype, hidden=64, intermediate=64, num_experts=6)
    slots = Slots(layer, num_slots=8)
    call = random_call(layer, 50, 4, dtype, dtype)  # 33 pairs per expert
    most = 70
    monkeypatch.setattr(choosing, "PART_BYTES", most * 128 * dtype.itemsize)
    parts: list[int] = []
    part = RowKernel.part

    def spy(kernel: RowKernel, hidden: torch.Tensor, selection: Selection, *args: Any) -> torch.Tensor:
        parts.append(len(selection))
        return part(kernel, hidden, selection, *args)

    monkeypatch.setattr(RowKernel, "part", spy)
    with torch.no_grad():
        for run in (
            lambda: call.resident(slots, with_ids=True),
            lambda: call.resident(slots, with_ids=False),
            lambda: call.grouped(slots, [call.needed[:1], call.needed[1:]], with_ids=True),
            lambda: call.grouped(slots, [call.needed], with_ids=False),
        ):
            parts.clear()
            assert_same(run(), call.expected)
            assert sum(parts) == 200
            assert 3 <= len(parts) <= 6
            assert max(parts) <= most


def test_what_differed_once_is_not_trusted_for_what_comes_later() -> None:
    layer = layer_of()
    stock = layer.stock_forward
    kernel = RowKernel(layer.experts, stock, torch.float32, torch.float32, False)
    ones, twos = torch.ones(3, 2), torch.full((3, 2), 2.0)
    assert kernel.prove([ones], ones) is ones
    assert kernel.proven is True
    assert kernel.prove([ones[:1], ones[1:]], twos) is twos
    assert kernel.prove([ones], ones) is ones
    assert kernel.proven is False


def test_what_was_in_the_space_before_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of()
    slots = Slots(layer, num_slots=8)
    calls = [random_call(layer, tokens, 4, torch.float32, torch.float32, seed=tokens) for tokens in (50, 90, 40)]
    monkeypatch.setattr(choosing, "PART_BYTES", 60 * 64 * 4)
    spaces: list[PartSpace] = []

    def poisoned(*args: Any) -> PartSpace:
        spaces.append(PartSpace(*args))
        for tensor in spaces[-1].of(args[0]):
            tensor.fill_(float("nan"))
        return spaces[-1]

    monkeypatch.setattr(layer_call, "PartSpace", poisoned)
    with torch.no_grad():
        found = [call.resident(slots, with_ids=True) for call in calls]
    assert len(spaces) == len(calls)
    for call, rows in zip(calls, found, strict=True):  # nor do later calls in earlier results
        assert_same(rows, call.expected)


def test_threads_compute_parts_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of()
    monkeypatch.setattr(choosing, "PART_BYTES", 60 * 64 * 4)
    calls = [random_call(layer, 50 + number, 4, torch.float32, torch.float32, seed=number) for number in range(8)]

    def run(call: Call) -> torch.Tensor:
        slots = Slots(layer, num_slots=8)
        with torch.no_grad():
            return [call.resident(slots, with_ids=True) for _ in range(5)][-1]

    with ThreadPoolExecutor(2) as pool:
        for call, found in zip(calls, pool.map(run, calls), strict=True):
            assert_same(found, call.expected)


def test_a_prompt_of_up_to_two_parts_is_one_stock_call(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of()
    slots = Slots(layer, num_slots=8)
    call = random_call(layer, 50, 4, torch.float32, torch.float32)
    widest_bytes = 64 * 4
    spy = Spy(monkeypatch)
    for part_pairs, counts in ((100, (1, 0)), (99, (1, 3)), (99, (0, 3))):  # the first part proves it
        monkeypatch.setattr(choosing, "PART_BYTES", part_pairs * widest_bytes)
        with torch.no_grad():
            assert_same(call.resident(slots, with_ids=True), call.expected)
        assert spy.counts() == counts


def test_a_long_prompt_is_one_call_where_its_rows_have_not_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = ALL_EXPERTS_FUNCTIONS["grouped_mm"]

    def doubled(self: nn.Module, *args: torch.Tensor) -> torch.Tensor:
        return 2 * stock(self, *args)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, "grouped_mm", doubled)
    monkeypatch.setattr(choosing, "PART_BYTES", 1)
    layer = layer_of()
    slots = Slots(layer, num_slots=8)
    call = random_call(layer, 50, 4, torch.float32, torch.float32)
    spy = Spy(monkeypatch)
    with torch.no_grad():
        for expected in ((6, 1), (1, 0)):  # each expert a part: the first shows that they differ
            assert_same(call.resident(slots, with_ids=True), call.expected)
            assert spy.counts() == expected


def test_rows_that_are_not_numbers_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ from themselves: the stock kernel's are used, and the next rows are compared again."""
    layer = layer_of("gpt_oss")
    slots = Slots(layer, num_slots=8)
    call = random_call(layer, 1, 2, torch.float32, torch.float32)
    numbers = random_call(layer, 1, 2, torch.float32, torch.float32)
    call.hidden[0, 0] = float("nan")
    with torch.no_grad():
        call.expected = layer.experts(call.hidden, call.index, call.weights)
        found = call.resident(slots, with_ids=True)
    assert call.expected.isnan().all()
    assert found.isnan().all()
    spy = Spy(monkeypatch)
    for counts in ((1, 1), (0, 1)):
        with torch.no_grad():
            assert_same(numbers.resident(slots, with_ids=True), numbers.expected)
        assert spy.counts() == counts


def test_what_was_begun_is_finished_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of()
    slots = Slots(layer, num_slots=8)
    check(random_call(layer, 1, 3, torch.float32, torch.float32), slots)  # proves it
    call = random_call(layer, 2, 3, torch.float32, torch.float32, seed=1)
    spy, begun, begin = Spy(monkeypatch), [], RowKernel.begin

    def spy_on_begin(
        kernel: RowKernel, hidden: Sequence[torch.Tensor], selection: Selection, rows: ExpertRows
    ) -> Sequence[torch.Tensor]:
        begun.extend(selection.experts)
        return begin(kernel, hidden, selection, rows)

    monkeypatch.setattr(RowKernel, "begin", spy_on_begin)
    with torch.no_grad():
        for ahead in (call.needed[:1], call.needed[-1:], call.needed):
            begun.clear()
            assert_same(call.begun(slots, ahead), call.expected)
            assert sorted(begun) == call.needed, ahead  # each once
            assert begun[: len(ahead)] == ahead
            assert spy.counts()[0] == 0


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_nothing_is_begun_by_kernels_that_need_whole_experts(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of(implementation=implementation)
    call = random_call(layer, FEW_PAIRS, 2, torch.float32, torch.float32)  # many pairs
    monkeypatch.setattr(WeightedSum, "begin", None)
    with torch.no_grad():
        assert_same(call.begun(Slots(layer, num_slots=8), ahead=call.needed[:2]), call.expected)


def test_nothing_is_begun_before_the_row_kernel_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of()
    call, spy = random_call(layer, 1, 3, torch.float32, torch.float32), Spy(monkeypatch)
    with torch.no_grad():
        assert_same(call.begun(Slots(layer, num_slots=8), ahead=call.needed), call.expected)
    assert spy.counts() == (1, 3)  # the first group proved it
