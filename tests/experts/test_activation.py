from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from promoe.experts.activation import WholeActivation, depends_on_shape, grain_elements
from promoe.experts.pairs import Pairs

BITS_16 = (torch.bfloat16, torch.float16)


class Experts(nn.Module):
    """What an activation needs of an experts module."""

    def __init__(self, activation: str, has_gate: bool = True) -> None:
        super().__init__()
        self.has_gate = has_gate
        self.act_fn = ACT2FN[activation]

    def _apply_gate(self, rows: torch.Tensor) -> torch.Tensor:
        gate, up = rows.chunk(2, dim=-1)
        activated: torch.Tensor = self.act_fn(gate) * up
        return activated


def all_values(dtype: torch.dtype) -> torch.Tensor:
    """Every finite number of 16 bits, `[n]`."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[values.isfinite()]


@pytest.mark.parametrize("dtype", BITS_16, ids=str)
@pytest.mark.parametrize("activation", ["relu", "relu2", "silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "mish"])
def test_what_has_one_result_in_any_pieces(activation: str, dtype: torch.dtype) -> None:
    """If it is said to, then a value has the same bits at any place of operations of any size."""
    experts = Experts(activation)
    if grain_elements(experts, 8, dtype) is not None:
        pytest.skip("it has several on this processor")
    values = all_values(dtype)
    with torch.no_grad():
        whole = experts.act_fn(values[: 2**14 // 64 * 64])
        for size in (1, 7, 63, 65, 1000):
            parts = torch.cat([experts.act_fn(part.clone()) for part in values[: len(whole)].split(size)])
            assert torch.equal(parts.view(torch.int16), whole.view(torch.int16)), size
        gates = values[: len(whole)].view(-1, 64)
        rows = torch.cat([gates, torch.ones_like(gates)], dim=1)
        together = experts._apply_gate(rows)
        one_by_one = torch.cat([experts._apply_gate(row) for row in rows.split(1)])
        assert torch.equal(one_by_one.view(torch.int16), together.view(torch.int16))


def test_what_a_grain_is_found_to_be() -> None:
    for dtype in (*BITS_16, torch.float32):
        assert grain_elements(Experts("relu"), 8, dtype) is None
    assert grain_elements(Experts("silu"), 8, torch.float32) == 32768
    assert grain_elements(Experts("gelu_pytorch_tanh"), 8, torch.float32) == 16384
    assert grain_elements(Experts("gelu"), 8, torch.float32) == 0
    experts = Experts("relu")
    assert grain_elements(experts, 8, torch.float32) is None
    experts.act_fn = ACT2FN["gelu"]  # somebody may
    assert grain_elements(experts, 8, torch.float32) == 0


def test_an_operation_of_two_tensors_is_not_known_to_be_exact() -> None:
    class Odd(Experts):
        def _apply_gate(self, rows: torch.Tensor) -> torch.Tensor:
            gate, up = rows.chunk(2, dim=-1)
            return torch.atan2(gate, up)

    assert grain_elements(Odd("relu"), 8, torch.bfloat16) == 32768


@pytest.mark.parametrize(
    ("activation", "dtype", "threads", "width", "num_rows", "expected"),
    [
        ("silu", torch.float32, 1, 64, 10**6, False),
        ("silu", torch.float32, 2, 64, 10**6, False),  # halves of 32 are whole vectors
        ("silu", torch.float32, 2, 96, 10**6, True),
        ("silu", torch.float32, 3, 64, 512, False),  # 32,768 elements
        ("silu", torch.float32, 3, 64, 513, True),
        ("gelu_pytorch_tanh", torch.float32, 3, 64, 256, False),
        ("gelu_pytorch_tanh", torch.float32, 3, 64, 257, True),
        ("gelu", torch.float32, 1, 64, 1, False),
        ("gelu", torch.float32, 1, 64, 2, True),  # by oneDNN or not
        ("silu", torch.float32, 1, 100, 1, True),  # an end is left over at once
        ("relu", torch.float32, 3, 100, 10**6, False),
        ("silu", torch.int8, 3, 100, 10**6, False),
    ],
)
def test_what_depends_on_shape(
    activation: str, dtype: torch.dtype, threads: int, width: int, num_rows: int, expected: bool
) -> None:
    torch.set_num_threads(threads)  # conftest sets it back
    assert depends_on_shape(Experts(activation), 2 * width, dtype, [width], num_rows) == expected


@pytest.mark.parametrize("dtype", [*BITS_16, torch.float32], ids=str)
@pytest.mark.parametrize(("activation", "has_gate"), [("silu", True), ("gelu", True), ("gelu", False)])
@pytest.mark.parametrize("by_expert", [True, False])
def test_rows_of_some_experts_are_those_of_the_whole_operation(
    by_expert: bool, activation: str, has_gate: bool, dtype: torch.dtype
) -> None:
    experts: Any = Experts(activation, has_gate)
    tokens, top_k, width = 61, 2, 1001
    index = torch.rand(tokens, 5).topk(top_k).indices
    pairs = Pairs(index, 5, by_choice=False)
    rows = (3 * torch.randn(tokens * top_k, width * (1 + has_gate))).to(dtype)  # by position
    name = "_apply_gate" if has_gate else "act_fn"
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)  # conftest sets it back
        order = pairs.select(pairs.experts).position_tensor if by_expert else torch.arange(tokens * top_k)
        whole = torch.empty(tokens * top_k, width, dtype=dtype)
        whole[order] = getattr(experts, name)(rows[order])
        activation_of = WholeActivation(experts, pairs, by_expert)
        for some in itertools.combinations(range(5), 2):
            selection = pairs.select(list(some))
            attributes = activation_of.attributes(selection)
            assert list(attributes) == [name]
            own = rows[selection.position_tensor]
            found = attributes[name](own)
            assert torch.equal(found, whole[selection.position_tensor]), some
            more = attributes[name](torch.cat([own, own[-1:], own[-1:]]))  # a kernel may be given its last row again
            assert torch.equal(more, torch.cat([found, found[-1:], found[-1:]]))
