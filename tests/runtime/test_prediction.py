"""A predictor runs beside the model, and nothing that it does may reach the forward."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import FakeDevice
from served import NEW_TOKENS, PROMPTS, expected, greedy, predictor_of, record, served, stock
from tiny_models import build
from torch import nn
from waiting import WAIT_S, settle

import promoe
from promoe.predictors import Forecast, LayerVisit, ReuseForecast
from promoe.runtime import prediction
from promoe.runtime.prediction import MAX_WAITING, Forecaster
from promoe.scheduler import calibration
from promoe.scheduler.many_tokens import MOST_SHOWN, shown
from promoe.stats.recorder import Recorder
from promoe.stats.tracing import PREDICTOR, Tracer

FAMILY, LAYERS = "qwen2_moe", 3
PASSES = 1 + NEW_TOKENS


class EngineDouble:
    """What a prediction thread sees of an engine; notes the forecasts handed to it."""

    eviction = "next_use"

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.recorder = Recorder([4, 4], [1, 1])
        self.tracer: Tracer | None = None
        self.forecasts: list[tuple[int, int, int, list[float]]] = []
        self.foreseen: list[tuple[int, int, list[float]]] = []
        self.stall_timeout_s = 60.0
        self.interrupted = False
        config = SimpleNamespace(num_experts=[4] * 10, eviction=self.eviction)
        self.scheduler = SimpleNamespace(config=config, prefetch_on=True, everything_resident=False)
        self.prefetch_on = True

    def set_prefetch(self, on: bool) -> None:
        self.prefetch_on = on

    def forecast(self, origin_step: int, steps_ahead: int, layer_idx: int, probabilities: Any) -> bool:
        assert not self.lock.locked(), "the engine takes the lock itself"
        self.forecasts.append((origin_step, steps_ahead, layer_idx, list(probabilities)))
        return True

    def foresee_reuse(self, origin_step: int, layer_idx: int, log_odds: Any) -> bool:
        assert not self.lock.locked(), "the engine takes the lock itself"
        self.foreseen.append((origin_step, layer_idx, list(log_odds)))
        return True


def visit(layer_idx: int = 0) -> LayerVisit:
    return LayerVisit(1, "decode", layer_idx, torch.zeros(1, 8), [[0, 1]])


class Predictor:
    """Runs `action` at each visit; notes the visits."""

    def __init__(self, action: Callable[[LayerVisit], Any] = lambda visit: []) -> None:
        self.action = action
        self.visits: list[LayerVisit] = []

    def predict(self, visit: LayerVisit) -> Any:
        self.visits.append(visit)
        return self.action(visit)


class Gate:
    """An action that waits until it is opened."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self, visit: LayerVisit) -> list[Forecast]:
        self.entered.set()
        assert self.open.wait(WAIT_S)
        return [Forecast(1, visit.layer_idx, np.zeros(4))]


@contextmanager
def predicting(predictor: Any, **arguments: Any) -> Iterator[tuple[Forecaster, EngineDouble]]:
    engine = EngineDouble()
    thread = Forecaster(predictor, engine, **arguments)  # type: ignore[arg-type]
    try:
        yield thread, engine
    finally:
        thread.close()


def told(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What promoe logged as a warning or worse."""
    return [r for r in caplog.records if r.name.startswith("promoe") and r.levelno >= logging.WARNING]


# -- the thread -------------------------------------------------------------------------------------------------


def test_forecasts_reach_the_engine_in_order_with_the_step_they_were_made_from() -> None:
    def two(visit: LayerVisit) -> list[Forecast]:
        return [Forecast(1, 1, np.array([0.1, 0.9, 0.0, 0.0])), Forecast(2, 0, np.array([1.0, 0.0, 0.0, 0.0]))]

    with predicting(Predictor(two)) as (thread, engine):
        for step in (7, 8):
            thread.visit(step, visit())
            thread.drain()
    one_visit = [(1, 1, [0.1, 0.9, 0.0, 0.0]), (2, 0, [1.0, 0.0, 0.0, 0.0])]
    assert engine.forecasts == [(step, *forecast) for step in (7, 8) for forecast in one_visit]


def test_what_is_forecast_of_some_tokens_is_taken_to_hold_for_all() -> None:
    some = replace(visit(), chosen=[[0]] * 5, gate_input=torch.zeros(5, 8), all_tokens=20)
    with predicting(Predictor(lambda visit: [FORECAST])) as (thread, engine):
        thread.visit(7, some)
        thread.drain()
    assert engine.forecasts == [(7, 1, 1, pytest.approx([1 - 0.9**4, 1 - 0.1**4, 0.0, 0.0]))]


class Foreseeing(Predictor):
    """Foresees reuse, and forecasts one layer."""

    def __init__(self, log_odds: Any = (3.0, -3.0, 0.0, 1.0), is_weighed: bool = True) -> None:
        super().__init__(lambda visit: [ReuseForecast(visit.layer_idx, np.array(log_odds)), FORECAST])
        self.reuse = SimpleNamespace(foreseen=np.zeros((10, 4)) if is_weighed else None)


FORECAST = Forecast(1, 1, np.array([0.1, 0.9, 0.0, 0.0]))


@pytest.mark.parametrize("prefetch_on", [True, False])
def test_reuse_is_foreseen_for_eviction_also_while_nothing_is_prefetched(prefetch_on: bool) -> None:
    with predicting(Foreseeing()) as (thread, engine):
        engine.scheduler.prefetch_on = prefetch_on
        assert thread.of_use
        thread.visit(7, visit(3))
        thread.drain()
    assert engine.foreseen == [(7, 3, [3.0, -3.0, 0.0, 1.0])]
    assert len(engine.forecasts) == prefetch_on


@pytest.mark.parametrize(("is_weighed", "eviction"), [(False, "next_use"), (True, "lru")])
def test_where_nothing_goes_by_reuse_none_is_asked_for_without_prefetch(
    is_weighed: bool, eviction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineDouble, "eviction", eviction)
    with predicting(Foreseeing(is_weighed=is_weighed)) as (thread, engine):
        engine.scheduler.prefetch_on = False
        assert not thread.of_use


def test_with_everything_resident_no_reuse_is_asked_for() -> None:
    with predicting(Foreseeing()) as (thread, engine):
        engine.scheduler.everything_resident = True
        assert not thread.of_use


def test_reuse_of_too_many_or_few_experts_switches_the_predictor_off(caplog: pytest.LogCaptureFixture) -> None:
    with predicting(Foreseeing(log_odds=[1.0, 2.0])) as (thread, engine):
        thread.visit(7, visit(3))
        thread.drain()
        assert thread.failed
        assert not engine.prefetch_on
    assert engine.foreseen == []
    assert "shape (2,) for layer 3, which has 4 experts" in caplog.text


def test_it_predicts_in_a_thread_of_its_own_and_is_counted() -> None:
    names: list[str] = []
    with predicting(Predictor(lambda visit: names.append(threading.current_thread().name) or [])) as (thread, engine):
        engine.recorder.begin_pass("decode", 1, 1)
        for step in range(3):
            thread.visit(step, visit())
            thread.drain()
        assert engine.recorder.phase_stats("decode").predictor_calls == 3
        assert engine.recorder.phase_stats("decode").predictor_s > 0
    assert names == ["promoe-predictor"] * 3


def test_on_a_device_it_predicts_beside_the_forward_once_the_input_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a quick one without a core to itself: its answer is waited for."""
    monkeypatch.setattr(prediction, "has_spare_core", lambda: False)
    seen: list[list[float]] = []
    predictor = Predictor(lambda visit: seen.append(visit.gate_input[0].tolist()) or [])
    predictor.quick = True  # type: ignore[attr-defined]
    device = FakeDevice(eager=False)
    with predicting(predictor, device=device) as (thread, _):
        announced = visit()
        announced.gate_input.fill_(float("nan"))
        device.compute.put(lambda: announced.gate_input.fill_(0.5))
        assert not thread.in_forward
        thread.visit(1, announced)
        thread.drain()
    assert [set(values) for values in seen] == [{0.5}]
    assert device.host_waits == 0, "of the device's own queues one waits for the other"


@pytest.mark.parametrize(
    ("quick", "spare_core", "in_forward"),
    [(True, False, True), (True, True, False), (False, False, False), (False, True, False)],
)
def test_only_a_quick_predictor_without_a_core_to_itself_predicts_in_the_forward(
    quick: bool, spare_core: bool, in_forward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction, "has_spare_core", lambda: spare_core)
    names: list[str] = []
    predictor: Any = Predictor(lambda visit: names.append(threading.current_thread().name) or [])
    predictor.quick = quick
    with predicting(predictor) as (forecaster, _):
        assert forecaster.in_forward == in_forward
        forecaster.visit(1, visit())
        forecaster.drain()
    assert names == [threading.current_thread().name if in_forward else "promoe-predictor"]


def test_a_timeline_shows_each_prediction() -> None:
    forecast = Forecast(1, 1, np.zeros(4))
    with predicting(Predictor(lambda visit: [forecast, forecast])) as (thread, engine):
        engine.tracer = Tracer()
        thread.visit(1, visit(layer_idx=1))
        thread.drain()
    (span,) = engine.tracer.spans()
    assert (span.lane, span.name, span.args) == (PREDICTOR, "predict from L1", {"forecasts": 2})  # type: ignore[union-attr]


@pytest.mark.parametrize(("needs_every_visit", "seen"), [(False, [0, 8, 9]), (True, list(range(10)))])
def test_a_predictor_that_is_behind_sees_the_latest_visits_only(needs_every_visit: bool, seen: list[int]) -> None:
    assert MAX_WAITING == 2
    slow = Gate()
    predictor = Predictor(slow)
    predictor.needs_every_visit = needs_every_visit  # type: ignore[attr-defined]
    with predicting(predictor) as (thread, engine):
        thread.visit(0, visit(0))
        assert slow.entered.wait(WAIT_S)
        for step in range(1, 10):
            thread.visit(step, visit(step))  # never waits
        slow.open.set()
        thread.drain()
    assert [visit.layer_idx for visit in predictor.visits] == seen
    assert [step for step, *_ in engine.forecasts] == seen


def test_closing_waits_for_the_prediction_under_way_and_drops_the_rest() -> None:
    slow = Gate()
    predictor = Predictor(slow)
    with predicting(predictor) as (thread, engine):
        thread.visit(1, visit())
        assert slow.entered.wait(WAIT_S)
        thread.visit(2, visit())
        closing = threading.Thread(target=thread.close)
        closing.start()
        while not thread._closed:
            pass
        assert closing.is_alive()
        slow.open.set()
        closing.join(WAIT_S)
        assert not thread._thread.is_alive()
        assert [step for step, *_ in engine.forecasts] == [1]
        thread.close()
        thread.visit(3, visit())
        thread.drain()  # does not wait for what will never be predicted
    assert len(predictor.visits) == 1


def test_a_predictor_may_close_its_own_thread() -> None:
    holder: list[Forecaster] = []
    with predicting(Predictor(lambda visit: holder[0].close() or [])) as (thread, _):
        holder.append(thread)
        thread.visit(1, visit())
        thread._thread.join(WAIT_S)
        assert not thread._thread.is_alive()


def test_a_predictor_that_raises_is_switched_off_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    predictor = Predictor(lambda visit: 1 // 0)  # type: ignore[arg-type]
    with predicting(predictor) as (thread, engine):
        for step in range(4):
            thread.visit(step, visit())
            thread.drain()
        thread._thread.join(WAIT_S)
        assert not thread._thread.is_alive()
    (record,) = told(caplog)
    assert "switched off" in record.getMessage()
    assert "on demand" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError
    assert len(predictor.visits) == 1
    assert engine.forecasts == []


# -- beside a model ---------------------------------------------------------------------------------------------


def assert_unharmed(model: nn.Module, prompt: str = "short") -> None:
    greedy(model, PROMPTS[prompt]).assert_equals(expected(FAMILY, torch.float32, "grouped_mm", prompt))


def raising(visit: LayerVisit) -> Any:
    raise RuntimeError("no idea")


def forecasting(steps_ahead: Any, layer_idx: Any, probabilities: Any) -> Callable[[LayerVisit], list[Forecast]]:
    """The same forecast at every visit."""
    return lambda visit: [Forecast(steps_ahead, layer_idx, probabilities)]


def spoiling(visit: LayerVisit) -> list[Forecast]:
    """Writes into everything that it was given."""
    with torch.inference_mode():
        visit.gate_input.fill_(float("nan"))
    for token in visit.chosen:
        token[:] = [0] * len(token)  # type: ignore[index]
    visit.gate_kwargs.clear()
    return [Forecast(1, (visit.layer_idx + 1) % 3, np.full(8, 0.99))]


SURE = np.full(8, 0.99)
HARMLESS: dict[str, Callable[[LayerVisit], Any]] = {
    "nothing": lambda visit: [],
    "nan": lambda visit: [Forecast(1, (visit.layer_idx + 1) % 3, np.full(8, np.nan))],
    "infinite": lambda visit: [Forecast(1, (visit.layer_idx + 1) % 3, np.array([np.inf, -np.inf] * 4))],
    "no probability": lambda visit: [Forecast(1, (visit.layer_idx + 1) % 3, np.arange(8) * 1e9 - 4e9)],
    "a list": lambda visit: [Forecast(1, (visit.layer_idx + 1) % 3, [0.99] * 8)],  # type: ignore[arg-type]
    "a tensor": lambda visit: [Forecast(1, (visit.layer_idx + 1) % 3, torch.full((8,), 0.99))],  # type: ignore[arg-type]
    "all experts of another layer": forecasting(2, 0, SURE),
    "the present": forecasting(0, 0, SURE),
    "the past": forecasting(-1, 0, SURE),
    "far ahead": forecasting(1000, 1, SURE),
    "spoiling": spoiling,
}
BROKEN: dict[str, Callable[[LayerVisit], Any]] = {
    "raising": raising,
    "None": lambda visit: None,
    "not a forecast": lambda visit: [0.5] * 8,
    "too few probabilities": forecasting(1, 1, np.full(7, 0.9)),
    "too many probabilities": forecasting(1, 1, np.full(9, 0.9)),
    "a matrix": forecasting(1, 1, np.full((1, 8), 0.9)),
    "one number": forecasting(1, 1, 0.9),
    "words": forecasting(1, 1, ["likely"] * 8),
    "a layer too many": forecasting(1, 3, SURE),
    "a negative layer": forecasting(1, -1, SURE),
}


@contextmanager
def in_step(model: nn.Module) -> Iterator[None]:
    """Each prediction ends before the next layer's gate chooses: none is dropped, none comes too late."""
    runtime = model.promoe.runtime
    wait = [layer.experts.register_forward_hook(lambda *args: runtime.forecaster.drain()) for layer in runtime.layers]
    try:
        yield
    finally:
        for hook in wait:
            hook.remove()


def run_with(action: Callable[[LayerVisit], Any]) -> tuple[Predictor, promoe.Stats]:
    """Two runs of a served model, predicted by `action`; every output is compared."""
    predictor = Predictor(action)
    with served(FAMILY, cache="50%", predictor=predictor, min_probability=0.01) as model:
        with in_step(model):
            for _ in range(2):
                assert_unharmed(model)
        return predictor, model.promoe.stats()


@pytest.mark.parametrize("name", HARMLESS)
def test_whatever_a_predictor_answers_no_bit_changes(name: str, caplog: pytest.LogCaptureFixture) -> None:
    predictor, stats = run_with(HARMLESS[name])
    assert told(caplog) == []
    assert len(predictor.visits) == 2 * LAYERS * PASSES
    assert stats.total.failures_prefetch == 0
    silent = name in ("nothing", "the present", "the past", "far ahead")
    assert silent == (stats.bytes_prefetched == 0)


@pytest.mark.parametrize("name", BROKEN)
def test_a_predictor_that_breaks_costs_one_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    predictor, stats = run_with(BROKEN[name])
    (record,) = told(caplog)
    assert "switched off" in record.getMessage()
    assert len(predictor.visits) == 1
    assert stats.bytes_prefetched == 0
    assert stats.predictor == "Predictor (failed)"


def test_what_a_predictor_writes_into_its_visit_stays_there(caplog: pytest.LogCaptureFixture) -> None:
    """Under slow predictions too: the forward goes on while the predictor writes."""
    slow = Gate()

    def action(visit: LayerVisit) -> list[Forecast]:
        slow(visit)
        return spoiling(visit)

    with served(FAMILY, cache="50%", predictor=Predictor(action)) as model:
        slow.open.set()
        assert_unharmed(model)
    assert told(caplog) == []


def test_the_forward_does_not_wait_for_a_predictor() -> None:
    slow = Gate()
    predictor = Predictor(slow)
    with served(FAMILY, cache=2, predictor=predictor) as model:
        assert_unharmed(model)  # the first prediction ends after the last pass
        assert len(predictor.visits) == 1
        slow.open.set()


def test_a_broken_predictor_is_still_closed(caplog: pytest.LogCaptureFixture) -> None:
    with served(FAMILY, cache="50%", predictor=Predictor(raising)) as model:
        assert_unharmed(model)
        model.promoe.runtime.forecaster.drain()  # until it has broken
        model.promoe.close()
        model.promoe.close()
    assert len(told(caplog)) == 1


# -- what it is asked -------------------------------------------------------------------------------------------


def gate_calls(model: nn.Module, prompt: dict[str, torch.Tensor]) -> list[tuple[int, torch.Tensor, list[list[int]]]]:
    """(layer, gate input, chosen experts) of every gate call."""
    calls: list[tuple[int, torch.Tensor, list[list[int]]]] = []
    layers = promoe.find_moe_layers(model)
    hooks = [
        layer.gate.register_forward_hook(
            lambda gate, args, output, layer_idx=layer.layer_idx: calls.append(
                (layer_idx, args[0].clone(), output[2].tolist())
            )
        )
        for layer in layers
    ]
    try:
        greedy(model, prompt)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def test_it_is_asked_about_every_short_visit_with_what_the_gate_saw() -> None:
    model = stock(FAMILY)
    model.set_experts_implementation("grouped_mm")
    wanted = gate_calls(model, PROMPTS["short"])
    predictor = Predictor()
    with served(FAMILY, cache="50%", predictor=predictor) as model, in_step(model):
        greedy(model, PROMPTS["short"])
    assert len(wanted) == LAYERS * PASSES
    assert [visit.layer_idx for visit in predictor.visits] == [layer_idx for layer_idx, _, _ in wanted]
    assert [visit.pass_idx for visit in predictor.visits] == [1 + number // 3 for number in range(LAYERS * PASSES)]
    assert [visit.phase for visit in predictor.visits] == ["prefill"] * 3 + ["decode"] * 3 * NEW_TOKENS
    for visit, (_, gate_input, chosen) in zip(predictor.visits, wanted, strict=True):
        assert visit.gate_input.shape == (len(chosen), 64)
        assert torch.equal(visit.gate_input, gate_input)
        assert visit.chosen == chosen
        assert (visit.gate_args, visit.gate_kwargs) == ((), {})


def test_it_is_not_asked_about_long_prompts_that_use_most_experts() -> None:
    assert PROMPTS["one"]["input_ids"].numel() > MOST_SHOWN
    predictor = Predictor()
    with served(FAMILY, cache="50%", predictor=predictor) as model, in_step(model):
        greedy(model, PROMPTS["one"], new_tokens=1)
    assert [visit.phase for visit in predictor.visits] == ["decode"] * 3


def few_of_32_experts(shape: tuple[int, int]) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model, and 11 tokens that use less than 70% of its experts."""
    ids = torch.arange(1, 12).reshape(shape)
    return build(FAMILY, num_experts=32), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_of_many_sequences_that_use_few_experts_it_is_shown_some() -> None:
    model, prompt = few_of_32_experts((11, 1))
    wanted = gate_calls(model, prompt)[:LAYERS]
    predictor = Predictor(lambda visit: [Forecast(1, (visit.layer_idx + 1) % LAYERS, np.full(32, 0.3))])
    promoe.patch(model, cache="50%", store="host", link=promoe.EmulatedLink(1e12), predictor=predictor)
    with in_step(model):
        greedy(model, prompt, new_tokens=0)
    promoe.unpatch(model)
    assert [visit.layer_idx for visit in predictor.visits] == list(range(LAYERS))
    for visit, (_, gate_input, chosen) in zip(predictor.visits, wanted, strict=True):
        assert len({expert for token in chosen for expert in token}) < 0.7 * 32
        assert visit.all_tokens == 11
        assert len(visit.chosen) == 6
        assert torch.equal(visit.gate_input, gate_input[shown(11)])
        assert visit.chosen == chosen[shown(11)]


def test_it_is_not_asked_about_a_long_prompt_that_uses_few_experts() -> None:
    model, prompt = few_of_32_experts((1, 11))
    predictor = Predictor()
    promoe.patch(model, cache="50%", store="host", link=promoe.EmulatedLink(1e12), predictor=predictor)
    greedy(model, prompt, new_tokens=0)
    promoe.unpatch(model)
    assert predictor.visits == []


def test_of_a_gate_called_twice_the_last_call_is_predicted() -> None:
    predictor = Predictor(lambda visit: [Forecast(1, (visit.layer_idx + 1) % 3, SURE)])
    with served(FAMILY, cache="50%", predictor=predictor, min_probability=0.01) as model:
        repeated: list[int] = []

        def again(gate: nn.Module, args: Any, output: Any) -> None:
            if not repeated or repeated[-1] != -1:
                repeated.append(-1)
                gate(args[0])
                repeated[-1] = len(repeated)

        hooks = [layer.gate.register_forward_hook(again) for layer in promoe.find_moe_layers(model)]
        with in_step(model):
            assert_unharmed(model)
        for hook in hooks:
            hook.remove()
    assert len(repeated) == LAYERS * PASSES
    assert [visit.layer_idx for visit in predictor.visits] == [0, 1, 2] * PASSES


def test_a_gate_without_its_experts_is_not_predicted() -> None:
    predictor = Predictor()
    with served(FAMILY, cache="50%", predictor=predictor) as model:
        first, *_, last = promoe.find_moe_layers(model)
        hidden = torch.zeros(1, 64)
        with torch.inference_mode():
            _, weights, index = first.gate(hidden)
            last.experts(hidden, index, weights)  # another layer's
        model.promoe.runtime.forecaster.drain()
        assert predictor.visits == []


def test_a_gate_called_by_keyword_is_a_hint_without_a_prediction() -> None:
    """Which of its arguments is the hidden state only the gate knows."""
    predictor = Predictor()
    with served(FAMILY, cache="50%", predictor=predictor) as model:
        layer = promoe.find_moe_layers(model)[0]
        with torch.inference_mode():
            layer.gate(hidden_states=torch.zeros(1, 64))
        model.promoe.runtime.forecaster.drain()
        assert predictor.visits == []
        assert_unharmed(model)
        assert predictor.visits


def test_forecasts_made_from_a_visit_count_steps_from_that_visit() -> None:
    """The hint precedes the visit that it announces: from its gate on, a layer's next is one step ahead."""
    steps: list[tuple[int, int]] = []
    with served(FAMILY, cache="50%", predictor=Predictor(forecasting(1, 1, SURE))) as model:
        engine = model.promoe.runtime.engine
        forecast = engine.forecast
        engine.forecast = lambda origin_step, *rest: (
            steps.append((origin_step, engine.scheduler.step)) or forecast(origin_step, *rest)
        )
        with in_step(model):
            greedy(model, PROMPTS["short"], new_tokens=1)
    assert steps == [(step, step) for step in range(1, 7)]


def test_predicted_in_the_forward_the_visit_announced_is_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "has_spare_core", lambda: False)
    predictor: Any = Predictor(forecasting(1, 1, SURE))
    predictor.quick = True
    steps: list[tuple[int, int]] = []
    with served(FAMILY, cache="50%", predictor=predictor) as model:
        engine = model.promoe.runtime.engine
        forecast = engine.forecast
        engine.forecast = lambda origin_step, *rest: (
            steps.append((origin_step, engine.scheduler.step)) or forecast(origin_step, *rest)
        )
        greedy(model, PROMPTS["short"], new_tokens=1)
    assert steps == [(step + 1, step) for step in range(6)]


@contextmanager
def in_time(model: nn.Module) -> Iterator[None]:
    """Whatever was predicted has arrived before the next gate chooses."""
    runtime = model.promoe.runtime
    engine = runtime.engine

    def wait(*args: Any) -> None:
        runtime.forecaster.drain()
        settle(engine)

    hooks = [layer.gate.register_forward_pre_hook(wait) for layer in runtime.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def test_what_an_oracle_names_is_resident_when_the_gate_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The point of it all, on into the next token. Believed at once: it has only three tokens to prove itself."""
    monkeypatch.setattr(calibration, "START_COEFFICIENTS", (1.0, 0.0, 0.0, 0.0))
    _, visits = record(FAMILY, torch.float32, "grouped_mm", "short")
    oracle = predictor_of("oracle", stock(FAMILY), visits, lookahead=1)
    with served(FAMILY, cache="50%", predictor=oracle, lookahead=1) as model:
        with in_step(model), in_time(model):
            assert_unharmed(model)
        stats = model.promoe.stats()
    assert stats.decode.hit_rate == 1.0
    assert stats.bytes_prefetched > 0
    with served(FAMILY, cache="50%") as model:
        assert_unharmed(model)
        stats = model.promoe.stats()
    assert stats.decode.hit_rate < 1.0
    assert stats.bytes_prefetched == 0
