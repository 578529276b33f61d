"""The hot path: what a gate announces, what an experts' forward asks for, what is counted, and what a pass must do."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from served import (
    NEW_TOKENS,
    PROMPTS,
    TOP_K,
    LinkOver,
    check_integrity,
    delayed,
    expected,
    greedy,
    plain_link,
    served,
    stock,
)
from tiny_models import IMPLEMENTATIONS, left_padded
from torch import nn
from waiting import WAIT_S
from zoo import families

import promoe
from promoe.errors import EngineClosedError, PromoeError
from promoe.experts import layer_call
from promoe.experts.kernels import row_kernel
from promoe.experts.moe_layers import MoELayer
from promoe.experts.routed_ids import MAX_LISTED_IDS
from promoe.predictors import Forecast, LayerVisit
from promoe.runtime import hot_path
from promoe.runtime.prediction import Forecaster
from promoe.stores import Store
from promoe.transfer.engine.visit import EngineVisit
from promoe.transfer.links import FaultyLink
from promoe.transfer.links.faults import Fault

FAMILY, LAYERS, EXPERT_BYTES = "qwen2_moe", 3, 24576
ONE_WORKER = LinkOver(lambda store: plain_link(store, 1))


class NoForecast:
    """A predictor that is not `quick`: it has a thread of its own."""

    def predict(self, visit: LayerVisit) -> list[Forecast]:
        return []


def assert_works(model: nn.Module, prompt: str = "one") -> None:
    greedy(model, PROMPTS[prompt]).assert_equals(expected(FAMILY, torch.float32, "grouped_mm", prompt))


def scheduler_calls(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, list[int]]]:
    """From now on (operation, layer, experts) of each hint and each visit."""
    engine = model.promoe.runtime.engine
    calls: list[tuple[str, int, list[int]]] = []

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(layer_idx: int, ids: Any, *args: Any) -> Any:
            calls.append((name, layer_idx, list(ids)))
            return original(layer_idx, ids, *args)

        return call

    for name in ("hint", "visit"):
        monkeypatch.setattr(engine, name, noting(name, getattr(engine, name)))
    return calls


# -- ids --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prompts_too_long_for_lists_are_bit_identical(implementation: str, dtype: torch.dtype) -> None:
    prompt = left_padded((60, 33, 7), seed=5)
    assert prompt["input_ids"].numel() * TOP_K > MAX_LISTED_IDS
    plain = stock(FAMILY, dtype)
    plain.set_experts_implementation(implementation)
    wanted = greedy(plain, prompt, new_tokens=1)
    for cache in (2, "50%", "100%"):
        with served(FAMILY, dtype, implementation, cache=cache, predictor="gate") as model:
            greedy(model, prompt, new_tokens=1).assert_equals(wanted)


# -- hints and visits -------------------------------------------------------------------------------------------


def test_each_layer_is_hinted_then_visited_with_the_same_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(FAMILY, cache="25%") as model:
        calls = scheduler_calls(model, monkeypatch)
        assert_works(model)
        assert len(calls) == 2 * LAYERS * (1 + NEW_TOKENS)
        for turn, (hint, visit) in enumerate(zip(calls[::2], calls[1::2], strict=True)):
            assert (hint[0], visit[0]) == ("hint", "visit")
            assert hint[1:] == visit[1:]
            assert hint[1] == turn % LAYERS
            assert len(hint[2]) == len(set(hint[2]))
        assert all(len(experts) == TOP_K for _, _, experts in calls[2 * LAYERS :])  # decode: one token


def test_without_a_gates_ids_the_visit_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that hides the ids from the tap costs the hint, nothing else."""
    with served(FAMILY, cache="25%") as model:
        monkeypatch.setattr(MoELayer, "chosen", lambda layer, output: None)
        calls = scheduler_calls(model, monkeypatch)
        assert_works(model)
        assert {name for name, _, _ in calls} == {"visit"}
        assert model.promoe.stats().layer_visits == LAYERS * (1 + NEW_TOKENS)


def test_ids_that_differ_from_the_announced_are_visited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index that the experts get is the authority."""
    with served(FAMILY, cache="50%") as model:
        layer = promoe.find_moe_layers(model)[0]
        rotated = layer.experts.register_forward_pre_hook(lambda _, args: (args[0], (args[1] + 3) % 8, args[2]))
        calls = scheduler_calls(model, monkeypatch)
        greedy(model, PROMPTS["short"], new_tokens=0)
        rotated.remove()
        announced, visited = calls[0][2], calls[1][2]
        assert sorted(visited) == sorted((expert_idx + 3) % 8 for expert_idx in announced)
        assert_works(model)


def test_hits_are_those_at_gate_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hint that has arrived by the time of the visit was a miss all the same."""
    with served(FAMILY, cache="100%", link=ONE_WORKER, stream=False) as model:
        engine = model.promoe.runtime.engine
        original = engine.visit

        def late(*args: Any) -> Any:
            deadline = threading.Event()
            while not all(engine.scheduler.is_resident(args[0], expert_idx) for expert_idx in args[1]):
                deadline.wait(0.0005)
            return original(*args)

        monkeypatch.setattr(engine, "visit", late)
        assert_works(model)
        total = model.promoe.stats().total
        assert total.ready == total.needed
        assert total.hits == total.needed - total.bytes_demand // EXPERT_BYTES < total.needed
        assert total.stall_s == 0.0


# -- when a predictor's thread begins -----------------------------------------------------------------------------


def decode_events(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Of each layer visit of three tokens: what happens from its beginning on, each kind once."""
    events: list[str] = []

    def noting(event: str, owner: Any, name: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: events.append(event) or original(*args, **kwargs))

    noting("begin", hot_path, "LayerCall")
    noting("wait", EngineVisit, "_wait")
    noting("plan", layer_call, "Pairs")
    noting("compute", torch, "bmm")
    noting("compute", nn.functional, "linear")
    noting("compute", row_kernel, "product")
    noting("predict", model.promoe.runtime.forecaster, "visit")
    greedy(model, PROMPTS["one"])
    visits: list[list[str]] = []
    for event in events:
        if event == "begin":
            visits.append([])
        elif visits and (event == "predict" or event not in visits[-1]):
            visits[-1].append(event)
    return visits[LAYERS:]  # no prediction is made from a prompt that long


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_prediction_begins_when_products_come_next(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, its thread and the forward would take the interpreter from each other."""
    with served(FAMILY, implementation=implementation, cache="100%", predictor=NoForecast()) as model:
        greedy(model, PROMPTS["one"])  # everything is there from now on
        monkeypatch.setattr(Forecaster, "of_use", True)
        visits = decode_events(model, monkeypatch)
    assert len(visits) == LAYERS * NEW_TOKENS
    planned = ["plan"] if implementation == "grouped_mm" else []
    assert visits == [[*planned, "predict", "compute"]] * len(visits)


@pytest.mark.parametrize("cache", [TOP_K, "50%"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_prediction_begins_before_the_forward_waits(
    implementation: str, cache: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, predictor = torch.bfloat16, NoForecast()  # in bfloat16 groups run one by one
    links: list[FaultyLink] = []

    def stuck(store: Store) -> FaultyLink:
        links.append(FaultyLink(plain_link(store), lambda number, chunk: Fault("stuck")))
        return links[0]

    with served(FAMILY, half, implementation, cache=cache, predictor=predictor, link=LinkOver(stuck)) as model:
        # Nothing comes before a layer waits.
        wait, close = EngineVisit._wait, EngineVisit.close
        monkeypatch.setattr(EngineVisit, "_wait", lambda *args: links[0].release.set() or wait(*args))
        monkeypatch.setattr(EngineVisit, "close", lambda *args, **kw: (close(*args, **kw), links[0].release.clear()))
        try:
            visits = decode_events(model, monkeypatch)
        finally:
            links[0].mend()
    assert len(visits) == LAYERS * NEW_TOKENS
    assert any("wait" in visit for visit in visits)
    for visit in visits:
        first = next(event for event in visit if event != "plan")
        assert first == "predict"
        assert visit.count("predict") == 1


# -- what is counted --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["host", "file"])
def test_counters_of_a_run_without_prefetch(store: str) -> None:
    with served(FAMILY, cache="100%", store=store, link=ONE_WORKER, stream=False) as model:
        assert_works(model, "padded")
        stats = model.promoe.stats()
        assert (stats.prefill.passes, stats.decode.passes) == (1, NEW_TOKENS)
        assert (stats.prefill.layer_visits, stats.decode.layer_visits) == (LAYERS, LAYERS * NEW_TOKENS)
        assert stats.prefill.tokens == int(PROMPTS["padded"]["attention_mask"].sum())
        assert stats.decode.tokens == 3 * NEW_TOKENS
        # With a slot for each expert, every one that was ever needed was fetched once, on demand, and none left.
        engine = model.promoe.runtime.engine
        assert stats.bytes_demand == len(list(engine.scheduler.resident())) * EXPERT_BYTES
        assert stats.total.needed - stats.total.hits == stats.bytes_demand // EXPERT_BYTES
        assert (stats.bytes_prefetched, stats.bytes_wasted, stats.evictions) == (0, 0, 0)
        model.promoe.reset_stats()
        assert_works(model, "padded")
        again = model.promoe.stats()
        assert (again.hit_rate, again.ready_rate, again.stall_s, again.bytes_demand) == (1.0, 1.0, 0.0, 0)
        assert again.layer_visits == stats.layer_visits


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("predictor", [None, "random"])
def test_every_byte_that_moved_is_accounted_for(predictor: str | None, stream: bool) -> None:
    fields: dict[str, Any] = {"min_probability": 0.01, "stream": stream}
    with served(FAMILY, cache="25%", predictor=predictor, link=delayed(3), **fields) as model:
        for prompt in ("one", "padded", "short"):
            assert_works(model, prompt)
        promoe_handle = model.promoe
        promoe_handle.close()  # chunks in flight land first
        stats = promoe_handle.stats()
        held = sum(load.done_bytes for cache in caches(model) for load in cache.loads.values())
        held += len(list(promoe_handle.runtime.engine.scheduler.resident())) * EXPERT_BYTES
        evicted = stats.evictions * EXPERT_BYTES
        moved = stats.bytes_demand + stats.bytes_prefetched
        assert held + evicted <= moved <= held + evicted + stats.bytes_wasted
        if predictor is None and not stream:
            assert stats.bytes_prefetched == 0
        assert stats.evictions > 0


def test_visits_count_for_their_own_pass_whoever_else_runs() -> None:
    """A prompt is being read in one thread when another one decodes."""
    with served(FAMILY, cache="25%", predictor=None) as model, torch.no_grad():
        token, prompt = torch.tensor([[3]]), torch.arange(12)[None]
        counts = []
        for together in (False, True):
            model.promoe.reset_stats()
            if together:
                block = promoe.find_moe_layers(model)[1].block

                def decode_beside(module: nn.Module, args: Any) -> None:
                    if args[0].shape[1] > 1:
                        with ThreadPoolExecutor(1) as pool:
                            pool.submit(lambda: torch.no_grad()(model)(token)).result(WAIT_S)

                hook = block.register_forward_pre_hook(decode_beside)
                model(prompt)
                hook.remove()
            else:
                model(prompt)
                model(token)
            stats = model.promoe.stats()
            counts.append([(phase.passes, phase.layer_visits, phase.needed) for phase in (stats.prefill, stats.decode)])
        assert counts[0] == counts[1]
        assert [visits for phase in counts[0] for _, visits, _ in [phase]] == [3, 3]


def test_an_encoder_that_is_called_alone_is_no_decode() -> None:
    """As `generate` does, before the first pass; its visits are not those of the pass before."""
    model = families.build("switch_transformers")
    ids = torch.arange(7)[None]
    with torch.no_grad():
        promoe.patch(model, cache="25%", predictor=None, link=promoe.EmulatedLink(bandwidth_bytes_per_s=1e10))
        found = []
        for _ in range(3):
            model.promoe.reset_stats()
            model.generate(ids, max_new_tokens=4, min_new_tokens=4)
            stats = model.promoe.stats()
            found.append([(phase.layer_visits, phase.needed) for phase in (stats.prefill, stats.decode)])
            assert stats.decode.layer_visits
            assert stats.prefill.bytes_demand, "the encoder's"
        assert found[0] == found[1] == found[2]
    promoe.unpatch(model)


def caches(model: nn.Module) -> list[Any]:
    return model.promoe.runtime.engine.scheduler.caches


def test_an_exception_leaves_no_pin_and_the_next_pass_counts_anew() -> None:
    with served(FAMILY, cache=2) as model:
        hook = promoe.find_moe_layers(model)[2].experts.register_forward_pre_hook(lambda *args: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            greedy(model, PROMPTS["one"])
        hook.remove()
        assert [cache.num_pinned for cache in caches(model)] == [0]
        assert (model.promoe.stats().prefill.passes_aborted, model.promoe.stats().prefill.passes) == (1, 0)
        model.promoe.reset_stats()
        assert_works(model)
        assert (model.promoe.stats().prefill.passes_aborted, model.promoe.stats().prefill.passes) == (0, 1)


def test_a_timeline_has_lanes_for_compute_transfers_waits_and_predictions(tmp_path: Path) -> None:
    with served(FAMILY, cache=2, predictor="gate", link=delayed(2)) as model:
        with model.promoe.trace(tmp_path / "t.json"):
            assert_works(model)
            model.promoe.runtime.forecaster.drain()
        assert_works(model)  # not recorded
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    for layer_idx in range(LAYERS):
        assert names.count(f"experts L{layer_idx}") == 1 + NEW_TOKENS
        assert f"predict from L{layer_idx}" in names
    assert any(name.startswith("wait L") for name in names)
    assert any(name.startswith("demand L") for name in names)
    assert {"compute", "wait", "predictor"} <= {lane.split()[0] for lane in lanes(events)}


def lanes(events: list[dict[str, Any]]) -> list[str]:
    return [event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"]


# -- what a pass must do ----------------------------------------------------------------------------------------


def test_experts_that_another_forward_replaced_are_an_error_naming_the_layers() -> None:
    with served(FAMILY, cache=2) as model:
        layers = promoe.find_moe_layers(model)
        for layer in layers[1:]:
            layer.experts.forward = lambda hidden, index, weights: torch.zeros_like(hidden)
        with pytest.raises(PromoeError, match=r"layers \[1, 2\] fired .*'model\.layers\.1\.mlp\.experts'.*Unpatch"):
            greedy(model, PROMPTS["one"])
        for layer in layers[1:]:
            del layer.experts.forward
        assert_works(model)


def test_a_gate_alone_outside_of_any_pass_is_no_error_of_the_next() -> None:
    with served(FAMILY, cache=2) as model:
        layer = promoe.find_moe_layers(model)[1]
        with torch.inference_mode():
            layer.gate(torch.zeros(2, 64))
        assert_works(model)


class Keeping(NoForecast):
    """Keeps what it is shown, as a predictor may."""

    def __init__(self) -> None:
        self.inputs: list[torch.Tensor] = []

    def predict(self, visit: LayerVisit) -> list[Forecast]:
        self.inputs.append(visit.gate_input)
        return []


@pytest.mark.parametrize("shape", [(2, 64), (1, 2, 64)])
def test_what_a_predictor_is_shown_is_its_own_and_knows_no_gradients(shape: tuple[int, ...]) -> None:
    predictor = Keeping()
    with served(FAMILY, cache=2, predictor=predictor) as model:
        layer = promoe.find_moe_layers(model)[1]
        hidden = torch.randn(shape)
        wanted = hidden.reshape(2, 64).clone()
        layer.gate(hidden.requires_grad_())
        hidden.data.zero_()
        with torch.no_grad():  # hands the visit over
            layer.experts(wanted, torch.tensor([[0, 1], [0, 1]]), torch.ones(2, 2))
        model.promoe.runtime.forecaster.drain()
        (shown,) = predictor.inputs
        assert torch.equal(shown, wanted)
        assert not shown.requires_grad


def test_a_closed_engine_refuses_and_a_forward_under_way_ends() -> None:
    """Closing while a forward runs: it ends with its result or with EngineClosedError, and hangs in no case."""
    with served(FAMILY, cache=1, link=delayed(4, 2e-3)) as model:
        ended: list[BaseException | None] = []
        begun = threading.Event()

        def run() -> None:
            torch.set_num_threads(1)
            try:
                for _ in range(1000):
                    begun.set()
                    greedy(model, PROMPTS["one"])
            except BaseException as error:
                ended.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        assert begun.wait(60)
        model.promoe.close()
        thread.join(60)
        assert not thread.is_alive()
        assert [type(error) for error in ended] == [EngineClosedError]
        check_integrity(model)
        assert [cache.num_pinned for cache in caches(model)] == [0]


@pytest.mark.parametrize("wanted_too", [True, False])
@pytest.mark.parametrize("predictor", ["gate", None])
def test_a_long_prompt_streams_the_next_layers_experts_with_a_predictor_or_without(
    predictor: str | None, wanted_too: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = left_padded((60,), seed=5)
    plain = stock(FAMILY, torch.float32)
    wanted = greedy(plain, prompt, new_tokens=1)
    with served(FAMILY, cache="75%", predictor=predictor, stream=wanted_too) as model:
        engine = model.promoe.runtime.engine
        engine.set_prefetch(False)  # the governor's verdict on predictions
        streamed: list[int] = []
        original = engine.stream

        def note(layer_idx: int) -> None:
            streamed.append(layer_idx)
            original(layer_idx)

        monkeypatch.setattr(engine, "stream", note)
        greedy(model, prompt, new_tokens=1).assert_equals(wanted)
        assert streamed == (list(range(1, LAYERS)) if wanted_too else [])
        assert (model.promoe.stats().bytes_prefetched > 0) == wanted_too
        check_integrity(model)
