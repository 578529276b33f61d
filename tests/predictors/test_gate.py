"""The skip-based predictor against the definition: the target layer's gate, applied by hand to what an earlier gate saw."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from served import PROMPTS, greedy, served
from tiny_models import MOE_FAMILIES, build, token_ids
from torch import nn

import promoe
from promoe.predictors import Forecast, LayerVisit, PredictorContext
from promoe.predictors.base import Phase
from promoe.predictors.gate import AGREEMENTS, GatePredictor, selection_probability
from promoe.predictors.linear_fit import LinearFit
from promoe.runtime import prediction
from promoe.runtime.assembly import predictor_context

LAYERS = 4


@functools.cache
def recorded(
    family: str, dtype: torch.dtype = torch.float32
) -> tuple[list[promoe.MoELayer], list[torch.Tensor], list[list[list[int]]]]:
    """A tiny model's MoE layers, and what each of their gates saw `[T, H]` and chose `[T][K]` in one pass."""
    model = build(family, dtype=dtype, layers=LAYERS)
    layers = promoe.find_moe_layers(model)
    inputs: list[torch.Tensor] = []
    chosen: list[list[list[int]]] = []

    def on_gate(gate: nn.Module, args: tuple[torch.Tensor], output: tuple[torch.Tensor, ...]) -> None:
        inputs.append(args[0].reshape(-1, args[0].shape[-1]).clone())
        chosen.append(output[2].tolist())

    hooks = [layer.gate.register_forward_hook(on_gate) for layer in layers]
    with torch.inference_mode():
        model(input_ids=token_ids(1, 5, seed=3))
    for hook in hooks:
        hook.remove()
    return layers, inputs, chosen


def visit_of(layer_idx: int, hidden: torch.Tensor, chosen: list[list[int]]) -> LayerVisit:
    return LayerVisit(1, "prefill" if len(hidden) > 1 else "decode", layer_idx, hidden, chosen)


def by_hand(logits: list[list[float]], chosen: list[list[int]], num_experts: int) -> list[float]:
    """Probability per expert that at least one token uses it, from the definition in the predictor's docstring."""
    unused = [1.0] * num_experts
    for token_logits, ids in zip(logits, chosen, strict=True):
        ranked = sorted(token_logits, reverse=True)
        threshold = (ranked[len(ids) - 1] + ranked[len(ids)]) / 2
        mean = sum(token_logits) / num_experts
        deviation = math.sqrt(sum((z - mean) ** 2 for z in token_logits) / num_experts)
        for expert_idx, z in enumerate(token_logits):
            p = 1 / (1 + math.exp(-max(-7.0, min(7.0, 2.0 * (z - threshold) / deviation))))
            p = max(p, 0.6) if expert_idx in ids else min(p, 0.4)
            unused[expert_idx] *= 1 - p
    return [1 - p for p in unused]


# -- against a direct computation -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "mixtral"])
@torch.inference_mode()
def test_the_target_gate_on_the_earlier_hidden_state(family: str, num_tokens: int) -> None:
    """Linear gates without groups: logits, their ranking and the probability are computed by hand."""
    layers, inputs, chosen = recorded(family)
    predictor = GatePredictor(predictor_context(layers), lookahead=LAYERS)
    compared = 0
    for source in range(LAYERS):
        hidden = inputs[source][-num_tokens:]
        forecasts = predictor.predict(visit_of(source, hidden, chosen[source][-num_tokens:]))
        assert steps(forecasts) == [(ahead, (source + ahead) % LAYERS) for ahead in range(1, LAYERS)]
        for forecast in forecasts:
            layer = layers[forecast.layer_idx]
            bias = getattr(layer.gate, "bias", None)
            assert (bias is not None) == (family == "gpt_oss")
            logits = hidden @ layer.gate.weight.T + (0 if bias is None else bias)
            ids = [sorted(range(8), key=lambda e, token=token: -token[e])[: layer.top_k] for token in logits.tolist()]
            wanted = by_hand(logits.tolist(), ids, 8)
            assert forecast.probabilities == pytest.approx(wanted, rel=1e-4, abs=1e-6)
            assert forecast.probabilities.dtype == np.float64
            compared += 1
    assert compared == LAYERS * (LAYERS - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", MOE_FAMILIES)
@torch.inference_mode()
def test_what_the_target_gate_would_choose_is_likely_and_nothing_else(family: str, dtype: torch.dtype) -> None:
    """In every family, groups and correction biases included; and the layer's own gate says what was really chosen."""
    layers, inputs, chosen = recorded(family, dtype)
    context = predictor_context(layers)
    assert len(layers) >= 3
    predictor = GatePredictor(context, lookahead=LAYERS)
    for source in range(len(layers)):
        for token, hidden in enumerate(inputs[source].split(1)):
            own = selection_probability(layers[source].gate(hidden), torch.tensor([chosen[source][token]]), 8)
            assert np.flatnonzero(own[0] > 0.5).tolist() == sorted(chosen[source][token])
            for forecast in predictor.predict(visit_of(source, hidden, [chosen[source][token]])):
                _, _, index = layers[forecast.layer_idx].gate(hidden)
                likely = np.flatnonzero(forecast.probabilities > 0.5).tolist()
                assert likely == sorted(index[0].tolist())
                assert (forecast.probabilities[likely] >= 0.6).all()
                assert (np.delete(forecast.probabilities, likely) <= 0.4).all()


def test_several_tokens_are_the_union_of_each() -> None:
    layers, inputs, chosen = recorded("qwen2_moe")
    predictor = GatePredictor(predictor_context(layers), lookahead=1)
    (together,) = predictor.predict(visit_of(0, inputs[0], chosen[0]))
    alone = [
        predictor.predict(visit_of(0, hidden, [ids]))[0].probabilities
        for hidden, ids in zip(inputs[0].split(1), chosen[0], strict=True)
    ]
    assert together.probabilities == pytest.approx(1 - np.prod([1 - p for p in alone], axis=0), rel=1e-5)
    assert (together.probabilities >= np.max(alone, axis=0) - 1e-9).all()


@pytest.mark.parametrize("spare_core", [False, True])
def test_served_it_forecasts_just_that(spare_core: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reaches the engine, from the forward or a thread, is what the predictor says of what the gates saw."""
    monkeypatch.setattr(prediction, "has_spare_core", lambda: spare_core)
    found: list[tuple[int, int, list[float]]] = []
    with served("qwen2_moe", cache="50%", predictor="gate", lookahead=2) as model:
        runtime = model.promoe.runtime
        forecast = runtime.engine.forecast

        def record(origin_step: int, steps_ahead: int, layer_idx: int, probabilities: Any) -> bool:
            found.append((steps_ahead, layer_idx, probabilities.tolist()))
            return bool(forecast(origin_step, steps_ahead, layer_idx, probabilities))

        runtime.engine.forecast = record
        seen: list[tuple[int, torch.Tensor]] = []
        hooks = []
        for layer in runtime.layers:
            hooks += [
                layer.gate.register_forward_hook(
                    lambda gate, args, output, idx=layer.layer_idx: seen.append((idx, args[0].clone()))
                ),
                layer.experts.register_forward_hook(lambda *args: runtime.forecaster.drain()),
            ]
        greedy(model, PROMPTS["short"], new_tokens=1)
        for hook in hooks:
            hook.remove()
        wanted: list[tuple[int, int, list[float]]] = []
        for layer_idx, hidden in seen:
            for steps_ahead in (1, 2):
                target = (layer_idx + steps_ahead) % 3
                with torch.no_grad():
                    output = type(runtime.layers[target].gate).forward(runtime.layers[target].gate, hidden)
                logits, index = output[0].tolist(), output[2].tolist()
                wanted.append((steps_ahead, target, by_hand(logits, index, 8)))
    ahead = [(1, 1), (2, 2), (1, 2), (2, 0), (1, 0), (2, 1)]
    assert [entry[:2] for entry in found] == ahead * 2 == [entry[:2] for entry in wanted]
    for (*_, probabilities), (*_, expected) in zip(found, wanted, strict=True):
        assert probabilities == pytest.approx(expected, rel=1e-4, abs=1e-6)


# -- which layers -----------------------------------------------------------------------------------------------


class Gate(nn.Module):
    """Chooses the experts `base` and `base + 1`; counts its calls."""

    def __init__(self, base: int = 0, num_experts: int = 6) -> None:
        super().__init__()
        self.base, self.num_experts = base, num_experts
        self.calls: list[tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]] = []

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append((hidden, args, kwargs))
        assert torch.is_inference_mode_enabled()
        index = torch.tensor([[self.base, self.base + 1]] * len(hidden))
        logits = torch.zeros(len(hidden), self.num_experts).scatter(1, index, 1.0)
        return logits, index


def context_of(*gates: nn.Module, num_experts: int = 6) -> PredictorContext:
    return PredictorContext(gates, [num_experts] * len(gates), [2] * len(gates))


def steps(forecasts: list[Forecast]) -> list[tuple[int, int]]:
    return [(forecast.steps_ahead, forecast.layer_idx) for forecast in forecasts]


@pytest.mark.parametrize(
    ("layer_idx", "lookahead", "wanted"),
    [
        (0, 1, [(1, 1)]),
        (0, 3, [(1, 1), (2, 2), (3, 3)]),
        (2, 3, [(1, 3), (2, 4), (3, 0)]),
        (4, 3, [(1, 0), (2, 1), (3, 2)]),
        (0, 99, [(1, 1), (2, 2), (3, 3), (4, 4)]),
        (2, 99, [(1, 3), (2, 4), (3, 0), (4, 1)]),
    ],
)
def test_layers_ahead_count_on_across_the_end_of_the_pass(
    layer_idx: int, lookahead: int, wanted: list[tuple[int, int]]
) -> None:
    gates = [Gate() for _ in range(5)]
    forecasts = GatePredictor(context_of(*gates), lookahead).predict(visit_of(layer_idx, torch.zeros(1, 4), [[0, 1]]))
    assert steps(forecasts) == wanted
    assert [len(gate.calls) for gate in gates] == [int(idx in dict(map(reversed, wanted))) for idx in range(5)]  # type: ignore[arg-type]


def test_one_layer_has_nothing_ahead() -> None:
    gate = Gate()
    assert GatePredictor(context_of(gate), 3).predict(visit_of(0, torch.zeros(1, 4), [[0, 1]])) == []
    assert gate.calls == []


def test_each_layer_has_its_own_number_of_experts() -> None:
    context = PredictorContext([Gate(), Gate(4, 6), Gate(7, 9)], [6, 6, 9], [2, 2, 2])
    one, two = GatePredictor(context, 2).predict(visit_of(0, torch.zeros(1, 4), [[0, 1]]))
    assert one.probabilities.shape == (6,)
    assert two.probabilities.shape == (9,)
    assert np.flatnonzero(two.probabilities > 0.5).tolist() == [7, 8]


def test_the_gate_gets_what_the_present_one_got_and_its_hooks_do_not_fire() -> None:
    target = Gate()

    def fail(*args: Any) -> None:
        raise AssertionError("a prediction fired a hook")

    target.register_forward_hook(fail)
    target.register_forward_pre_hook(fail)
    hidden, extra = torch.randn(3, 4), torch.tensor([1, 2, 3])
    before = hidden.clone()
    visit = LayerVisit(1, "prefill", 0, hidden, [[0, 1]] * 3, (extra,), {"scale": 2.0})
    GatePredictor(context_of(Gate(), target), 1).predict(visit)
    ((seen, args, kwargs),) = target.calls
    assert torch.equal(seen, hidden)
    assert args == (extra,)
    assert kwargs == {"scale": 2.0}
    assert torch.equal(hidden, before)


# -- what it learns ---------------------------------------------------------------------------------------------


class LinearGate(nn.Module):
    """A matrix; of bf16 or fp32."""

    def __init__(self, num_experts: int, hidden: int, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, hidden, generator=torch.Generator().manual_seed(seed)))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = nn.functional.linear(hidden, self.weight)
        scores, index = logits.topk(2)
        return logits, scores, index


class Stream:
    """Layers that turn and move the residual stream: what each one's gate sees of a token follows from the first."""

    def __init__(self, num_layers: int = 3, num_experts: int = 10, hidden: int = 16) -> None:
        self.gates = [LinearGate(num_experts, hidden, seed) for seed in range(num_layers)]
        self.context = PredictorContext(self.gates, [num_experts] * num_layers, [2] * num_layers)
        self._generator = torch.Generator().manual_seed(99)
        self._turns = [torch.eye(hidden) + 0.3 * self._random(hidden, hidden) for _ in range(num_layers)]

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator)

    @torch.no_grad()
    def visits(self, pass_idx: int, num_tokens: int = 1) -> list[LayerVisit]:
        """One pass."""
        hidden = self._random(num_tokens, len(self._turns[0]))
        visits = []
        for layer_idx, (gate, turn) in enumerate(zip(self.gates, self._turns, strict=True)):
            hidden = hidden @ turn + 0.5
            phase: Phase = "decode" if num_tokens == 1 else "prefill"
            visits.append(LayerVisit(pass_idx, phase, layer_idx, hidden, gate(hidden)[2].tolist()))
        return visits


def right(forecasts: list[Forecast], visits: list[LayerVisit]) -> list[float]:
    """Of forecasts within a pass of one token: the share of the chosen experts that were held for likely."""
    found = []
    for forecast in forecasts:
        for visit in visits[1:]:
            if visit.layer_idx == forecast.layer_idx:
                likely = set(np.argsort(-forecast.probabilities)[:2].tolist())
                found.append(len(likely & set(visit.chosen[0])) / 2)
    return found


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_it_learns_what_the_layers_between_do(num_tokens: int) -> None:
    """From one token at a time or some: what it foresees of single tokens in the end is nearly always right."""
    stream = Stream()
    weights = [gate.weight.detach().clone() for gate in stream.gates]
    predictor = GatePredictor(stream.context, lookahead=2)
    scores = []
    for pass_idx in range(400):
        visits = stream.visits(pass_idx, num_tokens if 10 < pass_idx < 360 else 1)
        forecasts = [forecast for visit in visits for forecast in predictor.predict(visit) if visit.layer_idx == 0]
        scores.append(np.mean(right(forecasts, visits)))
    assert np.mean(scores[:10]) < 0.75
    assert np.mean(scores[-40:]) > 0.95
    assert all(torch.equal(gate.weight, weight) for gate, weight in zip(stream.gates, weights, strict=True))


def test_a_gate_that_differs_from_its_matrix_once_is_never_taken_for_it() -> None:
    """Also where that is the last of the comparisons that would have made it trusted."""
    stream = Stream(num_layers=2)
    calls = 0

    class Differs(LinearGate):
        def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            nonlocal calls
            calls += 1
            logits, scores, index = super().forward(hidden)
            return logits, scores, (index + 1) % logits.shape[-1] if calls == AGREEMENTS else index

    gate = Differs(10, 16, seed=1)
    predictor = GatePredictor(PredictorContext([stream.gates[0], gate], [10, 10], [2, 2]), lookahead=1)
    for pass_idx in range(2 * AGREEMENTS):
        predictor.predict(stream.visits(pass_idx)[0])
    assert calls == 2 * AGREEMENTS  # asked each time
    assert (1, 1) not in predictor._corrected


def examples_of(predictor: GatePredictor) -> dict[tuple[int, int], int]:
    """Tokens that each (steps ahead, layer) has seen since it last learned."""
    return {
        key: sum(len(seen) for _, seen in one._examples) for key, one in predictor._corrected.items() if one._examples
    }


def predictor_of_linear(stream: Stream) -> GatePredictor:
    """One that looks one layer ahead, knows the gates as linear, and has seen nothing else."""
    predictor = GatePredictor(stream.context, lookahead=1)
    for pass_idx in range(0, 20, 4):
        for visit in stream.visits(pass_idx):
            predictor.predict(visit)
            predictor._latest.clear()  # as if there had been something between
    assert predictor._corrected.keys() == {(1, 0), (1, 1), (1, 2)}
    assert examples_of(predictor) == {}
    return predictor


def test_it_learns_from_the_same_tokens_only() -> None:
    """Of passes that take turns, what one saw says nothing about the other."""
    stream = Stream()
    predictor = predictor_of_linear(stream)
    one, other = stream.visits(100), stream.visits(101)
    for visit in (one[0], other[0], one[1], other[1]):
        predictor.predict(visit)
    assert examples_of(predictor) == {(1, 1): 1}  # of the other, which came last
    ((before, seen),) = predictor._corrected[1, 1]._examples
    assert before is other[0].gate_input
    assert seen is other[1].gate_input


@pytest.mark.parametrize(
    ("later", "num_tokens", "learned"), [(101, 1, True), (102, 1, False), (100, 1, False), (101, 2, False)]
)
def test_across_the_end_of_a_pass_it_learns_from_the_next_token(later: int, num_tokens: int, learned: bool) -> None:
    stream = Stream()
    predictor = predictor_of_linear(stream)
    predictor.predict(stream.visits(100)[2])
    predictor.predict(stream.visits(later, num_tokens)[0])
    assert examples_of(predictor) == ({(1, 0): 1} if learned else {})


def test_layers_learn_at_different_tokens() -> None:
    """Else one token in eight would wait for all of them."""
    stream = Stream(num_layers=8)
    predictor = GatePredictor(stream.context, lookahead=1)
    learned: list[list[int]] = []
    learn = LinearFit.learn
    now: list[int] = []

    def spy(fit: LinearFit, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        now.append(len(hidden))
        learn(fit, hidden, logits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LinearFit, "learn", spy)
        for pass_idx in range(40):
            now.clear()
            for visit in stream.visits(pass_idx):
                predictor.predict(visit)
            learned.append(list(now))
    assert max(map(len, learned)) <= 2
    assert [sum(map(len, learned[start : start + 8])) for start in (16, 24, 32)] == [8, 8, 8]
    assert {size for sizes in learned[16:] for size in sizes} == {8}
