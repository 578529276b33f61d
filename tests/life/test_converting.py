"""Another dtype or device for a patched model, or for a part of it: refused before anything was moved, or no change."""

from __future__ import annotations

from collections.abc import Callable
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
from promoe.errors import UnsupportedModelError
from promoe.experts.guard import is_guard

Change = Callable[[Any], Any]
REFUSED: dict[str, tuple[Change, str]] = {
    "half": (lambda part: part.half(), r"dtype \(torch.float32 to torch.float16\)"),
    "bfloat16": (lambda part: part.bfloat16(), r"dtype \(torch.float32 to torch.bfloat16\)"),
    "double": (lambda part: part.double(), r"dtype \(torch.float32 to torch.float64\)"),
    "to(dtype)": (lambda part: part.to(torch.float16), r"dtype \(torch.float32 to torch.float16\)"),
    "to(dtype=)": (lambda part: part.to(dtype=torch.bfloat16), r"dtype \(torch.float32 to torch.bfloat16\)"),
    "type": (lambda part: part.type(torch.float16), r"dtype \(torch.float32 to torch.float16\)"),
    "to(meta)": (lambda part: part.to("meta"), "move to meta.* on the CPU"),
    "to(device, dtype)": (lambda part: part.to("meta", torch.float16), r"dtype \(torch.float32 to torch.float16\)"),
    "to_empty(meta)": (lambda part: part.to_empty(device="meta"), "move to meta.* on the CPU"),
}
NO_CHANGE: dict[str, Change] = {
    "float": lambda part: part.float(),
    "cpu": lambda part: part.cpu(),
    "to(device)": lambda part: part.to("cpu"),
    "to(device object)": lambda part: part.to(torch.device("cpu")),
    "to(dtype)": lambda part: part.to(torch.float32),
    "to(device, dtype)": lambda part: part.to("cpu", torch.float32, non_blocking=True),
    "type": lambda part: part.type(torch.float32),
}


def check_refused(model: Any) -> None:
    """Each part refuses each change, and everything is as it was."""
    expected = ask(model)
    with leaving_untouched(model):
        for part in parts_with_experts(model):
            for change, match in REFUSED.values():
                with pytest.raises(
                    UnsupportedModelError, match=rf"cannot (change its )?{match}.*Nothing was changed\. Unp"
                ):
                    change(part)
    assert_unharmed(model, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_dtype_or_device_is_refused(family: str) -> None:
    """Whichever part of the model is asked, as long as experts are in it or it is in experts."""
    model = build(family)
    with patched(model):
        check_refused(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_also_with_experts_in_files(family: str) -> None:
    """These have no values to convert."""
    with opened(family) as model:
        check_refused(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_dtype_and_device_is_no_change(family: str) -> None:
    """The very same tensors, in the same order."""
    model = build(family)
    expected = ask(model)
    with patched(model):
        with leaving_untouched(model):
            for part in parts_with_experts(model):
                for change in NO_CHANGE.values():
                    assert change(part) is part
        assert_unharmed(model, expected)


def test_the_same_dtype_and_device_is_no_change_for_experts_in_files() -> None:
    """They stay where they are."""
    with opened("qwen2_moe") as model:
        expected = ask(model)
        with leaving_untouched(model):
            for change in NO_CHANGE.values():
                assert change(model) is model
        assert sum(map(is_guard, model.parameters())) == 6
        assert_unharmed(model, expected)


def test_what_is_no_change_follows_the_models_own_dtype() -> None:
    """A model in bf16 refuses fp32, not bf16."""
    model = build("qwen2_moe", dtype=torch.bfloat16)
    expected = ask(model)
    with patched(model), leaving_untouched(model):
        assert model.bfloat16().to(torch.bfloat16) is model
        with pytest.raises(UnsupportedModelError, match=r"dtype \(torch.bfloat16 to torch.float32\)"):
            model.float()
        assert_unharmed(model, expected)


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_what_is_refused_is_possible_once_the_model_is_unpatched(family: str) -> None:
    """The remedy, and then the model can be patched in its new dtype."""
    model = build(family)
    in_fp32 = ask(model)
    with patched(model):
        ask(model)
    model.bfloat16()
    expected = ask(model)
    assert differs([tensor.float() for tensor in expected], [tensor.float() for tensor in in_fp32])
    with patched(model):
        assert_unharmed(model, expected)


def test_a_part_without_experts_may_be_converted() -> None:
    """The gates' dtype, for example, is no business of slots."""
    model = build("qwen2_moe")
    gate = promoe.find_moe_layers(model)[1].gate
    with patched(model):
        served = ask(model)
        gate.double()
        assert {parameter.dtype for parameter in gate.parameters()} == {torch.float64}
        gate.float()
        assert_unharmed(model, served)
