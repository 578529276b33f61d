"""Many prompts at once: a patched model answers as the unmodified one does in the same steps."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCAB_SIZE, build
from transformers import AutoModelForCausalLM, PreTrainedModel
from zoo.families import build as build_zoo

import promoe
from promoe.errors import ConfigError, PatchStateError, PromoeError, UnsupportedModelError
from promoe.runtime import batches
from promoe.runtime.batches import BatchAnswer, BatchPrompt, generate_batch
from promoe.runtime.sampling import Sampling, cut, end_ids

FAMILIES = ("qwen3_moe", "gpt_oss", "mixtral")
SIZES: dict[str, Any] = {"at_once": 4, "step_tokens": 16, "kv_tokens": 256}


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@functools.cache
def folder_of(family: str) -> Path:
    folder = Path(_scratch().name) / family
    build(family, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def prompts(count: int = 14, longest: int = 40) -> list[BatchPrompt]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [
        BatchPrompt(
            torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist(),
            max_new_tokens=1 + idx % 9,
            sampling=Sampling(temperature=0.7 * (idx % 2), seed=idx),
        )
        for idx, length in enumerate(lengths)
    ]


def answered(model: PreTrainedModel, asked: list[BatchPrompt], **sizes: Any) -> dict[int, BatchAnswer]:
    found = list(generate_batch(model, iter(asked), **(SIZES | sizes)))
    assert len({answer.number for answer in found}) == len(found) == len(asked)
    return {answer.number: answer for answer in found}


@functools.cache
def expected(family: str) -> dict[int, BatchAnswer]:
    stock = AutoModelForCausalLM.from_pretrained(folder_of(family))
    return answered(stock, prompts())


@pytest.mark.parametrize("predictor", [None, "gate", "random"])
@pytest.mark.parametrize("cache", ["1 per layer", "30%", "100%"])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_the_unmodified_models(family: str, cache: str, predictor: str | None) -> None:
    model = promoe.from_pretrained(folder_of(family), cache=cache, predictor=predictor)
    try:
        assert answered(model, prompts()) == expected(family)
        assert cache == "100%" or model.promoe.stats().total.bytes_total > 0
    finally:
        model.promoe.close()


def test_greedy_answers_are_those_of_one_prompt_by_itself() -> None:
    model = build("qwen3_moe")  # in fp32, where the order of additions hardly matters
    asked = [prompt for prompt in prompts() if prompt.sampling.temperature == 0]
    found = answered(model, asked)
    for number, prompt in enumerate(asked):
        ids = torch.tensor([list(prompt.ids)])
        alone = model.generate(ids, max_new_tokens=prompt.max_new_tokens, do_sample=False, pad_token_id=0)
        assert found[number].tokens == alone[0, ids.shape[1] :].tolist()
        assert not found[number].ended


# Settings of `generation_config.json`, of which models have some; each changes the answers.
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "suppress_tokens": {"suppress_tokens": list(range(5, VOCAB_SIZE, 2))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(5, VOCAB_SIZE, 2))},
    "bad_words_ids": {"bad_words_ids": [[token] for token in range(0, VOCAB_SIZE, 3)]},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": list(range(0, VOCAB_SIZE, 2))},
    "forced_eos_token_id": {"forced_eos_token_id": 7},
    "eos_token_id": {"eos_token_id": list(range(0, VOCAB_SIZE, 5))},
}


@pytest.mark.parametrize("paged", [True, False], ids=["paged", "padded"])
@pytest.mark.parametrize("name", OWN_SETTINGS)
def test_what_prompts_do_not_say_comes_from_the_models_settings(
    name: str, paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "is_paged", lambda model: paged)
    model = build("qwen3_moe")
    asked = [BatchPrompt(prompt.ids, 9) for prompt in prompts(7)]
    plain = answered(model, asked)
    model.generation_config.update(**OWN_SETTINGS[name])
    before = model.generation_config.to_dict()
    found = answered(model, asked)
    for number, prompt in enumerate(asked):
        ids = torch.tensor([list(prompt.ids)])
        alone = model.generate(ids, max_new_tokens=9, pad_token_id=0)[0, ids.shape[1] :].tolist()
        tokens, end = cut(alone, end_ids(model))
        assert (found[number].tokens, found[number].end) == (tokens, end), number
        assert found[number].ended == (end is not None)
    assert found != plain
    assert model.generation_config.to_dict() == before


@pytest.mark.parametrize("paged", [True, False], ids=["paged", "padded"])
def test_the_models_settings_of_sampling_hold_where_a_prompt_says_nothing(
    paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "is_paged", lambda model: paged)
    model = build("qwen3_moe")
    greedy = [BatchPrompt(prompt.ids, 6, Sampling(0.0, seed=idx)) for idx, prompt in enumerate(prompts(6))]
    silent = [BatchPrompt(one.ids, 6, Sampling(seed=one.sampling.seed)) for one in greedy]
    said = [BatchPrompt(one.ids, 6, Sampling(1.5, top_p=0.9, top_k=7, seed=one.sampling.seed)) for one in greedy]
    expected = answered(model, greedy)
    assert answered(model, silent) == expected
    drawn = answered(model, said)
    assert drawn != expected
    model.generation_config.update(do_sample=True, temperature=1.5, top_p=0.9, top_k=7)
    assert answered(model, silent) == drawn
    assert answered(model, greedy) == expected


def test_settings_that_a_batch_does_not_have_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = build("qwen3_moe")
    expected = answered(model, prompts(3))
    model.generation_config.num_beams = 4
    model.generation_config.guidance_scale = 1.5
    assert answered(model, prompts(3)) == expected
    assert "has num_beams=4, guidance_scale=1.5, which answers of a batch do not follow" in caplog.text


@pytest.mark.parametrize("paged", [True, False], ids=["paged", "padded"])
def test_settings_that_cannot_be_used_are_an_error_before_anything_is_computed(
    paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "is_paged", lambda model: paged)
    for name, value in {"repetition_penalty": -1.0, "bad_words_ids": [], "top_k": -3}.items():
        model = build("qwen3_moe")
        setattr(model.generation_config, name, value)
        with pytest.raises(ConfigError, match=r"generation_config cannot be used: .* change model.generation_config"):
            answered(model, prompts(3))


@pytest.mark.parametrize("paged", [True, False], ids=["paged", "padded"])
def test_a_stopped_sequence_leaves_at_that_step(paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "is_paged", lambda model: paged)
    model = build("qwen3_moe")
    passes: list[int] = []
    model.register_forward_pre_hook(lambda *args: passes.append(1))
    ids = [list(prompt.ids) for prompt in prompts(4, 8)]
    whole = answered(model, [BatchPrompt(one, 30) for one in ids])
    assert all(len(answer.tokens) == 30 and not answer.ended for answer in whole.values())
    passes.clear()
    asked = [
        BatchPrompt(one, 30, ends_at=lambda tokens, length=3 + number: len(tokens) == length)  # type: ignore[misc]
        for number, one in enumerate(ids)
    ]
    found = answered(model, asked, step_tokens=64)
    for number, answer in found.items():
        assert answer == BatchAnswer(number, whole[number].tokens[: 3 + number], ended=True)
    assert len(passes) == 6


def test_a_stopped_sequence_makes_room_for_the_next_one() -> None:
    """Also where sequences have to leave the KV cache and come back."""
    model = build("qwen3_moe")
    ids = [list(prompt.ids) for prompt in prompts(12, 20)]
    whole = answered(model, [BatchPrompt(one, 30, Sampling(0.8, seed=3)) for one in ids])
    asked = [
        BatchPrompt(one, 30, Sampling(0.8, seed=3), lambda tokens, length=1 + 2 * number: len(tokens) >= length)  # type: ignore[misc]
        for number, one in enumerate(ids)
    ]
    found = answered(model, asked, kv_tokens=64, at_once=3)
    assert {number: answer.tokens for number, answer in found.items()} == {
        number: answer.tokens[: 1 + 2 * number] for number, answer in whole.items()
    }


@pytest.mark.parametrize("paged", [True, False], ids=["paged", "padded"])
def test_what_is_longer_than_the_models_context_is_refused(paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "is_paged", lambda model: paged)
    model = build("qwen3_moe", max_position_embeddings=64)
    asked = [
        BatchPrompt([5] * 65, 1),
        BatchPrompt([5] * 64),
        BatchPrompt([5] * 40, 25),
        BatchPrompt([5] * 40, 24),
        BatchPrompt([5] * 60),
    ]
    found = answered(model, asked)
    assert (
        found[0].error
        == "The model's context is 64 tokens. The prompt has 65, and an answer of 1 was asked for. Shorten either."
    )
    assert found[1].error == "The model's context is 64 tokens. The prompt has 64. Shorten it."
    assert "an answer of 25 was asked for" in str(found[2].error)
    assert len(found[3].tokens) == 24
    assert len(found[4].tokens) == 4


def test_samples_do_not_depend_on_the_schedule() -> None:
    model = build("qwen3_moe")
    found = answered(model, prompts())
    # 64 tokens of cache: sequences have to leave it and come back.
    assert answered(model, prompts(), at_once=3, step_tokens=8, kv_tokens=64) == found
    assert answered(model, prompts(), at_once=14, step_tokens=500, kv_tokens=4096) == found


def test_prompts_are_taken_as_there_is_room() -> None:
    taken = 0

    def endless() -> Iterator[list[int]]:
        nonlocal taken
        while True:
            taken += 1
            yield [5, 6, 7]

    answers = generate_batch(build("qwen3_moe"), endless(), **SIZES)
    for _ in range(10):
        next(answers)
    answers.close()
    assert taken <= 10 + 2 * SIZES["at_once"]


def test_what_does_not_fit_is_refused_and_the_rest_answered() -> None:
    asked = [BatchPrompt([]), BatchPrompt([5] * 300), BatchPrompt([5], max_new_tokens=300), BatchPrompt([5], 2)]
    found = answered(build("qwen3_moe"), asked)
    assert "no tokens" in str(found[0].error)
    assert "room for 256 tokens" in str(found[1].error)
    assert "room for 256 tokens" in str(found[2].error)
    assert found[3].error is None
    assert found[3].tokens


def test_ids_may_be_tensors_and_unknown_ones_are_refused() -> None:
    model = build("qwen3_moe")
    found = {
        answer.number: answer
        for answer in generate_batch(model, [torch.tensor([5, 6]), [5, 6], [-1], [VOCAB_SIZE]], **SIZES)
    }
    assert found[0].tokens == found[1].tokens
    assert "token id -1" in str(found[2].error)
    assert f"token id {VOCAB_SIZE}" in str(found[3].error)
    with pytest.raises(ConfigError, match="must be token ids"):
        list(generate_batch(model, [[0.5]], **SIZES))
    with pytest.raises(ConfigError, match=r"Call model.eval\(\) first"):
        list(generate_batch(model.train(), [[5]], **SIZES))


def test_one_batch_at_a_time() -> None:
    model = build("qwen3_moe")
    first = generate_batch(model, [[5]] * 20, **SIZES)
    next(first)
    with pytest.raises(PatchStateError, match="answering another batch"):
        next(generate_batch(model, [[5]], **SIZES))
    assert len(list(first)) == 19
    assert next(generate_batch(model, [[5]], **SIZES)).tokens


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="'at_once' parameter of generate_batch must be at least 1"):
        list(generate_batch(build("qwen3_moe"), [[1]], at_once=0))


def test_a_model_without_a_language_head_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="Qwen3MoeModel writes no text"):
        list(generate_batch(build("qwen3_moe").model, [[1]], **SIZES))


def test_an_error_in_a_step_is_raised_and_the_model_stays_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3_moe")
    before = answered(model, prompts())
    calls = 0

    def failing(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise promoe.ExpertLoadError("expert 3 of layer 1 is gone")

    hook = model.model.layers[1].register_forward_pre_hook(failing)
    with pytest.raises(promoe.ExpertLoadError, match="expert 3 of layer 1 is gone"):
        answered(model, prompts())
    hook.remove()
    assert answered(model, prompts()) == before
    hook = model.register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(PromoeError, match="Continuous batching has failed: division by zero"):
        answered(model, prompts())
    hook.remove()


@pytest.mark.parametrize("family", ["qwen3_next", "switch_transformers"])
def test_padded_batches_answer_as_the_unmodified_model(family: str, tmp_path: Path) -> None:
    build_zoo(family, dtype=torch.float32).save_pretrained(tmp_path)
    stock = type(build_zoo(family)).from_pretrained(tmp_path)
    model = promoe.from_pretrained(tmp_path, cache="40%")
    asked = prompts(6, 12)
    found = answered(model, asked)
    assert found == answered(stock, asked)
    assert any(answer.tokens for answer in found.values())
    model.promoe.close()


def test_prompts_of_like_length_are_padded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "is_paged", lambda model: False)
    shapes: list[tuple[int, ...]] = []
    model = build("qwen3_moe")
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    asked = [BatchPrompt([5] * length, 1) for length in (3, 30, 4, 29, 5, 28, 6, 27)]
    answered(model, asked, at_once=4)
    assert shapes == [(4, 30), (4, 6)]
