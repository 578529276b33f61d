"""Where the cache holds every expert nothing is served: the stock model runs, and the handle says so."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from served import PROMPTS, LinkOver, checkpoint, expected, greedy, plain_link, resident, stock
from torch import nn
from transformers import PreTrainedModel

import promoe
from promoe.errors import ConfigError, PatchStateError
from promoe.experts.guard import is_guard
from promoe.model import attach
from promoe.runtime.resident import ResidentHandle
from promoe.runtime.slot_handle import SlotHandle

FAMILY, EXPERTS = "qwen2_moe", 24
EXPERT_BYTES = 24576


def assert_unharmed(model: nn.Module) -> None:
    greedy(model, PROMPTS["one"]).assert_equals(expected(FAMILY, torch.float32, "grouped_mm", "one"))


def plain_model() -> PreTrainedModel:
    model = resident(FAMILY)
    model.set_experts_implementation("grouped_mm")
    return model


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    """Patched with a cache that holds everything."""
    model = promoe.patch(plain_model(), cache="100%", link=LinkOver(plain_link))
    yield model
    if hasattr(model, "promoe"):
        promoe.unpatch(model)


def assert_stock(model: nn.Module) -> None:
    """No class, hook or thread of ours."""
    assert not any(attach.is_patched(module) for module in model.modules())
    hooks = [
        hook for part in model.modules() for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    ]
    # Transformers leaves some of its own, once somebody asked for hidden states.
    assert not [hook for hook in hooks if "promoe" in getattr(hook, "__module__", type(hook).__module__)]
    assert "_apply" not in model.__dict__
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("promoe-")]


# -- when -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["100%", EXPERTS * EXPERT_BYTES, "1GiB"])
def test_a_cache_for_all_serves_nothing(cache: Any) -> None:
    model = promoe.patch(plain_model(), cache=cache, link=LinkOver(plain_link))
    try:
        assert isinstance(model.promoe, ResidentHandle)
        assert_stock(model)
        assert_unharmed(model)
    finally:
        promoe.unpatch(model)


@pytest.mark.parametrize(
    ("cache", "bypass"), [(EXPERTS * EXPERT_BYTES - 1, True), ("99%", True), ("100%", False), ("1GiB", False)]
)
def test_a_slot_less_or_by_choice_it_is_served(cache: Any, bypass: bool) -> None:
    settings = promoe.PromoeConfig(bypass=bypass)
    model = promoe.patch(plain_model(), cache=cache, predictor=None, link=LinkOver(plain_link), config=settings)
    try:
        assert isinstance(model.promoe, SlotHandle)
        assert model.promoe.stats().cache_slots == EXPERTS - bypass
        assert_unharmed(model)
        assert model.promoe.stats().layer_visits > 0
    finally:
        promoe.unpatch(model)


@pytest.mark.parametrize("cache", [1 * EXPERT_BYTES, "50%", "100%"])
def test_a_model_in_ram_is_used_where_it_lies_and_told_once(cache: Any) -> None:
    """Without a GPU, slots in RAM for experts in RAM gain nothing."""
    with pytest.warns(UserWarning, match=r"gain nothing.*promoe\.from_pretrained") as caught:
        model = promoe.patch(plain_model(), cache=cache)
    try:
        assert len(caught) == 1
        assert caught[0].filename == __file__
        assert isinstance(model.promoe, ResidentHandle)
        assert_stock(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_unharmed(model)
    finally:
        promoe.unpatch(model)


def test_arguments_are_checked_although_nothing_is_served() -> None:
    for arguments in ({"cache": "101%"}, {"predictor": "psychic"}, {"link": "carrier pigeon"}, {"cache": 1}):
        with pytest.raises(ConfigError):
            promoe.patch(plain_model(), **({"cache": "100%", "link": "auto"} | arguments))
    assert not hasattr(plain_model(), "promoe")


def test_a_checkpoint_whose_experts_all_fit_is_simply_loaded() -> None:
    progress: list[tuple[int, int]] = []
    model = promoe.from_pretrained(
        checkpoint(FAMILY),
        cache="100%",
        progress=lambda done_bytes, total_bytes: progress.append((done_bytes, total_bytes)),
    )
    model.set_experts_implementation("grouped_mm")
    assert isinstance(model.promoe, ResidentHandle)
    assert_stock(model)
    assert not any(is_guard(parameter) for parameter in model.parameters())
    assert_unharmed(model)
    plain = dict(stock(FAMILY).state_dict())
    assert all(torch.equal(tensor, plain[name]) for name, tensor in model.state_dict().items())
    assert model.promoe.stats().store == "memory"
    # The experts come last, layer by layer.
    assert progress[-3:] == [(layers * 8 * EXPERT_BYTES, EXPERTS * EXPERT_BYTES) for layers in (1, 2, 3)]
    promoe.unpatch(model)
    assert not hasattr(model, "promoe")
    assert_unharmed(model)


# -- the handle -------------------------------------------------------------------------------------------------


def test_counters_stay_at_zero_and_say_why(model: PreTrainedModel) -> None:
    before = model.promoe.stats()
    assert_unharmed(model)
    stats = model.promoe.stats()
    assert stats == before
    assert (stats.cache_slots, stats.cache_bytes, stats.cache_rate) == (EXPERTS, EXPERTS * EXPERT_BYTES, 1.0)
    assert stats.num_experts == (8, 8, 8)
    assert stats.expert_bytes == (EXPERT_BYTES,) * 3
    assert (stats.layer_visits, stats.bytes_demand, stats.bytes_prefetched, stats.stall_s) == (0, 0, 0, 0.0)
    assert stats.predictor is None
    assert stats.store == "host"
    assert stats.policy == "next_use"
    assert stats.link == "none: every expert is in memory and the stock forward runs"


def test_it_says_what_it_is(model: PreTrainedModel) -> None:
    assert repr(model.promoe) == "<promoe handle of Qwen2MoeForCausalLM: all experts in memory>"


def test_report_and_reset(model: PreTrainedModel) -> None:
    report = model.promoe.report()
    assert "24 slots for 24 experts (100%)" in report
    assert "every expert is in memory and the stock forward runs" in report
    assert "nan" not in report
    model.promoe.reset_stats()
    assert model.promoe.report() == report


def test_a_timeline_without_events(model: PreTrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    with model.promoe.trace(path):
        assert_unharmed(model)
    events = json.loads(path.read_text())["traceEvents"]
    assert [event["ph"] for event in events] == ["M"]
    assert events[0]["args"] == {"name": "Qwen2MoeForCausalLM"}


def test_a_timeline_that_cannot_be_written_is_refused_before_anything_runs(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    ran = False
    with pytest.raises(ConfigError, match="nowhere"), model.promoe.trace(tmp_path / "nowhere" / "t.json"):
        ran = True
    assert not ran


def test_closing_stops_nothing_that_runs(model: PreTrainedModel) -> None:
    model.promoe.close()
    model.promoe.close()
    assert_unharmed(model)


def test_config_is_what_was_asked() -> None:
    settings = promoe.PromoeConfig(eviction="lru", lookahead=7)
    model = promoe.patch(plain_model(), cache="100%", link=LinkOver(plain_link), config=settings)
    try:
        assert model.promoe.config is settings
        assert model.promoe.stats().policy == "lru"
    finally:
        promoe.unpatch(model)


def test_it_counts_as_patched_until_it_is_unpatched(model: PreTrainedModel) -> None:
    with pytest.raises(PatchStateError, match="patched already"):
        promoe.patch(model, cache="50%", link=LinkOver(plain_link))
    assert promoe.unpatch(model) is model
    assert not hasattr(model, "promoe")
    with pytest.raises(PatchStateError, match="not patched"):
        promoe.unpatch(model)
    promoe.patch(model, cache="50%", predictor=None, link=LinkOver(plain_link))
    try:
        assert isinstance(model.promoe, SlotHandle)
        assert_unharmed(model)
    finally:
        promoe.unpatch(model)
