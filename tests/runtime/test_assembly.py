"""From arguments to parts: what is chosen, and that every setting reaches the part that it is meant for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import FakeDevice
from served import checkpoint, config
from tiny_models import build
from transformers import PreTrainedModel

import promoe
from promoe import EmulatedLink, PromoeConfig
from promoe.errors import ConfigError
from promoe.model import attach
from promoe.model.opening import OpenedModel, open_without_experts
from promoe.predictors import KINDS
from promoe.predictors.gate import GatePredictor
from promoe.runtime import assembly
from promoe.runtime.assembly import (
    Parts,
    assemble,
    open_link,
    predictor_context,
    resolve_predictor,
    scheduler_config,
)
from promoe.runtime.sizes import plan_pools
from promoe.scheduler.reuse import START_WEIGHTS, LearnedReuse
from promoe.stores import HostStore
from promoe.transfer.links import FileLink, HostLink
from promoe.transfer.links.pinned import PinnedLink
from promoe.transfer.links.pinned_cache import CachedLink

START = np.array(START_WEIGHTS, dtype=np.float32)
LINK = EmulatedLink(bandwidth_bytes_per_s=1e12)


@pytest.fixture
def model() -> PreTrainedModel:
    return build("qwen2_moe", top_k=3)


@pytest.fixture
def opened() -> Iterator[OpenedModel]:
    opened = open_without_experts(checkpoint("qwen2_moe"))
    yield opened
    opened.store.close()


def parts_of(model: PreTrainedModel, cache: str = "25%", predictor: Any = None, **fields: Any) -> Parts:
    layers, settings = promoe.find_moe_layers(model), config(**fields)
    store = HostStore([layer.rows() for layer in layers], settings.longest_chunk())
    plans = plan_pools(cache, store.layouts, store.num_experts)
    chosen, name = resolve_predictor(predictor, layers, settings)
    return Parts(layers, store, plans, settings, chosen, name)


# -- predictors -------------------------------------------------------------------------------------------------


class OwnPredictor:
    def predict(self, visit: Any) -> list[Any]:
        return []


def test_a_predictor_by_name_by_object_or_none(model: PreTrainedModel) -> None:
    layers, own = promoe.find_moe_layers(model), OwnPredictor()
    assert resolve_predictor(None, layers, PromoeConfig()) == (None, None)
    assert resolve_predictor(own, layers, PromoeConfig()) == (own, "OwnPredictor")
    for kind, made in KINDS.items():
        predictor, name = resolve_predictor(kind, layers, PromoeConfig())
        assert (type(predictor), name) == (made, kind)
    chosen, _ = resolve_predictor("gate", layers, PromoeConfig(lookahead=2))
    assert isinstance(chosen, GatePredictor)
    assert chosen._lookahead == 2


def test_what_predictors_know_of_a_model(model: PreTrainedModel) -> None:
    layers = promoe.find_moe_layers(model)
    context = predictor_context(layers)
    assert [gate is layer.gate for gate, layer in zip(context.gates, layers, strict=True)] == [True] * 3
    assert (list(context.num_experts), list(context.top_k)) == ([8] * 3, [3] * 3)


# -- links ------------------------------------------------------------------------------------------------------


def test_links_over_experts_in_ram(model: PreTrainedModel) -> None:
    parts = parts_of(model, workers=3)
    for choice in ("auto", "host"):
        link = open_link(choice, parts)
        assert (type(link), link.workers) == (HostLink, 3)
        link.close()
    emulated = open_link(LINK, parts)
    assert "emulated" in emulated.describe()
    emulated.close()


def test_links_over_experts_in_files(model: PreTrainedModel, opened: OpenedModel) -> None:
    parts = replace(parts_of(model, workers=3, read_mode="page_cache"), store=opened.store)
    for choice in ("auto", "file"):
        link = open_link(choice, parts)
        assert (type(link), link.workers) == (FileLink, 3)
        assert "page cache" in link.describe()
        link.close()
    emulated = open_link(LINK, parts)
    assert "emulated" in emulated.describe()
    emulated.close()


def test_links_to_a_device(model: PreTrainedModel, opened: OpenedModel) -> None:
    in_ram = replace(parts_of(model, workers=3), device=FakeDevice())
    link = open_link("auto", in_ram)
    assert (type(link), link.workers) == (PinnedLink, 1), "one thread keeps two copies in flight"
    assert "pinned memory to fake device" in link.describe()
    link.close()
    in_files = replace(in_ram, store=opened.store)
    link = open_link("auto", in_files)
    assert (type(link), link.workers) == (CachedLink, 3), "so many threads read"
    assert "of pinned RAM (" in link.describe()
    link.close()
    link = open_link("auto", replace(in_files, config=replace(in_files.config, pinned_bytes=0)))
    assert "of pinned RAM (6 of 24 experts) to fake device" in link.describe(), "two per worker"
    link.close()


def test_a_file_link_is_told_what_the_slots_will_take(
    model: PreTrainedModel, opened: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []

    def file_link(*args: Any, planned_bytes: int) -> HostLink:
        told.append(planned_bytes)
        return HostLink(args[0], 1)

    monkeypatch.setattr(assembly, "FileLink", file_link)
    plans = plan_pools("25%", opened.store.layouts, opened.store.num_experts)
    handle = assemble(
        opened.model, Parts(opened.layers, opened.store, plans, config(), None, None), "auto", lambda: None
    )
    assert told == [sum(plan.nbytes for plan in plans)] == [handle.stats().cache_bytes]
    handle.detach(opened.model)


# -- settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "theirs"),
    [
        ("eviction", "lfru", "eviction"),
        ("reorder", False, "reorder"),
        ("early_preemption", False, "hints"),
        ("min_probability", 0.25, "min_probability"),
        ("strict", False, "strict"),
    ],
)
def test_every_setting_reaches_the_scheduler(model: PreTrainedModel, field: str, value: Any, theirs: str) -> None:
    other, default = scheduler_config(parts_of(model, **{field: value})), scheduler_config(parts_of(model))
    assert getattr(other, theirs) == value != getattr(default, theirs)
    for name in ("num_experts", "chunk_bytes", "pools", "expert_bytes", "prefetch"):
        assert getattr(other, name) == getattr(default, name)


def test_sizes_reach_the_scheduler(model: PreTrainedModel) -> None:
    settings = scheduler_config(parts_of(model, chunk_bytes=8192))
    assert list(settings.num_experts) == [8] * 3
    assert settings.chunk_bytes == [(8192, 8192, 8192)] * 3  # 16 KiB of gate and up, 8 KiB of down
    assert [(pool.num_slots, pool.layers) for pool in settings.pools] == [(6, (0, 1, 2))]
    assert not settings.prefetch
    assert scheduler_config(parts_of(model, predictor="gate")).prefetch


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"min_group_bytes": 0}, 2),  # gate and up
        ({"min_group_bytes": 16384}, 2),
        ({"min_group_bytes": 16385}, 0),  # not worth a group of its own
        ({"min_group_bytes": 0, "begin_early": False}, 0),
        ({"min_group_bytes": 0, "chunk_bytes": 4096}, 4),
    ],
)
def test_an_expert_can_be_begun_without_the_chunks_of_its_last_product(
    model: PreTrainedModel, fields: dict[str, Any], expected: int
) -> None:
    settings = scheduler_config(parts_of(model, **({"chunk_bytes": 8192} | fields)))
    assert list(settings.first_chunks) == [expected] * 3


def test_workers_timeout_and_chunks_reach_the_engine(model: PreTrainedModel) -> None:
    settings = config(workers=3, stall_timeout_s=7.5, chunk_bytes=4096)
    promoe.patch(model, cache="25%", link="host", config=settings)
    engine = model.promoe.runtime.engine
    assert (len(engine._threads), engine.stall_timeout_s) == (3, 7.5)
    assert {len(chunks) for chunks in engine.scheduler.config.chunk_bytes} == {6}
    assert model.promoe.config is settings
    promoe.unpatch(model)
    assert not any(thread.is_alive() for thread in engine._threads)


@pytest.mark.parametrize(
    ("predictor", "governor", "governed"),
    [("gate", True, True), ("gate", False, False), (None, True, False)],
)
def test_prefetch_is_governed_only_where_there_is_some(
    model: PreTrainedModel, predictor: str | None, governor: bool, governed: bool
) -> None:
    promoe.patch(model, cache="25%", link=LINK, predictor=predictor, config=config(governor=governor))
    assert (model.promoe._governor is not None) == governed
    assert (model.promoe.runtime.forecaster is not None) == (predictor is not None)
    assert model.promoe.stats().predictor == predictor
    promoe.unpatch(model)


def test_restore_runs_before_anything_is_detached(model: PreTrainedModel) -> None:
    """And where it fails, the model stays patched and works."""
    calls: list[bool] = []

    def restore() -> None:
        calls.append(any(attach.is_patched(module) for module in model.modules()))
        if len(calls) == 1:
            raise ConfigError("not yet")

    handle = assemble(model, parts_of(model), LINK, restore)
    with pytest.raises(ConfigError, match="not yet"):
        promoe.unpatch(model)
    assert model.promoe is handle
    with torch.inference_mode():
        assert model(torch.tensor([[3, 4]])).logits.isfinite().all()
    promoe.unpatch(model)
    assert calls == [True, True]
    assert not hasattr(model, "promoe")


def test_the_reuse_prior_starts_from_what_came_with_the_predictor(model: PreTrainedModel) -> None:
    layers = promoe.find_moe_layers(model)
    shape = (len(layers), layers[0].num_experts, layers[0].num_experts)
    learned = LearnedReuse(np.array([0.1, 0.2, 0.3, 0.4], dtype=np.float32), np.full(shape, 0.5, dtype=np.float32))
    predictor = OwnPredictor()
    predictor.reuse = learned  # type: ignore[attr-defined]
    for chosen, expected in ((predictor, learned), (OwnPredictor(), None)):
        promoe.patch(model, cache="40%", predictor=chosen, link=LINK, config=config())
        found = model.promoe.runtime.engine.scheduler._prior.learned()
        np.testing.assert_array_equal(found.weights, START if expected is None else expected.weights)
        np.testing.assert_array_equal(found.associations, 0.0 if expected is None else expected.associations)
        promoe.unpatch(model)
