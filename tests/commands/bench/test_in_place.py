"""Experts that are run where they are."""

from __future__ import annotations

import pytest
import torch
from needs import needs_packing
from tiny_models import IMPLEMENTATIONS, build, token_ids

from promoe.commands.bench import in_place as under_test
from promoe.commands.bench.in_place import in_place, rows_of
from promoe.experts.kernels import choosing
from promoe.experts.kernels.formats import FORMATS, formats_of
from promoe.experts.kernels.packed import PackedMatrix
from promoe.experts.kernels.row_kernel import RowKernel
from promoe.experts.moe_layers import find_moe_layers


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_every_layer_goes_through_this_librarys_products_and_then_no_more(
    family: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(family, dtype=torch.bfloat16, experts_implementation=implementation)
    layers = find_moe_layers(model)
    run: list[str] = []
    real = under_test.LayerCall

    def spy(layer, *args):  # type: ignore[no-untyped-def]
        run.append(layer.name)
        return real(layer, *args)

    monkeypatch.setattr(under_test, "LayerCall", spy)
    ids = token_ids(1, 40)
    with torch.no_grad():
        expected = model(ids).logits
        assert run == []
        with in_place(layers, rows_of(layers, packed=())):
            found = model(ids).logits
        assert run == [layer.name for layer in layers]
        assert torch.equal(found, expected)
        assert torch.equal(model(ids).logits, expected)
        assert len(run) == len(layers)


def test_long_prompts_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3_moe", dtype=torch.bfloat16, experts_implementation="grouped_mm")
    layers = find_moe_layers(model)
    parts: list[RowKernel] = []
    part = RowKernel.part

    def spy(kernel: RowKernel, *args):  # type: ignore[no-untyped-def]
        parts.append(kernel)
        return part(kernel, *args)

    monkeypatch.setattr(RowKernel, "part", spy)
    monkeypatch.setattr(choosing, "PART_BYTES", 1)
    ids = token_ids(1, 40)
    with torch.no_grad():
        expected = model(ids).logits
        assert not parts
        with in_place(layers, rows_of(layers, packed=())):
            assert torch.equal(model(ids).logits, expected)
    assert len(parts) >= 2 * len(layers)


@needs_packing
def test_packed_experts_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3_moe", dtype=torch.bfloat16, experts_implementation="grouped_mm", hidden=128, intermediate=64)
    layers = find_moe_layers(model)
    (possible,) = formats_of(layers, FORMATS["packed"]).values()
    assert set(possible) == {"gate_up_proj", "down_proj"}
    for asked in (possible, list(possible)[:1]):
        matrices = {name: possible[name] for name in asked}
        rows = rows_of(layers, packed={layer.layout.in_formats(matrices) for layer in layers})
        for of_layer in rows:
            assert {name for name, row in of_layer[0].items() if isinstance(row, PackedMatrix)} == set(asked)
    ids = token_ids(1, 40)
    with torch.no_grad():
        expected = model(ids).logits
        with in_place(layers, rows):
            assert torch.equal(model(ids).logits, expected)
