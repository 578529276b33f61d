"""The correction of a gate: it starts as the gate, moves towards what is seen, and never to where it cannot come back from."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.nn.functional import linear

from promoe.predictors import linear_fit
from promoe.predictors.linear_fit import LinearFit

EXPERTS, HIDDEN = 12, 24


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error_of(fit: LinearFit, hidden: torch.Tensor, logits: torch.Tensor) -> float:
    return float((torch.tensor(fit(hidden)) - logits).norm() / logits.norm())


@pytest.mark.parametrize("most", [10**6, 1], ids=["numpy", "torch"])
@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_starts_as_the_gate(
    has_bias: bool, dtype: torch.dtype, num_tokens: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_fit, "ONE_THREAD_ELEMENTS", most)
    weight, bias = random(EXPERTS, HIDDEN).to(dtype), random(EXPERTS, seed=1).to(dtype) if has_bias else None
    hidden = random(num_tokens, HIDDEN, seed=2).to(dtype)
    expected = linear(hidden.double(), weight.double(), None if bias is None else bias.double())
    assert LinearFit(weight, bias)(hidden) == pytest.approx(expected.numpy(), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_it_is_in_fp32_whatever_torch_makes_by_default(default: torch.dtype) -> None:
    weight, hidden = random(EXPERTS, HIDDEN), random(1, HIDDEN, seed=2)
    torch.set_default_dtype(default)
    try:
        fit = LinearFit(weight)
        found = fit(hidden)
        inputs, logits = random(8, HIDDEN, seed=3).float(), random(8, EXPERTS, seed=4).float()
        before = error_of(fit, inputs, logits)
        fit.learn(inputs, logits)
        assert error_of(fit, inputs, logits) < before
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == pytest.approx(linear(hidden, weight).numpy(), rel=1e-5, abs=1e-5)


def test_the_gate_itself_stays_as_it_is() -> None:
    weight, bias = random(EXPERTS, HIDDEN), random(EXPERTS, seed=1)
    before = weight.clone(), bias.clone()
    fit = LinearFit(weight, bias)
    fit.learn(random(8, HIDDEN, seed=2), random(8, EXPERTS, seed=3))
    assert torch.equal(weight, before[0])
    assert torch.equal(bias, before[1])


@pytest.mark.parametrize("made_in", [torch.inference_mode, nullcontext])
@pytest.mark.parametrize("used_in", [torch.inference_mode, nullcontext])
@pytest.mark.parametrize("most", [10**6, 1], ids=["numpy", "torch"])
def test_what_follows_linearly_is_learned_from_some_batches(
    most: int, made_in: type, used_in: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later gate sees what the earlier one saw, turned, scaled and moved; some columns are as large as trained models'."""
    monkeypatch.setattr(linear_fit, "ONE_THREAD_ELEMENTS", most)
    weight = random(EXPERTS, HIDDEN)
    change, moved = torch.eye(HIDDEN) + 0.2 * random(HIDDEN, HIDDEN, seed=1), random(HIDDEN, seed=2)
    outlier = torch.zeros(HIDDEN)
    outlier[:2] = 40.0
    with made_in():
        fit = LinearFit(weight)
    errors = []
    for batch in range(40):
        before = random(8, HIDDEN, seed=10 + batch) + outlier
        logits = linear(before @ change + moved, weight)
        with used_in():
            errors.append(max(error_of(fit, before, logits), error_of(fit, before[:1], logits[:1])))
            fit.learn(before, logits)
    assert errors[0] > 0.15
    assert max(errors[20:]) < 0.25 * errors[0]
    assert max(errors[35:]) < 0.06 * errors[0]


def test_logits_that_follow_from_nothing_do_not_carry_it_away() -> None:
    weight = random(EXPERTS, HIDDEN)
    fit = LinearFit(weight)
    for batch in range(300):
        fit.learn(random(8, HIDDEN, seed=batch), 3 * random(8, EXPERTS, seed=1000 + batch))
    hidden = random(200, HIDDEN, seed=1)
    assert torch.tensor(fit(hidden)).norm() < 3 * linear(hidden, weight).norm()


@pytest.mark.parametrize("place", ["hidden", "logits"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_teaches_nothing(value: float, place: str) -> None:
    fit, untouched = LinearFit(random(EXPERTS, HIDDEN)), LinearFit(random(EXPERTS, HIDDEN))
    hidden, logits = random(8, HIDDEN, seed=1), random(8, EXPERTS, seed=2)
    {"hidden": hidden, "logits": logits}[place][3, 5] = value
    fit.learn(hidden, logits)
    x = random(2, HIDDEN, seed=3)
    assert fit(x) == untouched(x)
    fit.learn(random(8, HIDDEN, seed=1), random(8, EXPERTS, seed=2))
    assert fit(x) != untouched(x)


@pytest.mark.parametrize("hidden", [torch.zeros(8, HIDDEN), torch.ones(8, HIDDEN), random(1, HIDDEN)])
def test_inputs_that_are_all_alike_teach_nothing(hidden: torch.Tensor) -> None:
    fit, untouched = LinearFit(random(EXPERTS, HIDDEN)), LinearFit(random(EXPERTS, HIDDEN))
    fit.learn(hidden, random(len(hidden), EXPERTS, seed=2))
    x = random(2, HIDDEN, seed=3)
    assert fit(x) == untouched(x)


def test_a_huge_input_among_others_leaves_numbers() -> None:
    fit = LinearFit(random(EXPERTS, HIDDEN))
    for batch in range(5):
        hidden = random(8, HIDDEN, seed=batch)
        hidden[batch] *= 1e18
        fit.learn(hidden, linear(hidden, random(EXPERTS, HIDDEN, seed=9)))
    assert torch.tensor(fit(random(4, HIDDEN, seed=1))).isfinite().all()


def test_autocast_makes_no_difference() -> None:
    """In a forward under it, a quick predictor predicts."""
    fits = [LinearFit(random(EXPERTS, HIDDEN)) for _ in range(2)]
    found = []
    for fit, enabled in zip(fits, (False, True), strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            fit.learn(random(8, HIDDEN, seed=1), random(8, EXPERTS, seed=2))
            found.append(fit(random(3, HIDDEN, seed=3)))
    assert found[0] == found[1]
