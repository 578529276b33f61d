"""Copies of a patched model, and weights loaded into it."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from untouched import leaving_untouched

import promoe
from life.models import (
    FAMILIES,
    SOME_FAMILIES,
    ask,
    assert_unharmed,
    build,
    differs,
    opened,
    parts_with_experts,
    patched,
)
from promoe.errors import PatchStateError, PromoeError
from promoe.runtime.resident import ResidentHandle


def ways_to_copy(model: Any) -> list[Any]:
    """What makes another model, or its bytes, of one."""
    return [
        lambda: copy.deepcopy(model),
        lambda: pickle.dumps(model),
        lambda: torch.save(model, io.BytesIO()),
    ]


def check_no_copies(model: Any) -> None:
    """Of no part that has experts, and nothing is changed by the attempt."""
    expected = ask(model)
    with leaving_untouched(model):
        for part in parts_with_experts(model):
            for copying in ways_to_copy(part):
                with pytest.raises(PromoeError, match=r"can(not)? be (copied|pickled|copied or pickled)\b.*\."):
                    copying()
    assert_unharmed(model, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_copies_are_refused(family: str) -> None:
    """They would have our hooks, and neither slots nor threads."""
    model = build(family)
    with patched(model):
        check_no_copies(model)
        with pytest.raises(PatchStateError, match=r"Unpatch it first \(promoe\.unpatch\)"):
            copy.deepcopy(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_copies_of_experts_in_files_are_refused(family: str) -> None:
    """There is nothing to copy."""
    with opened(family) as model:
        check_no_copies(model)


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_after_unpatching_copies_are_as_before(family: str) -> None:
    """The remedy that the refusal names."""
    model = build(family)
    expected = ask(model)
    with patched(model):
        ask(model)
    assert_unharmed(copy.deepcopy(model), expected)
    assert_unharmed(pickle.loads(pickle.dumps(model)), expected)


def test_a_copy_of_a_model_whose_experts_all_fit_is_independent() -> None:
    """Nothing of it is ours but the handle, and each has its own."""
    model = build("qwen2_moe")
    expected = ask(model)
    with pytest.warns(UserWarning, match="used in place"):
        promoe.patch(model)
    copied = copy.deepcopy(model)
    assert isinstance(copied.promoe, ResidentHandle)
    promoe.unpatch(copied)
    assert not hasattr(copied, "promoe")
    assert hasattr(model, "promoe")
    assert_unharmed(copied, expected)
    restored = pickle.loads(pickle.dumps(model))
    promoe.unpatch(model)
    promoe.unpatch(restored)
    assert_unharmed(restored, expected)


# -- loading ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_other_weights_for_experts_are_refused(family: str) -> None:
    """Slots hold the old ones. Nothing of the other modules is loaded either, by the whole model or by a part."""
    model = build(family)
    others = build(family, seed=1).state_dict()
    with patched(model):
        expected = ask(model)
        names = {module: f"{name}." if name else "" for name, module in model.named_modules()}
        with leaving_untouched(model):
            for part in parts_with_experts(model):
                prefix = names[part]
                state = {
                    name.removeprefix(prefix): tensor for name, tensor in others.items() if name.startswith(prefix)
                }
                assert state.keys() == part.state_dict().keys()
                for strict, assign in ((True, False), (False, True)):
                    with pytest.raises(
                        PatchStateError,
                        match=r"cannot load a state_dict.*Unpatch it, load the state_dict, and patch it",
                    ):
                        part.load_state_dict(state, strict=strict, assign=assign)
        assert_unharmed(model, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_weights_for_other_modules_are_loaded(family: str) -> None:
    """As those of an adapter are; the answer is then that of a model with these weights."""
    model, twin = build(family), build(family)
    experts = tuple(layer.name for layer in promoe.find_moe_layers(model))
    others = build(family, seed=1).state_dict()
    some = {name: tensor for name, tensor in others.items() if not name.startswith(experts)}
    before = ask(twin)
    twin.load_state_dict(some, strict=False)
    expected = ask(twin)
    assert differs(expected, before)
    with patched(model):
        assert_unharmed(model, before)
        missing, unexpected = model.load_state_dict(some, strict=False)
        assert {name for name in missing if name.startswith(experts)} == others.keys() - some.keys()
        assert not unexpected
        assert_unharmed(model, expected)
    assert_unharmed(model, expected)


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_other_weights_can_be_loaded_between_two_patches(family: str) -> None:
    """The remedy that the refusal names."""
    model, other = build(family), build(family, seed=1)
    expected = ask(other)
    with patched(model):
        assert differs(ask(model), expected)
    model.load_state_dict(other.state_dict())
    with patched(model):
        assert_unharmed(model, expected)


def test_other_weights_for_experts_in_files_are_refused() -> None:
    """They are where they are."""
    with opened("qwen2_moe") as model:
        expected = ask(model)
        with leaving_untouched(model), pytest.raises(PatchStateError, match="cannot load a state_dict"):
            model.load_state_dict(build("qwen2_moe", seed=1).state_dict())
        assert_unharmed(model, expected)
