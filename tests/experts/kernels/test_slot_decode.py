"""One token over slots: with the bits of the stock kernel, or else by the stock kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from tiny_models import MOE_FAMILIES, build
from torch import nn
from transformers.integrations.moe import batched_mm_experts_forward

import promoe
from promoe.experts.kernels import proofs
from promoe.experts.kernels.slot_decode import SlotDecode
from promoe.experts.moe_layers import MoELayer
from promoe.transfer.device_pool import DevicePool
from promoe.transfer.rows import SlotRows

SLOTS = [5, 0, 9, 3, 11, 7, 2, 8]  # of the experts


def one_layer(family: str, dtype: torch.dtype = torch.float32) -> MoELayer:
    return promoe.find_moe_layers(build(family, dtype=dtype, experts_implementation="batched_mm"))[0]


def rows_of(layer: MoELayer, chosen: list[int]) -> SlotRows:
    """The chosen experts in their slots, among others that hold NaN."""
    pool = DevicePool(layer.layout, max(SLOTS) + 1, FakeDevice())
    for name, rows in layer.rows().items():
        for expert in chosen:
            pool.tensors(SLOTS[expert])[name].copy_(rows[expert])
    return pool.rows(chosen, [SLOTS[expert] for expert in chosen])


def verdicts_on(experts: nn.Module) -> list[bool | None]:
    return [proof.same for proof in proofs._OF_MODULES[experts].values()]


class Token:
    """One token of a layer, and how often the stock kernel was asked for it."""

    def __init__(self, layer: MoELayer, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        dtype = layer.stacked_shapes[0][2]
        self.layer, self.asked = layer, 0
        self.hidden = torch.randn(1, 64, generator=draw).to(dtype)
        self.chosen: list[int] = torch.randperm(layer.num_experts, generator=draw)[:3].tolist()
        self.weights = torch.rand(1, 3, generator=draw).to(dtype)

    def expected(self) -> torch.Tensor:
        self.asked += 1
        with torch.inference_mode():
            index = torch.tensor([self.chosen])
            found: torch.Tensor = batched_mm_experts_forward(self.layer.experts, self.hidden, index, self.weights)
            return found

    def run(self) -> torch.Tensor:
        rows = rows_of(self.layer, self.chosen)
        with torch.inference_mode():
            decode = SlotDecode(self.layer.experts, batched_mm_experts_forward)
            return decode.run(self.hidden, self.weights, rows.slots_of(self.chosen), rows, self.expected)


FAMILIES = [family for family in MOE_FAMILIES if one_layer(family).adapter.sums_rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_are_those_of_the_stock_kernel(family: str, dtype: torch.dtype) -> None:
    layer = one_layer(family, dtype)
    if layer.num_ids > layer.num_experts:
        pytest.skip("some ids have no weights")
    for seed in range(5):
        token = Token(layer, seed)
        found = token.run()
        assert token.asked == (seed == 0), "the first is compared, and proves it"
        expected = token.expected()
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_where_the_bits_differ_the_stock_kernel_is_used_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = one_layer("qwen2_moe")
    compute = SlotDecode._compute
    computed = []

    def wrong(self: SlotDecode, *args: Any) -> torch.Tensor:
        computed.append(1)
        return torch.nextafter(compute(self, *args), torch.tensor(torch.inf))

    monkeypatch.setattr(SlotDecode, "_compute", wrong)
    for seed in range(3):
        token = Token(layer, seed)
        assert torch.equal(token.run(), token.expected())
    assert len(computed) == 1


def test_what_is_no_number_proves_nothing() -> None:
    layer = one_layer("qwen2_moe")
    token = Token(layer)
    token.hidden[0, 3] = torch.nan
    for _ in range(2):
        assert token.run().isnan().all()
    assert token.asked == 2
    assert verdicts_on(layer.experts) == [None]
    assert torch.equal(Token(layer, 1).run(), Token(layer, 1).expected())
    assert verdicts_on(layer.experts) == [True]


def test_an_expert_that_is_not_there_raises() -> None:
    layer = one_layer("qwen2_moe")
    rows = rows_of(layer, [1, 4])
    with pytest.raises(AssertionError, match=r"expert 2 has no slot here; ready: \[1, 4\]"):
        rows.slots_of([1, 2])


def test_the_forward_on_a_device_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one token, in place of the kernel that generate decodes with."""
    monkeypatch.setattr("promoe.runtime.checking.open_device", lambda name: FakeDevice())
    model = build("qwen2_moe", experts_implementation="batched_mm")
    ids = torch.tensor([[3]])
    with torch.inference_mode():
        expected = model(ids).logits
        promoe.patch(model, device="cuda", cache="50%", config=promoe.PromoeConfig(strict=True))
        for _ in range(2):
            assert torch.equal(model(ids).logits, expected)
        experts = [layer.experts for layer in promoe.find_moe_layers(model)]
        assert [verdicts_on(one) for one in experts] == [[True]] * 3
        promoe.unpatch(model)
