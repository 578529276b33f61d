"""What users do with a model besides asking it: training, checkpointing, another vocabulary, another kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from untouched import leaving_untouched

from life.models import FAMILIES, SOME_FAMILIES, ask, assert_unharmed, build, opened, patched, prompt, with_families
from promoe.errors import UnsupportedModelError

GRADIENTS = r"gradients enabled.*supports inference only.*torch\.no_grad\(\)"


def loss_of(model: Any) -> torch.Tensor:
    """Something to differentiate."""
    loss: torch.Tensor = model(**prompt(model)).logits.square().mean()
    return loss


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_that_could_be_followed_by_a_backward_is_refused(family: str) -> None:
    """In training mode or not; and the next answer is as before."""
    model = build(family)
    expected = ask(model)
    with patched(model), leaving_untouched(model):
        for mode in (model.train, model.eval):
            mode()
            with pytest.raises(UnsupportedModelError, match=GRADIENTS):
                loss_of(model)
        assert_unharmed(model, expected)


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_training_mode_without_gradients_is_served(family: str) -> None:
    """Whatever a family does differently in training is its own; the experts are the same."""
    model = build(family)
    model.train()
    torch.manual_seed(1)
    expected = ask(model)
    model.eval()
    with patched(model):
        model.train()
        torch.manual_seed(1)
        assert_unharmed(model, expected)
        model.eval()


@pytest.mark.parametrize(("family", "kind"), with_families(["reentrant", "not reentrant"], with_all=["not reentrant"]))
def test_gradient_checkpointing(family: str, kind: str) -> None:
    """To switch it on changes no answer. A training step is refused, at the latest where its backward computes again."""
    model = build(family)
    expected = ask(model)
    with patched(model):
        model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
        assert_unharmed(model, expected)
        model.train()
        with pytest.raises(UnsupportedModelError, match=GRADIENTS):
            loss_of(model).backward()
        model.eval()
        assert_unharmed(model, expected)
        model.gradient_checkpointing_disable()
        assert_unharmed(model, expected)
    assert_unharmed(model, expected)
    model.train()
    loss_of(model).backward()  # as any other model


def test_gradient_checkpointing_with_experts_in_files() -> None:
    """A step of training is refused there too."""
    with opened("qwen2_moe") as model:
        expected = ask(model)
        model.gradient_checkpointing_enable()
        model.train()
        with pytest.raises(UnsupportedModelError, match=GRADIENTS):
            loss_of(model).backward()
        model.eval()
        assert_unharmed(model, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_vocabulary(family: str) -> None:
    """Embeddings and head are replaced under the patch: the answers are those of a model to which the same was done."""
    model, twin = build(family), build(family)
    before = ask(model)
    torch.manual_seed(2)
    twin.resize_token_embeddings(140)
    expected = ask(twin)
    assert (before[0].shape[-1], expected[0].shape[-1]) == (128, 140)
    with patched(model):
        ask(model)
        torch.manual_seed(2)
        model.resize_token_embeddings(140)
        assert_unharmed(model, expected)
    assert_unharmed(model, expected)


def test_another_vocabulary_with_experts_in_files() -> None:
    """Nothing of that concerns the experts."""
    with opened("qwen2_moe") as model:
        before = ask(model)
        model.resize_token_embeddings(140)
        found = ask(model)
        assert found[0].shape[-1] == 140
        assert torch.equal(found[0][..., :128], before[0])


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_another_implementation_of_the_experts(family: str) -> None:
    """It may be chosen while the model is patched, as often as one likes."""
    model = build(family)
    implementations = ("eager", "batched_mm", "grouped_mm", "eager")
    expected = []
    for implementation in implementations:
        model.set_experts_implementation(implementation)
        expected.append(ask(model))
    with patched(model):
        for implementation, answer in zip(implementations, expected, strict=True):
            model.set_experts_implementation(implementation)
            assert_unharmed(model, answer)
    assert model.get_experts_implementation() == {"": "eager"}
    assert_unharmed(model, expected[-1])


def test_an_implementation_that_cannot_be_served_is_refused_by_the_next_forward() -> None:
    """Until another is chosen."""
    model = build("qwen2_moe")
    expected = ask(model)
    with patched(model):
        model.config._experts_implementation = "deepgemm"
        with pytest.raises(
            UnsupportedModelError, match=r"experts_implementation='deepgemm'.*set_experts_implementation"
        ):
            ask(model)
        model.set_experts_implementation("grouped_mm")
        assert_unharmed(model, expected)


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_freezing_and_thawing(family: str) -> None:
    """What requires a gradient is the model's own affair, and stays as it was left."""
    model = build(family)
    expected = ask(model)
    with patched(model):
        model.requires_grad_(False)
        loss = loss_of(model)  # with gradients enabled, but nothing would get one
        assert not loss.requires_grad
        assert_unharmed(model, expected)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.requires_grad_(True)
    loss_of(model).backward()
