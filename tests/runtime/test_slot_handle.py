from __future__ import annotations

import dataclasses
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from served import (
    NEW_TOKENS,
    PROMPTS,
    TOP_K,
    LinkOver,
    checkpoint,
    close,
    config,
    expected,
    greedy,
    plain_link,
    resident,
    served,
    stock,
)
from torch import nn

import promoe
from promoe.errors import ConfigError, EngineClosedError, PatchStateError
from promoe.model.passes import PassState
from promoe.runtime import prediction
from promoe.scheduler import ExpertKey
from promoe.scheduler import governor as governor_module
from promoe.scheduler.governor import ROUND_TRIALS, TRIAL_PASSES, Governor
from promoe.stats.lanes import median_token
from promoe.stats.text_report import text_report
from promoe.stats.tracing import COMPUTE, PASS, STALL, Tracer

FAMILY, LAYERS, EXPERTS = "qwen2_moe", 3, 8
SLOT_BYTES = 24576  # 2 x 32 x 64 and 64 x 32 weights of 4 bytes


def assert_unharmed(model: nn.Module, prompt: str = "one") -> None:
    greedy(model, PROMPTS[prompt]).assert_equals(expected(FAMILY, torch.float32, "grouped_mm", prompt))


def promoe_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("promoe-")]


# -- warming ----------------------------------------------------------------------------------------------------


def used(stats: promoe.Stats) -> list[tuple[int, int]]:
    """Experts by how often answers used them, most first."""
    counts = {(layer, e): n for layer, row in enumerate(stats.decode.expert_counts) for e, n in enumerate(row) if n}
    return sorted(counts, key=lambda key: (-counts[key], key))


@pytest.mark.parametrize("store", ["host", "disk"])
def test_what_was_used_before_is_there_when_the_first_prompt_comes(store: str, tmp_path: Path) -> None:
    """Without streaming, whose hits depend on how soon the next layer's experts come."""
    with served(FAMILY, cache="50%", store=store, stream=False) as model:
        assert_unharmed(model)
        before = model.promoe.stats()
    for popularity in (before, before.decode.expert_counts):
        with served(FAMILY, cache="50%", store=store, stream=False) as model:
            found = model.promoe.warm(popularity)
            slots = model.promoe.stats().cache_slots
            resident = model.promoe.runtime.engine.scheduler.resident()
            assert found == min(slots, len(used(before))) == len(resident) > 0
            assert set(resident) == set(used(before)[:slots])
            assert model.promoe.stats().bytes_demand == found * SLOT_BYTES
            assert_unharmed(model)
            assert model.promoe.stats().prefill.hits >= before.prefill.hits + 1


def test_warming_in_the_midst_evicts_nothing() -> None:
    with served(FAMILY, cache="50%", predictor="gate") as model:
        assert_unharmed(model)
        resident = model.promoe.runtime.engine.scheduler.resident()
        evictions = model.promoe.stats().evictions
        model.promoe.warm([[1] * EXPERTS] * LAYERS)
        assert set(resident) <= set(model.promoe.runtime.engine.scheduler.resident())
        assert model.promoe.stats().evictions == evictions
        assert_unharmed(model)


def test_a_static_cache_keeps_what_it_was_warmed_with() -> None:
    popular = [[EXPERTS - idx if idx < EXPERTS // 2 else 0 for idx in range(EXPERTS)]] * LAYERS
    with served(FAMILY, cache="50%", eviction="static", early_preemption=False, stream=False) as model:
        assert model.promoe.warm(popular) == LAYERS * EXPERTS // 2
        assert_unharmed(model)
        resident = {key.expert_idx for key in model.promoe.runtime.engine.scheduler.resident()}
        assert len(resident & set(range(EXPERTS // 2))) >= EXPERTS // 2 - 1


def test_what_does_not_fit_the_model_is_refused_and_nothing_is_fetched() -> None:
    with served(FAMILY, cache="50%") as model:
        with pytest.raises(ConfigError, match=f"{LAYERS} layers of {EXPERTS} experts. Got 1 layers of 2 experts"):
            model.promoe.warm([[1, 2]])
        assert model.promoe.stats().bytes_demand == 0
        model.promoe.close()
        with pytest.raises(EngineClosedError):
            model.promoe.warm([[1] * EXPERTS] * LAYERS)


def test_a_model_that_is_there_has_nothing_to_warm() -> None:
    model = resident(FAMILY)
    with pytest.warns(UserWarning, match="no GPU"):
        promoe.patch(model)
    try:
        assert model.promoe.warm([[1] * EXPERTS] * LAYERS) == LAYERS * EXPERTS
        with pytest.raises(ConfigError, match="of MoE layer 0"):
            model.promoe.warm([[-1] * EXPERTS] * LAYERS)
    finally:
        promoe.unpatch(model)


# -- another number of slots ------------------------------------------------------------------------------------


@pytest.mark.parametrize("predictor", [None, "gate"])
@pytest.mark.parametrize("store", ["host", "disk"])
def test_the_cache_may_grow_and_shrink_between_forwards(store: str, predictor: str | None) -> None:
    with served(FAMILY, cache="25%", store=store, predictor=predictor) as model:
        for cache in ("50%", 3 * SLOT_BYTES, "100%", 1 * SLOT_BYTES, "75%", "25%"):
            model.promoe.resize(cache)
            for prompt in ("one", "padded"):
                assert_unharmed(model, prompt)
        stats = model.promoe.stats()
        assert stats.cache_slots == LAYERS * EXPERTS // 4
        assert stats.cache_bytes == stats.cache_slots * SLOT_BYTES


def test_in_the_midst_of_an_answer_a_stopping_criterion_may_resize() -> None:
    sizes = iter(["75%", "25%", "100%", "50%"] * NEW_TOKENS)
    with served(FAMILY, cache="50%", predictor="gate") as model:

        def between(ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            model.promoe.resize(next(sizes))
            return torch.zeros(len(ids), dtype=torch.bool)

        found = model.generate(
            **PROMPTS["one"], max_new_tokens=NEW_TOKENS + 1, do_sample=False, stopping_criteria=[between]
        )
    wanted = resident(FAMILY).generate(**PROMPTS["one"], max_new_tokens=NEW_TOKENS + 1, do_sample=False)
    assert torch.equal(found, wanted)


def test_within_a_forward_the_cache_is_not_resized() -> None:
    refused: list[str] = []
    with served(FAMILY, cache="50%") as model:

        def hook(*args: Any) -> None:
            with pytest.raises(PatchStateError, match="cannot be resized while 1 forward") as error:
                model.promoe.resize("25%")
            refused.append(str(error.value))

        removed = model.promoe.runtime.layers[1].gate.register_forward_hook(hook)
        assert_unharmed(model)
        removed.remove()
        assert refused
        assert model.promoe.stats().cache_slots == LAYERS * EXPERTS // 2


@pytest.mark.parametrize(
    ("cache", "match"), [("auto", "Got 'auto'"), ("1KB", "at least"), ("200%", "at most 100%"), (0, "positive number")]
)
def test_sizes_that_cannot_be_are_refused(cache: Any, match: str) -> None:
    with served(FAMILY, cache="50%") as model:
        with pytest.raises(ConfigError, match=match):
            model.promoe.resize(cache)
        assert_unharmed(model)


def test_slots_per_layer_stay_slots_per_layer() -> None:
    with served(FAMILY, cache="3 per layer", eviction="lru") as model:
        assert model.promoe.stats().cache_slots == LAYERS * 3
        for cache, slots in (("2 per layer", 2), ("5 per layer", 5), (f"{EXPERTS + 1} per layer", EXPERTS)):
            model.promoe.resize(cache)
            assert model.promoe.stats().cache_slots == LAYERS * slots
            assert_unharmed(model)
        with pytest.raises(ConfigError, match=r"each layer has slots of its own.*Give slots for each layer.*Got '50%'"):
            model.promoe.resize("50%")
    with served(FAMILY, cache="50%") as model:
        with pytest.raises(ConfigError, match=r"layers share their slots.*Give a size or a share.*Got '2 per layer'"):
            model.promoe.resize("2 per layer")
        assert_unharmed(model)


def test_slots_of_every_layer_are_warmed() -> None:
    with served(FAMILY, cache="2 per layer") as model:
        assert model.promoe.warm([[1.0] * EXPERTS] * LAYERS) == 2 * LAYERS
        resident_layers = [key.layer_idx for key in model.promoe.runtime.engine.scheduler.resident()]
        assert Counter(resident_layers) == dict.fromkeys(range(LAYERS), 2)
        assert_unharmed(model)


@pytest.mark.parametrize("eviction", ["lru", "lfru", "static", "next_use"])
def test_every_policy_prefetches_into_slots_of_the_layer(eviction: str) -> None:
    with served(FAMILY, cache="4 per layer", predictor="gate", eviction=eviction, waste_share=1.0) as model:
        for prompt in ("one", "padded", "short"):
            assert_unharmed(model, prompt)


def test_a_layer_with_slots_of_its_own_loses_none_to_others() -> None:
    """With as many slots as a token needs, the next token finds what the last one used."""
    with served(FAMILY, cache=f"{TOP_K} per layer", eviction="lru") as model:
        ids = PROMPTS["one"]["input_ids"][:, :1]
        with torch.no_grad():
            model(ids)
            model.promoe.reset_stats()
            model(ids)
        stats = model.promoe.stats()
    assert stats.evictions == 0
    assert stats.decode.hit_rate == 1.0


def test_where_there_is_no_cache_there_is_nothing_to_resize() -> None:
    model = resident(FAMILY)
    with pytest.warns(UserWarning, match="no GPU"):
        promoe.patch(model)
    try:
        with pytest.raises(PatchStateError, match="no cache to resize"):
            model.promoe.resize("25%")
    finally:
        promoe.unpatch(model)


# -- counters ---------------------------------------------------------------------------------------------------


def test_before_any_pass_there_is_only_the_set_up() -> None:
    with served(FAMILY, cache="50%", predictor="gate", eviction="lru") as model:
        stats = model.promoe.stats()
    assert stats.num_experts == (EXPERTS,) * LAYERS
    assert stats.expert_bytes == (SLOT_BYTES,) * LAYERS
    assert stats.cache_slots == LAYERS * EXPERTS // 2
    assert stats.cache_bytes == stats.cache_slots * SLOT_BYTES
    assert stats.cache_rate == 0.5
    assert (stats.policy, stats.predictor, stats.store) == ("lru", "gate", "HostStore")
    assert stats.link
    assert (stats.layer_visits, stats.bytes_demand, stats.evictions, stats.stall_s) == (0, 0, 0, 0.0)
    assert stats.hit_rate != stats.hit_rate  # nan


@pytest.mark.parametrize("cache", [2, "50%"])
def test_without_prefetch_every_miss_is_fetched_once(cache: Any) -> None:
    """Conservation: needed = hits + fetched; fetched = evicted + still there."""
    with served(FAMILY, cache=cache, stream=False) as model:
        assert_unharmed(model)
        stats = model.promoe.stats()
        resident = len(model.promoe.runtime.engine.scheduler.resident())
    total = stats.total
    assert stats.layer_visits == LAYERS * (1 + NEW_TOKENS)
    assert stats.prefill.layer_visits == LAYERS
    assert (stats.prefill.tokens, stats.decode.tokens) == (12, NEW_TOKENS)
    assert total.needed == sum(sum(counts) for phase in (stats.prefill, stats.decode) for counts in phase.expert_counts)
    assert (total.hits > 0) == (cache == "50%")
    assert 0 <= total.hits <= total.ready <= total.needed
    assert stats.bytes_demand == (total.needed - total.hits) * SLOT_BYTES
    assert stats.bytes_prefetched == stats.bytes_wasted == 0
    assert stats.evictions == stats.bytes_demand // SLOT_BYTES - resident
    assert resident <= stats.cache_slots
    assert stats.prefetch_on_share == 0.0
    assert (total.failures_demand, total.stale_completions, total.passes_aborted) == (0, 0, 0)


def test_the_heat_map_is_what_the_gates_chose() -> None:
    wanted: list[Counter[int]] = [Counter() for _ in range(LAYERS)]
    with served(FAMILY, cache="50%") as model:
        hooks = [
            layer.gate.register_forward_hook(
                lambda gate, args, output, idx=layer.layer_idx: wanted[idx].update(set(output[2].flatten().tolist()))
            )
            for layer in model.promoe.runtime.layers
        ]
        assert_unharmed(model)
        for hook in hooks:
            hook.remove()
        total = model.promoe.stats().total
    assert total.expert_counts == tuple(tuple(counts[e] for e in range(EXPERTS)) for counts in wanted)


def test_stats_are_a_frozen_copy() -> None:
    with served(FAMILY, cache=2) as model:
        assert_unharmed(model)
        before = model.promoe.stats()
        visits = before.layer_visits
        assert_unharmed(model)
        assert before.layer_visits == visits
        assert model.promoe.stats().layer_visits == 2 * visits
        assert model.promoe.stats() == model.promoe.stats()
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.cache_slots = 3
    assert promoe.Stats.from_json(json.loads(json.dumps(before.to_json()))) == before


def test_resetting_counts_from_zero_and_keeps_the_cache() -> None:
    with served(FAMILY, cache="50%", predictor="gate") as model:
        handle = model.promoe
        assert_unharmed(model)
        resident = handle.runtime.engine.scheduler.resident()
        step = handle.runtime.engine.scheduler.step
        handle.reset_stats()
        stats = handle.stats()
        assert (stats.layer_visits, stats.bytes_demand, stats.total.passes) == (0, 0, 0)
        assert set(resident) <= set(handle.runtime.engine.scheduler.resident())
        assert handle.runtime.engine.scheduler.step == step
        assert_unharmed(model)
        stats = handle.stats()
        assert stats.layer_visits == LAYERS * (1 + NEW_TOKENS)
        assert stats.prefetch_on_share == 1.0  # still switched on


def test_a_file_store_and_its_link_are_named() -> None:
    with served(FAMILY, store="file", cache=2, link="auto", read_mode="page_cache", bypass=True) as model:
        stats = model.promoe.stats()
        assert stats.store == "FileStore"
        assert "page cache" in stats.link
        assert_unharmed(model)


def test_repr_says_model_and_slots() -> None:
    with served(FAMILY, cache=5) as model:
        assert repr(model.promoe) == "<promoe handle of Qwen2MoeForCausalLM: 5 slots>"


def test_config_is_what_was_asked() -> None:
    settings = config(lookahead=2, eviction="lfru")
    model = promoe.patch(resident(FAMILY), cache="50%", link=LinkOver(plain_link), config=settings)
    try:
        assert model.promoe.config is settings
        assert model.promoe.stats().policy == "lfru"
    finally:
        promoe.unpatch(model)


class Psychic:
    """Not quick: predicts in a thread of its own."""

    def predict(self, visit: Any) -> list[Any]:
        return []


def test_a_predictor_of_ones_own_is_named_by_its_class() -> None:
    with served(FAMILY, cache=2, predictor=Psychic()) as model:
        assert model.promoe.stats().predictor == "Psychic"
    with served(FAMILY, cache=2) as model:
        assert model.promoe.stats().predictor is None


# -- report -----------------------------------------------------------------------------------------------------


def test_the_report_is_that_of_the_counters() -> None:
    with served(FAMILY, cache="25%", predictor="previous") as model:
        assert_unharmed(model)
        model.promoe.runtime.forecaster.drain()
        report = model.promoe.report()
        stats = model.promoe.stats()
    assert isinstance(report, str)
    assert stats.summary() in report
    assert report == text_report(stats)
    assert "6 slots for 24 experts (25.0%)" in report
    assert "policy next_use, predictor previous" in report


# -- timeline ---------------------------------------------------------------------------------------------------


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def test_a_timeline_covers_the_context_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    with served(FAMILY, cache=2) as model:
        assert_unharmed(model)
        model.promoe.reset_stats()
        with model.promoe.trace(path) as tracer:
            assert isinstance(tracer, Tracer)
            assert not path.exists()
            assert_unharmed(model)
        stats = model.promoe.stats()
        assert_unharmed(model)
        assert model.promoe.runtime.engine.tracer is None
    spans = [event for event in events(path) if event["ph"] == "X"]
    computed = [event for event in spans if event["cat"] == COMPUTE]
    assert [event["name"] for event in computed] == ["experts L0", "experts L1", "experts L2"] * (1 + NEW_TOKENS)
    assert sum(event["args"]["experts"] for event in computed) == stats.total.needed
    assert [event["args"]["tokens"] for event in computed] == [12] * LAYERS + [1] * LAYERS * NEW_TOKENS
    passes = [event["args"] for event in spans if event["cat"] == PASS]
    assert passes == [{"phase": "prefill", "tokens": 12}, *[{"phase": "decode", "tokens": 1}] * NEW_TOKENS]
    waited_us = sum(event["dur"] for event in spans if event["cat"] == STALL)
    assert waited_us == pytest.approx(1e6 * stats.total.stall_s, rel=1e-3)
    moved = [event for event in spans if event["cat"] == "link"]
    assert sum(event["args"]["nbytes"] for event in moved) == stats.bytes_demand
    assert all(event["name"].startswith("demand L") for event in moved)
    assert {"name": "Qwen2MoeForCausalLM"} in [event["args"] for event in events(path)]


def test_without_a_file_the_latest_passes_are_there_to_look_at(tmp_path: Path) -> None:
    with served(FAMILY, cache=2) as model:
        with model.promoe.trace() as tracer:
            assert_unharmed(model)
        assert model.promoe.runtime.engine.tracer is None
    token = median_token(tracer.spans())
    assert token is not None
    assert (token.phase, token.num_tokens) == ("decode", 1)
    assert [visit.layer for visit in token.visits] == list(range(LAYERS))
    assert list(tmp_path.iterdir()) == []


def test_a_timeline_survives_an_exception_in_its_context(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    with served(FAMILY, cache=2) as model:

        def interrupted() -> None:
            with model.promoe.trace(path):
                assert_unharmed(model)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert model.promoe.runtime.engine.tracer is None
        assert any(event["name"] == "experts L0" for event in events(path))
        with model.promoe.trace(path):
            pass
    assert not any(event["name"] == "experts L0" for event in events(path))


def test_one_timeline_at_a_time(tmp_path: Path) -> None:
    with served(FAMILY, cache=2) as model, model.promoe.trace(tmp_path / "one.json") as tracer:
        with (
            pytest.raises(PatchStateError, match=r"recorded already\. End that one first"),
            model.promoe.trace(tmp_path / "two.json"),
        ):
            pass
        assert model.promoe.runtime.engine.tracer is tracer
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"]


def test_a_timeline_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    ran = False
    with served(FAMILY, cache=2) as model:
        with pytest.raises(ConfigError, match=r"nowhere"), model.promoe.trace(tmp_path / "nowhere" / "t.json"):
            ran = True
        assert model.promoe.runtime.engine.tracer is None
    assert not ran


# -- the end ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("predictor", "spare_core", "threads"),
    [(None, True, 2), ("gate", False, 2), ("gate", True, 3), (Psychic(), False, 3)],
)
def test_closing_stops_all_threads_and_refuses_forwards(
    predictor: Any, spare_core: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction, "has_spare_core", lambda: spare_core)
    with served(FAMILY, cache="50%", predictor=predictor) as model:
        assert len(promoe_threads()) == threads
        assert_unharmed(model)
        visits = model.promoe.stats().layer_visits
        for _ in range(2):
            model.promoe.close()
            assert promoe_threads() == []
        with pytest.raises(EngineClosedError, match=r"engine was closed.*promoe\.unpatch"):
            greedy(model, PROMPTS["one"])
        stats = model.promoe.stats()
        assert stats.layer_visits == visits
        assert stats.prefill.passes_aborted == 1
        assert model.promoe.report()
    assert not hasattr(resident(FAMILY), "promoe")
    assert_unharmed(resident(FAMILY))


def test_detaching_a_file_store_reads_the_experts_and_closes_it() -> None:
    model = promoe.from_pretrained(checkpoint(FAMILY), cache=2 * SLOT_BYTES, predictor=None, config=config())
    model.set_experts_implementation("grouped_mm")
    store = model.promoe._store
    assert promoe.unpatch(model) is model
    assert promoe_threads() == []
    assert not hasattr(model, "promoe")
    plain = dict(stock(FAMILY).state_dict())
    assert all(torch.equal(tensor, plain[name]) for name, tensor in model.state_dict().items())
    assert_unharmed(model)
    chunk = store.chunks(ExpertKey(0, 0))[0]
    with pytest.raises(OSError, match="closed"):
        store.read(chunk, memoryview(bytearray(chunk.source_nbytes)))


def test_a_stall_limit_may_be_infinite() -> None:
    """Who debugs a slow source has no limit in mind; closing must not trip over it."""
    settings = config(stall_timeout_s=float("inf"))
    model = promoe.patch(
        stock(FAMILY), cache=2 * SLOT_BYTES, predictor=None, link=LinkOver(plain_link), config=settings
    )
    model.set_experts_implementation("grouped_mm")
    try:
        assert_unharmed(model)
    finally:
        promoe.unpatch(model)
    assert promoe_threads() == []


# -- the governor -----------------------------------------------------------------------------------------------


class Scripted(Governor):
    """Answers what the script says; notes what it was told."""

    def __init__(self, script: list[bool], lock: Any) -> None:
        super().__init__()
        self.script, self.lock = script, lock
        self.durations_s: list[float] = []
        self.stalls_s: list[float] = []
        self.fetched_bytes: list[float] = []

    def pass_ended(self, duration_s: float, stall_s: float, fetched_bytes: float) -> bool:
        self.stalls_s.append(stall_s)
        self.fetched_bytes.append(fetched_bytes)
        assert self.lock._is_owned(), "several threads may run passes: the governor counts under the engine's lock"
        self.durations_s.append(duration_s)
        return self.script.pop(0)


def test_the_governor_judges_decode_passes_and_switches_prefetch() -> None:
    with served(FAMILY, cache="50%", predictor="gate", governor=True) as model:
        handle = model.promoe
        engine = handle.runtime.engine
        script = [True, False, False, True]
        governor = handle._governor = Scripted(script, engine.lock)
        withdrawn: list[bool] = []
        withdraw = engine.scheduler.withdraw_forecasts
        engine.scheduler.withdraw_forecasts = lambda: withdrawn.append(engine.lock._is_owned()) or withdraw()
        on = []
        for duration_s in (0.1, 0.2, 0.3, 0.4):
            handle.pass_ended(PassState(phase="prefill"), 9.0)
            handle.pass_ended(PassState(phase="decode"), duration_s)
            on.append(engine.scheduler.prefetch_on)
        assert on == [True, False, False, True]
        assert governor.durations_s == [0.1, 0.2, 0.3, 0.4]
        assert withdrawn == [True]  # once, under the lock
        assert handle.stats().total.prefetch_switches == 1 + 2  # on at first, then off, then on
        script += [False, True] * NEW_TOKENS
        assert_unharmed(model)
        assert len(governor.durations_s) == 4 + NEW_TOKENS
        decode = handle.stats().decode
        assert sum(governor.stalls_s) == pytest.approx(decode.stall_s)
        assert sum(governor.fetched_bytes) == decode.bytes_demand + decode.bytes_prefetch_used > 0
        handle.reset_stats()
        script += [False, True] * NEW_TOKENS
        assert_unharmed(model)
        assert min(governor.stalls_s) >= 0.0
        decode = handle.stats().decode  # since the reset, all of it
        assert sum(governor.fetched_bytes[-NEW_TOKENS:]) == decode.bytes_demand + decode.bytes_prefetch_used


def test_a_pass_after_one_that_failed_is_not_judged() -> None:
    """What the other fetched, and waited for, is not its own."""
    with served(FAMILY, cache="50%", predictor="gate", governor=True) as model:
        handle = model.promoe
        governor = handle._governor = Scripted([True] * 3 * NEW_TOKENS, handle.runtime.engine.lock)
        ids = PROMPTS["short"]["input_ids"][:, :1]
        layer = promoe.find_moe_layers(model)[2]

        def failing(*args: Any) -> None:
            raise RuntimeError("injected")

        with torch.inference_mode():
            hook = layer.gate.register_forward_pre_hook(failing)
            with pytest.raises(RuntimeError, match="injected"):
                model(ids)
            hook.remove()
            before = handle.stats().decode
            assert before.passes_aborted == 1
            assert before.bytes_demand > 0
            model(ids)
            assert governor.fetched_bytes == []
            again = handle.stats().decode
            model(ids + 1)
            decode = handle.stats().decode
        fetched = [stats.bytes_demand + stats.bytes_prefetch_used for stats in (again, decode)]
        assert governor.fetched_bytes == [fetched[1] - fetched[0]]


def test_trials_run_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        governor_module, "LEAST_STALL_SHARE", 0.0
    )  # with experts this small hardly anything is waited for
    with served(FAMILY, cache="50%", predictor="gate", governor=True) as model:
        handle = model.promoe
        on = []
        for _ in range(ROUND_TRIALS * TRIAL_PASSES // NEW_TOKENS):
            assert_unharmed(model)
            on.append(handle.runtime.engine.scheduler.prefetch_on)
        assert not all(on)
        assert any(on)
        share = handle.stats().decode.prefetch_on_share
    assert 0.4 < share < 0.6


@pytest.mark.parametrize(("predictor", "governor"), [(None, True), ("gate", False)])
def test_without_predictor_or_by_choice_nobody_judges(predictor: str | None, governor: bool) -> None:
    with served(FAMILY, cache="50%", predictor=predictor, governor=governor) as model:
        assert model.promoe._governor is None
        for _ in range(2 * TRIAL_PASSES // NEW_TOKENS + 1):
            assert_unharmed(model)
        assert model.promoe.stats().prefetch_on_share == (predictor is not None)


def test_closing_a_model_from_files_leaves_nothing_running() -> None:
    model = promoe.from_pretrained(checkpoint(FAMILY), cache=2 * SLOT_BYTES, config=config())
    assert promoe_threads()
    close(model)
    assert promoe_threads() == []
