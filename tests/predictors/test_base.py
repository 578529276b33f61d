from __future__ import annotations

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from promoe.predictors import KINDS, Forecast, LayerVisit, Predictor, PredictorContext, Traits
from promoe.predictors.base import any_token
from promoe.predictors.reference import OraclePredictor
from promoe.scheduler.reuse import LearnedReuse


def test_one_token_is_itself() -> None:
    assert any_token(np.array([[0.0, 0.3, 1.0]])) == pytest.approx([0.0, 0.3, 1.0])


def test_several_tokens() -> None:
    """1 - (1 - p)(1 - q), by hand."""
    per_token = np.array([[0.5, 0.1, 0.0, 1.0], [0.5, 0.2, 0.0, 0.3]])
    assert any_token(per_token) == pytest.approx([0.75, 0.28, 0.0, 1.0])
    three = np.full((3, 2), 0.9)
    assert any_token(three) == pytest.approx([0.999, 0.999])


def test_no_token_uses_nothing() -> None:
    assert any_token(np.zeros((0, 3))).tolist() == [0.0, 0.0, 0.0]


def test_more_tokens_never_make_an_expert_less_likely() -> None:
    per_token = np.random.default_rng(0).random((6, 10))
    shares = np.stack([any_token(per_token[:count]) for count in range(1, 7)])
    assert (np.diff(shares, axis=0) >= 0).all()
    assert any_token(per_token[::-1]) == pytest.approx(shares[-1])
    assert (shares <= 1).all()


def test_some_tokens_of_a_visit_with_what_belongs_to_them() -> None:
    of_tokens, other, bias = torch.arange(12).reshape(2, 3, 2), torch.arange(3), torch.zeros(6)
    chosen = [[token, token + 1] for token in range(6)]
    hidden = torch.arange(6.0)[:, None]
    visit = LayerVisit(3, "decode", 1, hidden, chosen, (of_tokens, other), {"a": of_tokens, "b": "c"}, (2, 3))
    assert not replace(visit, token_shape=(6,)).is_of_tokens(bias), "there may be as many experts as tokens"
    some = visit.of_some(slice(None, None, 4))
    assert (some.pass_idx, some.phase, some.layer_idx, some.all_tokens) == (3, "decode", 1, 6)
    assert some.gate_input.tolist() == [[0.0], [4.0]]
    assert some.chosen == [[0, 1], [4, 5]]
    assert some.token_shape == (1, 2)
    assert some.gate_args[0].tolist() == some.gate_kwargs["a"].tolist() == [[[0, 1], [8, 9]]]
    assert some.gate_args[1] is other
    assert some.gate_kwargs["b"] == "c"
    assert some.is_of_tokens(some.gate_args[0])
    hidden.zero_()
    assert some.gate_input.tolist() == [[0.0], [4.0]], "a copy"


@pytest.mark.parametrize("layers", [1, 3])
def test_a_context_counts_its_layers(layers: int) -> None:
    context = PredictorContext([nn.Identity()] * layers, [8] * layers, [2] * layers)
    assert context.num_layers == layers


def test_what_predictors_get_and_give_is_frozen() -> None:
    context = PredictorContext([nn.Identity()], [8], [2])
    visit = LayerVisit(1, "decode", 0, torch.zeros(1, 4), [[0, 1]])
    forecast = Forecast(1, 0, np.zeros(8))
    for value, field in ((context, "top_k"), (visit, "layer_idx"), (forecast, "steps_ahead")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field, 3)


def test_visits_share_no_arguments() -> None:
    visits = [LayerVisit(1, "decode", 0, torch.zeros(1, 4), [[0, 1]]) for _ in range(2)]
    assert visits[0].gate_args == ()
    assert visits[0].gate_kwargs == {}
    assert visits[0].gate_kwargs is not visits[1].gate_kwargs


class Plain:
    """All that is required of a predictor."""

    def predict(self, visit: LayerVisit) -> list[Forecast]:
        return []


def test_a_predictor_need_not_mention_any_trait() -> None:
    predictor: Predictor = Plain()
    assert Traits.of(predictor) == Traits() == Traits.of(None)
    assert (Traits().quick, Traits().needs_every_visit, Traits().reuse) == (False, False, None)


@pytest.mark.parametrize("name", ["quick", "needs_every_visit"])
def test_a_trait_is_an_attribute_of_the_predictor(name: str) -> None:
    predictor = Plain()
    setattr(predictor, name, True)
    assert Traits.of(predictor) == Traits(**{name: True})


def test_reuse_is_foreseen_where_something_is_taken_for_foreseen_at_first() -> None:
    predictor = Plain()
    learned = LearnedReuse.foreseeing(np.zeros((1, 4), dtype=np.float32))
    predictor.reuse = learned  # type: ignore[attr-defined]
    assert Traits.of(predictor).reuse is learned
    assert Traits.of(predictor).foresees_reuse
    assert not Traits(reuse=learned._replace(foreseen=None)).foresees_reuse
    assert not Traits().foresees_reuse


def test_traits_of_the_predictors_that_come_with_promoe() -> None:
    context = PredictorContext([nn.Linear(4, 8)] * 2, [8, 8], [2, 2])
    for kind, make in KINDS.items():
        assert Traits.of(make(context, 1)) == Traits(quick=True, needs_every_visit=kind == "correlation")
    assert Traits.of(OraclePredictor(context, 1, [])) == Traits(needs_every_visit=True)
