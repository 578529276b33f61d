from __future__ import annotations

from dataclasses import replace

import pytest

from commands.plan.planned import MIB, sizes
from promoe.commands.plan.fits import rate_name
from promoe.commands.plan.sizes import CacheLayer, KvCache


def test_a_cache_layer_keeps_what_its_kind_keeps() -> None:
    assert CacheLayer("full attention", 0, 10).nbytes(100) == 1000
    assert CacheLayer("sliding window", 0, 10, 15).nbytes(100) == 150
    assert CacheLayer("sliding window", 0, 10, 15).nbytes(5) == 50
    assert CacheLayer("state", 64, 0).nbytes(100) == 64


def test_layers_of_one_kind_are_counted_together() -> None:
    full, window = (
        CacheLayer("full attention", 0, 10, None, "2 heads x (4 + 4)"),
        CacheLayer("sliding window", 0, 10, 127),
    )
    kv = KvCache((full, window, full), "")
    assert kv.nbytes(1000) == 20_000 + 1270
    assert kv.kinds() == ["2 x full attention, 2 heads x (4 + 4)", "1 x sliding window of 127 tokens"]
    assert KvCache((), "unknown").nbytes(1000) is None


def test_sums() -> None:
    model = sizes(layers=3, experts=8, top_k=2, expert_mib=4)
    assert model.num_experts == 24
    assert model.expert_bytes == model.stored_bytes == model.slots_bytes == 24 * 4 * MIB
    assert model.token_bytes == 3 * 2 * 4 * MIB
    assert model.least_rate == 0.04167
    quantised = replace(model, layers=tuple(replace(layer, stored_bytes=MIB) for layer in model.layers))
    assert quantised.stored_share == 0.25
    assert quantised.expert_bytes == model.expert_bytes


@pytest.mark.parametrize("experts", [1, 3, 8, 16, 32, 61, 100, 1000])
@pytest.mark.parametrize("layers", [1, 12, 61])
def test_the_smallest_cache_can_be_typed_as_it_is_printed(layers: int, experts: int) -> None:
    model = sizes(layers=layers, experts=experts, top_k=1)
    typed = float(rate_name(model.least_rate).rstrip("%")) / 100
    assert int(typed * model.num_experts) == 1
