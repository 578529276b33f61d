"""Expanding quantised experts on a device: the bits of the formats' own dense matrices, and the order of copies and reads."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from fake_device import FakeDevice
from unread import Unread

from promoe.experts.kernels.expanding import expanded, most_expanded, split
from promoe.experts.kernels.int4 import Int4
from promoe.experts.kernels.int8 import Int8
from promoe.experts.kernels.quantization import middle_code, quantize_groups, quantize_rows, rtn
from promoe.experts.kernels.quantized import Quantized
from promoe.stores.layout import ExpertLayout
from promoe.transfer.device_pool import DevicePool
from promoe.transfer.rows import FormattedRows, SlotRows

CPU = torch.device("cpu")
SHAPE = (64, 128)
FORMATS: list[Callable[[bool], Quantized]] = [
    lambda transposed: Int8(SHAPE, transposed, None),
    *(
        partial(
            lambda bits, group, block, transposed: Int4(SHAPE, transposed, 8, bits, group, block), bits, group, block
        )
        for bits in (4, 3, 2)
        for group in (32, 64)
        for block in (32, 64)
    ),
]


def matrix(seed: int, matrix_format: Quantized) -> torch.Tensor:
    return torch.randn(matrix_format.shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def by_definition(matrix_format: Quantized, plain: torch.Tensor) -> torch.Tensor:
    """What the codes, scales and zeros of a matrix stand for, in fp32 until the end."""
    linear = matrix_format.as_linear(plain)
    if isinstance(matrix_format, Int4):
        codes, scales, zeros = quantize_groups(linear, matrix_format.bits, matrix_format.group, rtn)
        steps = codes.float().unflatten(1, (-1, matrix_format.group)) - middle_code(matrix_format.bits)
        found = (steps * scales.float().unsqueeze(2) + zeros.float().unsqueeze(2)).flatten(1)
    else:
        found = (rows := quantize_rows(linear)).codes.float() * rows.scales.float().unsqueeze(1)
    return (found.t() if matrix_format.transposed else found).to(torch.bfloat16)


def pool_of(matrix_format: Quantized, num_slots: int, device: FakeDevice) -> DevicePool:
    tensors = {"up": (matrix_format.shape, torch.bfloat16), "bias": ((64,), torch.bfloat16)}
    return DevicePool(ExpertLayout.of(tensors, {"up": matrix_format}), num_slots, device)


def fill(pool: DevicePool, idx: int, seed: int) -> None:
    matrix_format = pool.layout.formats["up"]
    assert isinstance(matrix_format, Quantized)
    pool.tensors(idx)["up"].copy_(matrix_format.pack(matrix(seed, matrix_format)))
    pool.tensors(idx)["bias"].fill_(seed)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("make", FORMATS)
def test_the_bits_are_those_that_the_codes_stand_for(make: Callable[[bool], Quantized], transposed: bool) -> None:
    """Of several experts at once, which are not beside each other, in ascending order; whatever the processor's block."""
    matrix_format = make(transposed)
    pool = pool_of(matrix_format, 5, FakeDevice())
    for idx in range(5):
        fill(pool, idx, seed=idx)
    rows = pool.rows([7, 2, 4], [3, 0, 4])
    assert isinstance(rows, FormattedRows)
    assert not any(rows.values()), "no kernel reads bytes as a matrix"
    found = expanded(rows, CPU)
    assert list(found) == [2, 4, 7]
    assert found.slots_of([7, 2, 4]) == [2, 0, 1]
    for expert, seed in {7: 3, 2: 0, 4: 4}.items():
        row, plain = found[expert], matrix(seed, matrix_format)
        assert row["up"].is_contiguous()
        assert torch.equal(row["up"], by_definition(matrix_format, plain))
        assert torch.equal(row["up"], matrix_format.view(matrix_format.pack(plain)).dense())
        assert torch.equal(found.stacks["up"][found.slots[expert]], row["up"])
        assert (row["bias"] == seed).all()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("make", FORMATS)
def test_what_was_expanded_stays_when_other_experts_are_expanded(
    make: Callable[[bool], Quantized], transposed: bool
) -> None:
    pool = pool_of(make(transposed), 2, FakeDevice())
    for idx in range(2):
        fill(pool, idx, seed=idx)
    first = expanded(_rows(pool, [0]), CPU).stacks
    before = {name: stack.clone() for name, stack in first.items()}
    expanded(_rows(pool, [1]), CPU)
    pool.poison()
    assert all(torch.equal(first[name], before[name]) for name in first)


def _rows(pool: DevicePool, slots: Sequence[int]) -> FormattedRows:
    rows = pool.rows(slots, slots)
    assert isinstance(rows, FormattedRows)
    return rows


@pytest.mark.parametrize("make", FORMATS)
def test_the_host_reads_nothing(make: Callable[[bool], Quantized]) -> None:
    pool = pool_of(make(False), 3, FakeDevice())
    fill(pool, 1, seed=1)
    rows = _rows(pool, [1])
    unread = {name: stack.as_subclass(Unread) for name, stack in rows.stacks.items()}
    found = expanded(FormattedRows(rows.slots, unread, rows.formats), CPU)
    assert torch.equal(found.stacks["up"].as_subclass(torch.Tensor), expanded(rows, CPU).stacks["up"])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("make", FORMATS)
def test_everything_is_done_where_the_bytes_are(make: Callable[[bool], Quantized], transposed: bool) -> None:
    """The meta device stands for any other: torch refuses to compute with tensors of two devices."""
    matrix_format = make(transposed)
    found = matrix_format.dense(
        matrix_format.parts(torch.empty((3, matrix_format.nbytes), dtype=torch.uint8).to("meta"))
    )
    assert found.is_meta
    assert found.shape == (3, *SHAPE)
    assert found.is_contiguous()


def test_groups_are_split_into_what_can_be_expanded_at_once() -> None:
    pool = pool_of(FORMATS[0](False), 5, FakeDevice())
    plain = SlotRows({1: {}, 2: {}, 3: {}}, {1: 1, 2: 2, 3: 3}, {})
    groups = list(split([pool.rows([9, 3, 5, 1, 7], range(5)), plain], 2))
    assert [list(group) for group in groups] == [[1, 3], [5, 7], [9], [1, 2, 3]]
    assert [group.slots for group in groups if isinstance(group, FormattedRows)] == [{1: 3, 3: 1}, {5: 2, 7: 4}, {9: 0}]
    assert groups[-1] is plain


def test_one_token_is_expanded_whole_and_more_experts_as_they_fit() -> None:
    assert most_expanded(expert_bytes=2**40, top_k=6) == 6
    assert most_expanded(expert_bytes=2**20, top_k=6) == 256


class Machine:
    """Experts that come into few slots and are expanded there, by queues that run as they like."""

    def __init__(self) -> None:
        self.device = FakeDevice(eager=False)
        self.format = FORMATS[1](False)
        self.pool = pool_of(self.format, 3, self.device)
        self.copies = self.device.new_queue()
        self.seeds = [0, 0, 0]
        self.wrong = 0
        self.seen = 0

    def write(self, idx: int, seed: int) -> None:
        slot, spec = self.pool.slot(idx), self.pool.layout["up"]
        slot.begin_write(self.copies, set())
        content = self.format.pack(matrix(seed, self.format))
        self.copies.copy_all([(slot.memory[spec.offset_bytes : spec.end_bytes], content)])
        slot.end_write(self.copies.mark())
        self.seeds[idx] = seed

    def read(self, slots: Sequence[int]) -> None:
        self.pool.begin_read(slots)
        rows, seeds = _rows(self.pool, slots), [self.seeds[idx] for idx in slots]
        self.device.compute.put(lambda: self._see(rows, seeds))
        self.pool.end_read(slots)

    def _see(self, rows: FormattedRows, seeds: Sequence[int]) -> None:
        found = expanded(rows, CPU).stacks["up"]
        wanted = [by_definition(self.format, matrix(seed, self.format)) for seed in seeds]
        self.seen += 1
        self.wrong += not torch.equal(found, torch.stack(wanted))


def run(seed: int) -> Machine:
    machine, draw = Machine(), random.Random(seed)
    for number in range(12):
        machine.write(draw.randrange(3) if number > 2 else number, seed=number)
        if number > 1:
            machine.read(sorted(draw.sample(range(3), 2)))
        if draw.random() < 0.3:
            machine.device.run_some(draw, 3)
    machine.device.run_all(draw)
    assert machine.seen == 10
    assert machine.device.host_waits == 0, "the host waits for nothing that a queue can wait for"
    return machine


@pytest.mark.parametrize("seed", range(10))
def test_what_is_expanded_is_what_was_copied_before_it(seed: int) -> None:
    assert run(seed).wrong == 0


@pytest.mark.parametrize("forgotten", ["begin_read", "end_read"])
def test_without_any_one_of_its_waits_it_would_be_wrong(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    monkeypatch.setattr(DevicePool, forgotten, lambda *args: None)
    assert sum(run(seed).wrong for seed in range(10)) > 0
