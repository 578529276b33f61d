"""Every way in which `generate` decodes gives the tokens and scores of the unmodified model."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from served import PROMPTS, LinkOver, predictor_of, record, served
from tiny_models import token_ids
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from generation.compared import FAMILY, SLOTS, Call, assert_same, assert_same_bits, assert_served, seeded, unmodified
from promoe.stores import Chunk
from promoe.transfer.links import HostLink

PADDED = PROMPTS["padded"]
ONE = PROMPTS["one"]
# Half of all tokens are in it: a new one is often found, and what followed it is proposed.
LONG = {"input_ids": token_ids(1, 90, seed=4), "attention_mask": torch.ones(1, 90, dtype=torch.long)}
GREEDY: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
SAMPLED: dict[str, Any] = {"max_new_tokens": 5, "do_sample": True, "top_k": 30, "temperature": 1.3}

# Prompt, arguments of generate, and passes of several tokens (prefill) and of one token per sequence (decode).
MODES: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], tuple[int, int]]] = {
    "greedy": (PADDED, GREEDY, (1, 4)),
    "without a cache": (PADDED, {**GREEDY, "use_cache": False}, (5, 0)),
    "sampling": (PADDED, SAMPLED, (1, 4)),
    "several sequences per prompt": (PADDED, {**SAMPLED, "num_return_sequences": 3}, (1, 4)),
    "beam search": (PADDED, {**GREEDY, "num_beams": 3}, (1, 4)),
    "several beams sampled": (PADDED, {**SAMPLED, "num_beams": 3, "num_return_sequences": 2}, (1, 4)),
    "guidance": (ONE, {**GREEDY, "guidance_scale": 1.5}, (1, 9)),
    "static cache": (PADDED, {**GREEDY, "cache_implementation": "static"}, (1, 4)),
    # 9 tokens in pieces of 4, 4 and 1.
    "prefill in pieces": (PADDED, {**GREEDY, "prefill_chunk_size": 4}, (2, 5)),
    "pieces, static cache": (PADDED, {**GREEDY, "prefill_chunk_size": 4, "cache_implementation": "static"}, (2, 5)),
}
# Several tokens are proposed and checked in one pass, so there are more prefills than prompts.
PROPOSING: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]] = {
    "prompt lookup": (LONG, {**GREEDY, "max_new_tokens": 12, "prompt_lookup_num_tokens": 3}),
    "prompt lookup, sampled": (LONG, {**SAMPLED, "max_new_tokens": 12, "prompt_lookup_num_tokens": 3}),
    "the model's own first layer": (ONE, {**GREEDY, "assistant_early_exit": 1}),
}


def generating(prompt: dict[str, torch.Tensor], **kwargs: Any) -> Call:
    """A call of generate that returns its tokens and each token's logits and scores."""
    details = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    return lambda model: model.generate(**prompt, **{**details, **kwargs})


@pytest.mark.parametrize(("store", "predictor"), [("host", "gate"), ("file", "random")])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode(mode: str, store: str, predictor: str) -> None:
    prompt, kwargs, passes = MODES[mode]
    stats = assert_same(generating(prompt, **kwargs), store=store, predictor=predictor)
    assert (stats.prefill.passes, stats.decode.passes) == passes


@pytest.mark.parametrize(("store", "predictor"), [("host", "gate"), ("file", "random")])
@pytest.mark.parametrize("mode", PROPOSING)
def test_every_mode_that_proposes_tokens(mode: str, store: str, predictor: str) -> None:
    prompt, kwargs = PROPOSING[mode]
    stats = assert_same(generating(prompt, **kwargs), store=store, predictor=predictor)
    if "lookup" in mode:  # a model that proposes itself also reads what it had not proposed
        assert stats.prefill.passes == 1, "the prompt is read once"
    assert stats.decode.tokens > stats.decode.passes > 1, "several tokens were checked at once"


def test_predictions_that_are_all_wrong() -> None:
    """What is fetched ahead is exactly what is not needed."""
    _, visits = record(FAMILY, torch.float32, "grouped_mm", "short")
    wrong = predictor_of("wrong", unmodified(), visits, lookahead=1)
    stats = assert_same(generating(PROMPTS["short"], max_new_tokens=4, do_sample=False), predictor=wrong)
    assert stats.total.bytes_wasted > 0


def test_other_seeds_give_other_samples() -> None:
    """The comparisons of samples would see a generator that promoe had used in between."""
    call = generating(PADDED, **SAMPLED)
    with pytest.raises(AssertionError, match="differs"):
        assert_same_bits(seeded(call, unmodified(), 1), seeded(call, unmodified(), 2))


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("target_served", "draft_served"), [(True, False), (False, True), (True, True)])
def test_a_draft_model_assists(
    target_served: bool, draft_served: bool, sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target, the draft, or both in promoe's hands; two models take turns within one call."""
    draft_family = "qwen2_moe"

    def assisted(target: PreTrainedModel, draft: PreTrainedModel) -> Any:
        # All proposals are kept, so that passes of several tokens check them.
        generation = GenerationConfig(num_assistant_tokens=3, assistant_confidence_threshold=0.0, pad_token_id=0)
        monkeypatch.setattr(draft, "generation_config", generation)
        return seeded(generating(ONE, **(SAMPLED if sampled else GREEDY), assistant_model=draft), target)

    wanted = assisted(unmodified(), unmodified(draft_family))
    with ExitStack() as stack:
        target, draft = unmodified(), unmodified(draft_family)
        if target_served:
            target = stack.enter_context(served(FAMILY, cache=SLOTS, predictor="gate"))
        if draft_served:
            draft = stack.enter_context(served(draft_family, cache=SLOTS, predictor="gate"))
        assert_same_bits(assisted(target, draft), wanted)
        for model in (target, draft):
            if hasattr(model, "promoe"):
                assert_served(model.promoe.stats())
        if target_served:
            stats = target.promoe.stats()
            assert stats.prefill.passes == 1
            assert stats.decode.tokens > stats.decode.passes > 1


def test_a_model_assists_itself() -> None:
    stats = assert_same(lambda model: generating(ONE, **GREEDY, assistant_model=model)(model))
    assert stats.decode.tokens > stats.decode.passes > 1


def test_from_embeddings() -> None:
    def call(model: PreTrainedModel) -> Any:
        embeddings = model.get_input_embeddings()(ONE["input_ids"])
        return generating({"inputs_embeds": embeddings}, **GREEDY)(model)

    assert assert_same(call).prefill.tokens == 12


def test_turns_of_a_conversation_that_share_a_cache() -> None:
    def call(model: PreTrainedModel) -> Any:
        cache = DynamicCache(config=model.config)
        ids = ONE["input_ids"]
        for said in ([5, 6, 7], [8]):
            ids = torch.cat([ids, torch.tensor([said])], dim=1)
            ids = model.generate(ids, past_key_values=cache, **GREEDY)
        return ids, cache

    stats = assert_same(call)
    # The second turn computes its own token, and the last of the first turn.
    assert (stats.prefill.passes, stats.prefill.tokens) == (2, 15 + 2)


def test_a_decoding_loop_of_the_callers() -> None:
    """`custom_generate`: generate prepares, and hands the model to a function."""

    def least_likely(model: PreTrainedModel, input_ids: torch.Tensor, *, steps: int, **kwargs: Any) -> torch.Tensor:
        for _ in range(steps):
            logits = model(input_ids, use_cache=False).logits
            input_ids = torch.cat([input_ids, logits[:, -1:].argmin(-1)], dim=1)
        return input_ids

    stats = assert_same(
        lambda model: model.generate(**ONE, custom_generate=least_likely, steps=3, max_new_tokens=3), predictor="random"
    )
    assert stats.prefill.passes == 3


def test_a_lost_chunk_is_seen() -> None:
    """The comparison can fail: a link forgets every second chunk."""

    class Forgetful(HostLink):
        def transfer(self, chunk: Chunk, destination: memoryview, address: int) -> None:
            if chunk.source_offset_bytes:
                super().transfer(chunk, destination, address)

    with pytest.raises(AssertionError, match="differs"):
        assert_same(generating(PADDED, **GREEDY), link=LinkOver(Forgetful))


def test_a_model_that_serves_nothing_is_seen() -> None:
    """The other half of every comparison: a model whose slots hold all experts does not pass for one that is served."""
    with served(FAMILY, cache="100%", predictor="gate") as model:
        generating(ONE, **GREEDY)(model)
        with pytest.raises(AssertionError):
            assert_served(model.promoe.stats())
