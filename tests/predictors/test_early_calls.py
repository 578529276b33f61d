"""Asking gates out of their turn: whose arguments they get, in which shape, and when they cannot be asked."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from promoe.predictors import LayerVisit
from promoe.predictors.early_calls import GateCaller


class Gate(nn.Module):
    """Returns what it was called with."""

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return hidden, args, kwargs


class OtherGate(Gate):
    """Of another class."""


def visit(layer_idx: int, tokens: int = 3, *args: Any, shape: tuple[int, ...] = (), **kwargs: Any) -> LayerVisit:
    hidden = torch.arange(tokens * 4.0).view(tokens, 4)
    return LayerVisit(1, "decode", layer_idx, hidden, [[0]] * tokens, args, kwargs, shape)


def test_the_input_has_the_shape_in_which_the_visited_gate_got_it() -> None:
    caller = GateCaller([Gate(), Gate()])
    assert caller.ask(1, visit(0, 6))[0].shape == (6, 4)
    assert caller.ask(1, visit(0, 6, shape=(2, 3)))[0].shape == (2, 3, 4)
    assert caller.ask(1, visit(0, 6, shape=(6,)))[0].shape == (6, 4)


def test_what_belongs_to_a_gate_is_its_own_and_what_belongs_to_the_tokens_is_the_visits() -> None:
    caller = GateCaller([Gate(), Gate()])
    ids, later_ids = torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])
    first_bias, second_bias = torch.zeros(8), torch.ones(8)
    caller.saw(visit(1, 3, ids, second_bias, scale=2.0))
    asked = visit(0, 3, later_ids, first_bias, scale=1.0)
    caller.saw(asked)
    _, args, kwargs = caller.ask(1, asked)
    assert args[0] is later_ids
    assert args[1] is second_bias
    assert kwargs == {"scale": 2.0}


def test_before_its_first_call_a_gate_gets_what_another_of_its_class_got() -> None:
    caller = GateCaller([Gate(), Gate()])
    bias = torch.zeros(8)
    assert caller.ask(1, visit(0, 3, bias))[1] == (bias,)


def test_a_gate_of_another_class_gets_nothing_that_was_not_its_own() -> None:
    caller = GateCaller([Gate(), OtherGate(), OtherGate()])
    bias = torch.zeros(8)
    caller.saw(visit(1, 3, bias))
    asked = visit(0, 3, torch.tensor([1, 2, 3]))
    assert caller.ask(1, asked)[1] == (bias,)
    assert caller.ask(2, asked)[1] == ()


def test_a_gate_that_wants_what_only_its_own_visit_has_cannot_be_asked() -> None:
    caller = GateCaller([Gate(), OtherGate()])
    caller.saw(visit(1, 3, torch.tensor([1, 2, 3])))
    assert caller.ask(1, visit(0, 1)) is None


def test_a_gate_that_draws_random_numbers_is_not_asked_and_draws_none() -> None:
    class Lucky(Gate):
        def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return hidden + torch.rand_like(hidden)

    caller = GateCaller([Lucky(), Lucky()])
    before = torch.get_rng_state()
    for _ in range(2):
        assert caller.ask(1, visit(0)) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_no_hook_of_a_gate_fires() -> None:
    gate = Gate()

    def fail(*args: Any) -> None:
        raise AssertionError("a hook fired")

    gate.register_forward_hook(fail)
    gate.register_forward_pre_hook(fail)
    assert torch.equal(GateCaller([Gate(), gate]).ask(1, visit(0))[0], visit(0).gate_input)
