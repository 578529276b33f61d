"""Quantised experts with slots on a device that is not there: the bits of the model with expanded experts, whatever moves.

The device's copies are made as late as may be, and slots hold NaN before (`fake_device`).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from quantised_twin import open_store, quantised, twin, twin_of, write
from served import PREDICTORS, PROMPTS, check_integrity, close, greedy, load_stock, predictor_of, watched
from tiny_models import IMPLEMENTATIONS, MOE_FAMILIES, token_ids

import promoe
from promoe.errors import ConfigError
from promoe.experts.kernels import choosing, expanding, int4
from promoe.experts.kernels.int4 import Int4, Int4Format
from promoe.experts.kernels.quantized import has_kernel
from promoe.runtime import checking
from promoe.stores.layout import ExpertLayout
from promoe.transfer.device_pool import DevicePool
from promoe.transfer.rows import FormattedRows, SlotRows

FORMAT_NAMES = ("int8", "int4", "int3", "int2")
FAMILY, EXPERTS = "qwen2_moe", 24
CONFIG = promoe.PromoeConfig(
    strict=True, ablation=promoe.Ablation(governor=False), min_probability=0.3, chunk_bytes=4096
)
ALL_PROMPTS = {
    **PROMPTS,
    "batch": {"input_ids": token_ids(5, 1, seed=4), "attention_mask": torch.ones(5, 1, dtype=torch.long)},
    "long": {"input_ids": token_ids(1, 60, seed=5), "attention_mask": torch.ones(1, 60, dtype=torch.long)},
}


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """What "cuda" opens."""
    found = FakeDevice()
    monkeypatch.setattr(checking, "open_device", lambda name: found if str(name) == "cuda" else None)
    return found


@contextmanager
def on_device(folder: Path, experts: Any, implementation: str = "grouped_mm", **more: Any) -> Iterator[Any]:
    arguments = {"predictor": None, "config": CONFIG, "cache": "30%", **more}
    model = promoe.from_pretrained(folder, experts=experts, device="cuda", **arguments)
    model.set_experts_implementation(implementation)
    try:
        yield model
        check_integrity(model)
    finally:
        close(model)


def layout_of(slot_format: str) -> ExpertLayout:
    with closing(open_store(quantised(FAMILY, slot_format), slot_format)) as store:
        return store.layouts[0]


@pytest.mark.parametrize(
    ("family", "implementation"), [*(("qwen2_moe", one) for one in IMPLEMENTATIONS), ("gpt_oss", "grouped_mm")]
)
@pytest.mark.parametrize("slot_format", FORMAT_NAMES)
def test_the_bits_are_those_of_the_model_with_expanded_experts(
    family: str, slot_format: str, implementation: str
) -> None:
    reference = twin(family, slot_format, implementation)
    wanted = {name: greedy(reference, prompt) for name, prompt in ALL_PROMPTS.items()}
    folder = quantised(family, slot_format)
    for cache, predictor in (("5%", None), ("30%", "gate"), ("100%", "gate")):
        with on_device(folder, slot_format, implementation, cache=cache, predictor=predictor) as model:
            for name, prompt in ALL_PROMPTS.items():
                greedy(model, prompt).assert_equals(wanted[name])


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_every_family(family: str) -> None:
    slot_format = FORMAT_NAMES[MOE_FAMILIES.index(family) % len(FORMAT_NAMES)]
    with on_device(quantised(family, slot_format), slot_format, predictor="gate") as model:
        for prompt in PROMPTS.values():
            greedy(model, prompt).assert_equals(greedy(twin(family, slot_format), prompt))


@pytest.mark.parametrize("predictor", PREDICTORS)
@pytest.mark.parametrize("count", [1, 3, 7, EXPERTS])
def test_every_predictor_with_few_and_many_slots(count: int, predictor: str | None) -> None:
    reference = twin(FAMILY, "int4")
    wanted, visits = watched(reference, PROMPTS["short"])
    chosen = predictor_of(predictor, reference, visits, lookahead=2)
    cache = count * layout_of("int4").slot_bytes
    with on_device(quantised(FAMILY, "int4"), "int4", predictor=chosen, cache=cache) as model:
        assert model.promoe.stats().cache_slots == count
        greedy(model, PROMPTS["short"]).assert_equals(wanted)


@pytest.mark.parametrize("slot_format", FORMAT_NAMES)
def test_a_miss_moves_the_bytes_of_the_format(slot_format: str, device: FakeDevice) -> None:
    layout = layout_of(slot_format)
    plain_bytes = layout.in_formats({}).payload_bytes
    assert layout.payload_bytes == sum(one.nbytes for one in layout.formats.values()) < 0.6 * plain_bytes
    with on_device(quantised(FAMILY, slot_format), slot_format, cache="30%") as model:
        greedy(model, PROMPTS["short"])
        stats = model.promoe.stats()
        misses = stats.total.needed - stats.total.hits
        assert misses > 0
        assert device.copied_bytes == stats.total.bytes_demand == misses * layout.payload_bytes
        assert stats.expert_bytes == (layout.payload_bytes,) * 3


def test_ram_and_slots_hold_what_was_quantised(device: FakeDevice) -> None:
    slot_bytes, before = layout_of("int4").slot_bytes, device.memory_bytes
    settings = replace(CONFIG, pinned_bytes=5 * slot_bytes)
    with on_device(quantised(FAMILY, "int4"), "int4", cache=7 * slot_bytes, config=settings) as model:
        assert sum(tensor.nbytes for tensor in device.pinned) == 5 * slot_bytes
        assert "of pinned RAM (5 of 24 experts) to fake device" in model.promoe.stats().link
        assert before - device.memory_bytes == 7 * slot_bytes


def test_bytes_may_be_verified_on_their_way() -> None:
    with on_device(quantised(FAMILY, "int4"), "int4", config=replace(CONFIG, verify="always")) as model:
        greedy(model, PROMPTS["one"]).assert_equals(greedy(twin(FAMILY, "int4"), PROMPTS["one"]))


def test_slots_may_be_warmed_and_become_more_or_fewer_between_forwards() -> None:
    wanted = greedy(twin(FAMILY, "int4"), PROMPTS["one"])
    with on_device(quantised(FAMILY, "int4"), "int4", predictor="gate") as model:
        assert model.promoe.warm([[1] * 8] * 3) > 0
        for cache in ("60%", "10%", "100%", "30%"):
            model.promoe.resize(cache)
            greedy(model, PROMPTS["one"]).assert_equals(wanted)


def test_many_threads_may_answer_at_once() -> None:
    """None of them multiplies by what another one expanded."""
    names = [*ALL_PROMPTS] * 2
    wanted = {name: greedy(twin(FAMILY, "int4"), prompt) for name, prompt in ALL_PROMPTS.items()}
    with (
        on_device(quantised(FAMILY, "int4"), "int4", predictor="gate") as model,
        ThreadPoolExecutor(3, initializer=torch.set_num_threads, initargs=(1,)) as pool,
    ):
        for name, found in zip(names, pool.map(lambda name: greedy(model, ALL_PROMPTS[name]), names), strict=True):
            found.assert_equals(wanted[name])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_more_experts_are_expanded_at_once_than_fit(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def counted(rows: FormattedRows, device: torch.device) -> SlotRows:
        counts.append(len(rows))
        return expanding.expanded(rows, device)

    monkeypatch.setattr(choosing, "expanded", counted)
    wanted = greedy(twin(FAMILY, "int8", implementation), ALL_PROMPTS["long"])
    expert_bytes = layout_of("int8").in_formats({}).payload_bytes
    for room, most in ((expanding.EXPANDED_BYTES, 8), (4 * expert_bytes, 4), (0, 3)):
        monkeypatch.setattr(expanding, "EXPANDED_BYTES", room)
        counts.clear()
        with on_device(quantised(FAMILY, "int8"), "int8", implementation, cache="100%") as model:
            greedy(model, ALL_PROMPTS["long"]).assert_equals(wanted)
        assert max(counts) == most
        assert counts[-1] == 3, "one token's experts are expanded at once"


def test_a_forgotten_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: who expands a slot without waiting for its copies expands NaN."""
    monkeypatch.setattr(DevicePool, "begin_read", lambda pool, slots: None)
    with on_device(quantised(FAMILY, "int4"), "int4") as model:
        found = greedy(model, PROMPTS["one"])
    assert found.logits[0].isnan().any()


def test_files_for_another_processor_are_for_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = int4.kernel_block()
    has_kernel(Int4)  # it is tried once, with the block that this processor has
    with monkeypatch.context() as patch:
        patch.setattr(int4, "kernel_block", lambda: 64 if own == 32 else 32)
        folder = write(tmp_path / "model", FAMILY, "int4")
    wanted = greedy(twin_of(folder, "int4"), PROMPTS["one"])
    with on_device(folder, "int4") as model:
        (block,) = {one.block for one in model.promoe.runtime.engine.store.layouts[0].formats.values()}
        assert block != own
        greedy(model, PROMPTS["one"]).assert_equals(wanted)
    if own is not None:
        with pytest.raises(ConfigError, match="of another processor"):
            promoe.from_pretrained(folder, experts="int4")


def test_unpatched_the_model_has_the_experts_of_the_checkpoint() -> None:
    folder = quantised(FAMILY, "int4")
    model = promoe.from_pretrained(folder, experts="int4", device="cuda", config=CONFIG)
    promoe.unpatch(model)
    greedy(model, PROMPTS["one"]).assert_equals(greedy(load_stock(folder), PROMPTS["one"]))


def test_a_model_that_was_in_memory(device: FakeDevice) -> None:
    """What it is quantised to is what the checkpoint is quantised to."""
    model = load_stock(quantised(FAMILY, "int4"))
    own = greedy(model, PROMPTS["one"])
    promoe.patch(model, experts="int4", store="disk", device="cuda", cache="30%", config=CONFIG)
    greedy(model, PROMPTS["one"]).assert_equals(greedy(twin(FAMILY, "int4"), PROMPTS["one"]))
    assert device.copied_bytes % layout_of("int4").payload_bytes == 0
    promoe.unpatch(model)
    greedy(model, PROMPTS["one"]).assert_equals(own)


def test_without_being_asked_for_nothing_is_quantised() -> None:
    folder = quantised(FAMILY, "int4")
    for experts in ("auto", "checkpoint"):
        with on_device(folder, experts) as model:
            greedy(model, PROMPTS["one"]).assert_equals(greedy(load_stock(folder), PROMPTS["one"]))


def test_packed_experts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = quantised(FAMILY, "int4")
    with pytest.raises(ConfigError, match=r"experts='packed' is for slots in RAM.*promoe quantize"):
        promoe.from_pretrained(folder, experts="packed", device="cuda")
    monkeypatch.setattr(Int4Format, "exact", True)  # as if this folder were of a format for the processor alone
    with pytest.raises(ConfigError, match=r"promoe-int4 cannot be used: .*'int4', which only a CPU can multiply by"):
        promoe.from_pretrained(folder, experts=folder / "promoe-int4", device="cuda")


def test_what_was_not_written_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"experts='int8' was asked for.*promoe quantize MODEL --bits 8"):
        promoe.from_pretrained(quantised(FAMILY, "int4"), experts="int8", device="cuda")
