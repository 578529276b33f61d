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
from promoe.runtime.sampling import Sampling, cut

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
    asked = [prompt for prompt in prompts() if prompt.sampling.greedy]
    found = answered(model, asked)
    for number, prompt in enumerate(asked):
        ids = torch.tensor([list(prompt.ids)])
        alone = model.generate(ids, max_new_tokens=prompt.max_new_tokens, do_sample=False, pad_token_id=0)
        tokens, ended = cut(alone[0, ids.shape[1] :].tolist(), [])
        assert (found[number].tokens, found[number].ended) == (tokens, ended)


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
