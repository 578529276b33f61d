"""The promise for layers with experts of two formats: no bit depends on the cache, the predictor, the timing or threads.

The reference is the same model with all experts in slots in the same forms.
"""

from __future__ import annotations

import functools
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from served import (
    EVICTIONS,
    PREDICTORS,
    PROMPTS,
    LinkOver,
    check_integrity,
    close,
    config,
    delayed,
    greedy,
    load_stock,
    plain_link,
    predictor_of,
    record,
    stock,
)
from tiny_models import MOE_FAMILIES, build, token_ids
from transformers import PreTrainedModel

import promoe
from promoe.errors import ConfigError
from promoe.experts.kernels.formats import FORMATS
from promoe.experts.kernels.int4 import Int4Format
from promoe.experts.moe_layers import find_moe_layers
from promoe.model.opening import open_headers
from promoe.model.quantizing import Hot, write_quantized
from promoe.scheduler import ExpertKey
from promoe.stores.base import layout_of, read_expert
from promoe.transfer.engine.visit import EngineVisit

# The most layers of a tiny model.
LAYERS, EXPERTS = 3, 8
# One expert in four, others in each layer.
HOT = frozenset(ExpertKey(layer, idx) for layer in range(LAYERS) for idx in range(EXPERTS) if (layer + idx) % 4 == 0)
INT4 = Int4Format(4, 32)


@functools.cache
def checkpoint(family: str) -> Path:
    """A tiny checkpoint with most experts in int4, and some in int8, beside it."""
    folder = Path(_scratch().name) / family
    build(family, dtype=torch.bfloat16, top_k=3, intermediate=64).save_pretrained(folder, max_shard_size="200KB")
    opened = open_headers(folder)
    hot = Hot(frozenset(key for key in HOT if key.layer_idx < len(opened.layers)), FORMATS["int8"])
    write_quantized(opened.layers, opened.store, folder / "promoe-int4-hot8", INT4, hot=hot)
    opened.store.close()
    return folder


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def opened(family: str, cache: str | int, **arguments: Any) -> PreTrainedModel:
    settings = {"predictor": None, "link": LinkOver(plain_link), "config": config(), **arguments}
    return promoe.from_pretrained(checkpoint(family), experts="int4-hot8", cache=cache, **settings)


@functools.cache
def reference(family: str, prompt: str) -> Any:
    model = opened(family, "100%")
    try:
        return greedy(model, PROMPTS[prompt])
    finally:
        close(model)


def slots(model: PreTrainedModel) -> list[int]:
    """Slots of the pools: for ordinary experts, and for hot ones."""
    return [pool.num_slots for pool in model.promoe._pools]


def test_all_experts_are_in_their_own_form() -> None:
    """And what is served is that: the twin with the expanded weights is near, and eager computes with its very bits."""
    model, own = opened("qwen3_moe", "100%"), load_stock(checkpoint("qwen3_moe"))
    store = model.promoe.runtime.engine.store
    assert slots(model) == [18, 6]
    with torch.no_grad():
        for layer in find_moe_layers(own):
            rows = layer.rows()
            for expert in range(layer.num_experts):
                key = ExpertKey(layer.layer_idx, expert)
                layout = layout_of(store, key)
                slot = bytearray(layout.slot_bytes)
                read_expert(store, key, memoryview(slot))
                for spec in layout.tensors:
                    assert spec.format is not None
                    assert spec.format.name == ("int8" if key in HOT else "int4")
                    memory = torch.frombuffer(slot, dtype=torch.uint8)[spec.offset_bytes : spec.end_bytes]
                    assert torch.equal(memory, spec.format.quantize(rows[spec.name][expert], "rtn"))
                    rows[spec.name][expert].copy_(spec.format.view(memory).dense())
    few = opened("qwen3_moe", "30%")
    try:
        for one in (own, model, few):
            one.set_experts_implementation("eager")
        expected = greedy(own, PROMPTS["one"])
        greedy(model, PROMPTS["one"]).assert_equals(expected)
        greedy(few, PROMPTS["one"]).assert_equals(expected)
    finally:
        close(model)
        close(few)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_every_cache_size(family: str) -> None:
    for percent, prompt in ((25, "padded"), (30, "one"), (50, "padded"), (80, "one")):
        model = opened(family, f"{percent}%", predictor="gate", config=config(chunk_bytes=4096))
        try:
            layers = len(model.promoe.runtime.layers)
            assert slots(model) == [percent * layers * kind // 100 for kind in (6, 2)]
            greedy(model, PROMPTS[prompt]).assert_equals(reference(family, prompt))
            check_integrity(model)
            assert model.promoe.stats().evictions > 0
        finally:
            close(model)


@pytest.mark.parametrize("predictor", PREDICTORS)
def test_every_prediction(predictor: str | None) -> None:
    family = MOE_FAMILIES[PREDICTORS.index(predictor) % len(MOE_FAMILIES)]
    _, visits = record(family, torch.float32, "grouped_mm", "short")
    chosen = predictor_of(predictor, stock(family), visits, lookahead=3)
    model = opened(family, "50%", predictor=chosen, link=delayed(7), config=config(chunk_bytes=4096))
    try:
        greedy(model, PROMPTS["short"]).assert_equals(reference(family, "short"))
        check_integrity(model)
    finally:
        close(model)


def test_experts_of_both_kinds_are_begun_before_all_of_them_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[ExpertKey] = []
    real = EngineVisit._first_rows

    def noted(visit: EngineVisit) -> Any:
        rows = real(visit)
        assert all(set(tensors) == {"gate_up_proj"} for tensors in rows.values())
        begun.extend(ExpertKey(visit._layer_idx, expert_idx) for expert_idx in rows)
        return rows

    monkeypatch.setattr(EngineVisit, "_first_rows", noted)
    model = opened("qwen3_moe", "25%", link=delayed(7, max_delay_s=2e-3), config=config(chunk_bytes=4096))
    try:
        sizes = model.promoe.runtime.engine.scheduler.config
        assert (set(sizes.first_chunks), set(sizes.hot.first_chunks)) == ({2}, {3})
        for _ in range(50):  # how often it happens is a matter of time
            greedy(model, PROMPTS["short"]).assert_equals(reference("qwen3_moe", "short"))
            if {key in HOT for key in begun} == {True, False}:
                break
        else:
            raise AssertionError(f"only of one kind: {begun}")
        check_integrity(model)
    finally:
        close(model)


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("reorder", [True, False])
def test_one_slot_for_each_kind(eviction: str, reorder: bool) -> None:
    """With one slot, a visit takes as many turns as it has experts of the kind."""
    model = opened(
        "olmoe", "50%", predictor="gate", config=config(eviction=eviction, reorder=reorder, chunk_bytes=4096)
    )
    try:
        model.promoe.runtime.engine.resize([1, 1])
        assert slots(model) == [1, 1]
        greedy(model, PROMPTS["padded"]).assert_equals(reference("olmoe", "padded"))
        check_integrity(model)
    finally:
        close(model)


def test_one_and_two_threads_and_prompts_of_any_length() -> None:
    for threads in (1, 2):
        torch.set_num_threads(threads)
        full, few = opened("qwen3_moe", "100%"), opened("qwen3_moe", "30%", predictor="gate")
        try:
            with torch.no_grad():
                for batch, length in ((1, 1), (1, 3), (3, 17), (1, 90), (2, 250)):
                    ids = token_ids(batch, length, seed=length)
                    assert torch.equal(few(ids).logits, full(ids).logits), (threads, batch, length)
        finally:
            close(full)
            close(few)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_other_implementations(implementation: str) -> None:
    full, few = opened("mixtral", "100%"), opened("mixtral", "25%", predictor="gate")
    try:
        for model in (full, few):
            model.set_experts_implementation(implementation)
        greedy(few, PROMPTS["padded"]).assert_equals(greedy(full, PROMPTS["padded"]))
    finally:
        close(full)
        close(few)


def test_a_cache_is_resized_between_two_answers() -> None:
    model = opened("qwen2_moe", "25%", predictor="gate")
    try:
        seen = []
        for cache in ("25%", "75%", "17%", "100%"):
            model.promoe.resize(cache)
            seen.append(slots(model))
            greedy(model, PROMPTS["one"]).assert_equals(reference("qwen2_moe", "one"))
            check_integrity(model)
        assert seen == [[4, 1], [13, 4], [3, 1], [18, 6]]
        sizes = [pool.layout.slot_bytes for pool in model.promoe._pools]
        model.promoe.resize(2 * (18 * sizes[0] + 6 * sizes[1]) // 3)
        assert slots(model) == [12, 4]
        with pytest.raises(ConfigError, match=r"at least .* \(one expert of each shape\)"):
            model.promoe.resize("10%")
    finally:
        close(model)


def test_a_miss_moves_the_bytes_of_its_kind() -> None:
    weights = 3 * 64 * 64  # gate, up and down of an expert
    sizes = {False: weights // 2 + 4 * weights // 32, True: weights + 2 * 3 * 64}
    model = opened("qwen3_moe", "50%")
    try:
        engine = model.promoe.runtime.engine
        loads = dict.fromkeys(sizes, 0)
        real = engine.scheduler.chunk_done

        def counted(lease: Any) -> bool:
            arrived = real(lease)
            loads[lease.key in HOT] += arrived
            return arrived

        engine.scheduler.chunk_done = counted
        greedy(model, PROMPTS["one"])
        stats = model.promoe.stats()
        assert min(loads.values()) > 0
        assert stats.bytes_demand + stats.bytes_prefetched == sum(loads[kind] * size for kind, size in sizes.items())
        assert set(stats.expert_bytes) == {round((6 * sizes[False] + 2 * sizes[True]) / 8)}
        # Of eight experts, two have 8.25 bits per weight, and six have 5.
        assert stats.store == "SlotFilesStore, int8/int4, 5.81 bits per weight"
        assert stats.cache_bytes == sum(pool.nbytes for pool in model.promoe._pools)
    finally:
        close(model)


def test_warming_fills_both_kinds_of_slots() -> None:
    model = opened("qwen3_moe", "50%", config=config(verify="always"))
    try:
        assert model.promoe.warm([[1] * 8] * 3) == 12
        resident = model.promoe.runtime.engine.scheduler.resident()
        assert [sum((key in HOT) == kind for key in resident) for kind in (False, True)] == [9, 3]
        greedy(model, PROMPTS["one"]).assert_equals(reference("qwen3_moe", "one"))
    finally:
        close(model)


def test_after_an_interrupted_change_both_kinds_start_empty() -> None:
    model = opened("qwen3_moe", "50%")
    try:
        greedy(model, PROMPTS["one"])
        engine = model.promoe.runtime.engine
        with engine.lock:
            engine.change_failed(KeyboardInterrupt())
        greedy(model, PROMPTS["one"]).assert_equals(reference("qwen3_moe", "one"))
        assert slots(model) == [9, 3]
        check_integrity(model)
    finally:
        close(model)


def test_two_threads_share_the_slots() -> None:
    """With one slot for each kind, visits wait for each other's, and none for ever."""
    model = opened("qwen3_moe", "50%", predictor="gate", link=delayed(3), config=config(chunk_bytes=4096))
    try:
        model.promoe.runtime.engine.resize([1, 1])
        with ThreadPoolExecutor(2) as threads:
            names = ("one", "short", "padded", "short")
            for name, found in zip(names, threads.map(lambda name: greedy(model, PROMPTS[name]), names), strict=True):
                found.assert_equals(reference("qwen3_moe", name))
        check_integrity(model)
    finally:
        close(model)


def test_unpatching_gives_the_checkpoints_own_experts_back() -> None:
    model = opened("qwen3_moe", "30%")
    greedy(model, PROMPTS["one"])
    promoe.unpatch(model)
    greedy(model, PROMPTS["one"]).assert_equals(greedy(load_stock(checkpoint("qwen3_moe")), PROMPTS["one"]))


def test_patch_has_no_mixed_form() -> None:
    model = build("qwen3_moe", dtype=torch.bfloat16, intermediate=64)
    with pytest.raises(ConfigError, match=r"must be \"auto\" or one of int8, int4, int3, int2. Got 'int4-hot8'"):
        promoe.patch(model, experts="int4-hot8", store="disk")
