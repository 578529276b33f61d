"""Experts that are run where they are."""

from __future__ import annotations

import pytest
import torch
from tiny_models import IMPLEMENTATIONS, build, token_ids

from promoe.bench import in_place as under_test
from promoe.bench.in_place import in_place
from promoe.moe_layers import find_moe_layers


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_every_layer_goes_through_this_librarys_products_and_then_no_more(
    family: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(family, dtype=torch.bfloat16, experts_implementation=implementation)
    layers = find_moe_layers(model)
    run: list[str] = []
    real = under_test.run_resident

    def spy(layer, *args):  # type: ignore[no-untyped-def]
        run.append(layer.name)
        return real(layer, *args)

    monkeypatch.setattr(under_test, "run_resident", spy)
    ids = token_ids(1, 40)
    with torch.no_grad():
        expected = model(ids).logits
        assert run == []
        with in_place(layers):
            found = model(ids).logits
        assert run == [layer.name for layer in layers]
        assert torch.equal(found, expected)
        assert torch.equal(model(ids).logits, expected)
        assert len(run) == len(layers)
