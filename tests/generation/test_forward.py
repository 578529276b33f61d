"""Loops of one's own that call the model directly, under every grad mode and autocast: the bits of the unmodified model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from served import PROMPTS, predictor_of, served
from tiny_models import IMPLEMENTATIONS
from transformers import DynamicCache, PreTrainedModel

from generation.compared import FAMILY, SLOTS, assert_same, assert_same_bits, unmodified
from promoe.errors import UnsupportedModelError

PADDED = PROMPTS["padded"]
ONE = PROMPTS["one"]


@torch.no_grad()
def answer(model: PreTrainedModel, **kwargs: Any) -> Any:
    return model(**{**PADDED, **kwargs})


# -- what a forward returns -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 1, 3, torch.tensor([0, 5])], ids=["all", "last", "last three", "chosen"])
def test_logits_to_keep(kept: Any) -> None:
    assert_same(lambda model: answer(model, logits_to_keep=kept).logits)


def test_all_that_a_forward_can_return() -> None:
    """Logits, loss, auxiliary loss, the KV cache, hidden states and router logits of every layer."""
    asked = {"output_hidden_states": True, "output_router_logits": True, "labels": PADDED["input_ids"]}
    found: list[Any] = []

    def call(model: PreTrainedModel) -> Any:
        found.append(answer(model, **asked))
        return found[-1]

    assert_same(call)
    assert len(found[-1].router_logits) == 3
    assert len(found[-1].hidden_states) == 4
    assert found[-1].aux_loss is not None


def test_all_that_generate_can_return() -> None:
    asked = ("logits", "scores", "hidden_states", "router_logits", "attentions")
    kwargs = {"return_dict_in_generate": True, **{f"output_{name}": True for name in asked}}

    def call(model: PreTrainedModel) -> Any:
        model.set_attn_implementation("eager")  # the only one that has attentions to return
        try:
            out = model.generate(**ONE, max_new_tokens=4, do_sample=False, **kwargs)
        finally:
            model.set_attn_implementation("sdpa")
        assert [len(out[name]) for name in ("attentions", "hidden_states")] == [4, 4]
        return out

    assert_same(call)


@pytest.mark.parametrize("part", ["forward", "model"])
def test_calling_past_the_models_own_hooks(part: str) -> None:
    """No pass is counted then, but its layers are served all the same."""
    stats = assert_same(lambda model: torch.no_grad()(getattr(model, part))(**PADDED))
    assert stats.prefill.passes == 0
    assert stats.prefill.layer_visits == 3


# -- loops ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def without_cache(model: PreTrainedModel) -> list[torch.Tensor]:
    ids, logits = ONE["input_ids"], []
    for _ in range(4):
        logits.append(model(ids, use_cache=False).logits)
        ids = torch.cat([ids, logits[-1][:, -1:].argmax(-1)], dim=1)
    return logits


@torch.no_grad()
def with_cache(model: PreTrainedModel) -> tuple[list[torch.Tensor], DynamicCache]:
    cache, ids, logits = DynamicCache(config=model.config), ONE["input_ids"], []
    for _ in range(4):
        logits.append(model(ids, past_key_values=cache).logits)
        ids = logits[-1][:, -1:].argmax(-1)
    return logits, cache


@torch.no_grad()
def contrastive(model: PreTrainedModel, candidates: int = 3, penalty: float = 0.6) -> list[torch.Tensor]:
    """Of the likeliest tokens, the one whose hidden state is least like any before; the cache is cut back each time."""
    out = model(**ONE, output_hidden_states=True)
    cache, context, logits = out.past_key_values, out.hidden_states[-1], [out.logits[:, -1]]
    for _ in range(3):
        likely = logits[-1].softmax(-1).topk(candidates)
        cache.batch_repeat_interleave(candidates)
        out = model(likely.indices.view(-1, 1), past_key_values=cache, output_hidden_states=True)
        hidden = out.hidden_states[-1]
        alike = torch.cosine_similarity(context, hidden, dim=-1).amax(-1)
        best = ((1 - penalty) * likely.values[0] - penalty * alike).argmax(keepdim=True)
        cache.batch_select_indices(best)
        context = torch.cat([context, hidden[best]], dim=1)
        logits.append(out.logits[best, -1])
    return logits


@torch.no_grad()
def rejected_drafts(model: PreTrainedModel) -> list[torch.Tensor]:
    """Three tokens are tried, and taken back from the cache, before the next one is computed."""
    out = model(**ONE)
    cache, logits = out.past_key_values, [out.logits]
    for _ in range(3):
        logits.append(model(torch.tensor([[3, 4, 5]]), past_key_values=cache).logits)
        cache.crop(-3)
        logits.append(model(logits[0][:, -1:].argmax(-1), past_key_values=cache).logits)
    return logits


@pytest.mark.parametrize("predictor", ["gate", "random"])
@pytest.mark.parametrize("loop", [without_cache, with_cache, contrastive, rejected_drafts])
def test_loops_of_ones_own(loop: Callable[[PreTrainedModel], Any], predictor: str) -> None:
    assert_same(loop, predictor=predictor)


# -- grad modes and autocast ------------------------------------------------------------------------------------

GRAD_MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "neither": nullcontext,
}


@pytest.mark.parametrize("predictor", ["gate", "trained"])
def test_generate_under_every_grad_mode_in_turn(predictor: str) -> None:
    """Nothing that one of them leaves behind, such as an inference tensor, gets in the way of the next."""
    kwargs: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    wanted = unmodified().generate(**PADDED, **kwargs, output_logits=True)
    with served(FAMILY, cache=SLOTS, predictor=predictor_of(predictor, unmodified(), (), lookahead=1)) as model:
        for name in (*GRAD_MODES, *reversed(GRAD_MODES)):
            with GRAD_MODES[name]():
                assert_same_bits(model.generate(**PADDED, **kwargs, output_logits=True), wanted)
        assert model.promoe.stats().evictions > 0
        assert not model.promoe.runtime.predictor_failed


def test_a_forward_with_gradients_is_refused_and_the_next_is_right() -> None:
    wanted = answer(unmodified()).logits
    with served(FAMILY, cache=SLOTS, predictor="gate") as model:
        with pytest.raises(UnsupportedModelError, match=r"gradients enabled.*torch\.no_grad\(\)"):
            model(**PADDED)
        assert torch.equal(answer(model).logits, wanted)
        model.requires_grad_(False)
        try:
            assert torch.equal(model(**PADDED).logits, wanted)  # gradients enabled, but nothing has any
        finally:
            model.requires_grad_(True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", [FAMILY, "gpt_oss"])
def test_under_autocast(family: str, implementation: str) -> None:
    """Weights that autocast has cast are kept for the whole context; those of a slot must not be."""

    @torch.no_grad()
    def call(model: PreTrainedModel) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(**PADDED).logits
            assert logits.dtype == torch.bfloat16
            return logits, model.generate(**ONE, max_new_tokens=4, do_sample=False)

    assert_same(call, family=family, implementation=implementation)
