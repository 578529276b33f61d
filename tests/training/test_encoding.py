"""Token ids of prompts, with and without a chat template. The byte tokenizer's adds one per message, and one to generate."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from tiny_checkpoint import byte_tokenizer
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from promoe.training import encoding
from promoe.training.encoding import encode
from promoe.training.prompts import Message, Prompt, PromptError

USER, ANSWER, SYSTEM = "user", "assistant", "system"


def chat(*pairs: tuple[str, str]) -> tuple[Message, ...]:
    return tuple(Message(role=role, content=text) for role, text in pairs)  # type: ignore[typeddict-item]


TURNS = chat((USER, "aaaa"), (ANSWER, "bbbb"), (USER, "cccc"), (ANSWER, "dddd"), (USER, "eeee"), (ANSWER, "ffff"))
REFUSES_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}<|human|>{{ message['content'] }}{% endfor %}<|gpt|>"
)
ALTERNATES = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}<|human|>{{ message['content'] }}{% endfor %}<|gpt|>"
)


def with_template(template: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def encoded(messages: Sequence[Message], max_tokens: int, tokenizer: PreTrainedTokenizerFast | None = None) -> str:
    tokenizer = byte_tokenizer() if tokenizer is None else tokenizer
    ids = encode(Prompt(7, tuple(messages)), tokenizer, max_tokens)
    assert type(ids) is list
    assert all(type(token) is int for token in ids)
    assert 0 < len(ids) <= max_tokens
    return str(tokenizer.decode(ids))


@pytest.mark.parametrize(
    ("max_tokens", "text"),
    [
        (1000, "<|human|>aaaa<|human|>bbbb<|human|>cccc<|human|>dddd<|human|>eeee<|gpt|>"),
        (26, "<|human|>aaaa<|human|>bbbb<|human|>cccc<|human|>dddd<|human|>eeee<|gpt|>"),
        (25, "<|human|>aaaa<|human|>bbbb<|human|>cccc<|gpt|>"),
        (16, "<|human|>aaaa<|human|>bbbb<|human|>cccc<|gpt|>"),
        (15, "<|human|>aaaa<|gpt|>"),
        (6, "<|human|>aaaa<|gpt|>"),
        (5, "<|human|>aaa<|gpt|>"),
        (3, "<|human|>a<|gpt|>"),
    ],
)
def test_the_longest_run_that_ends_with_a_question_is_encoded(max_tokens: int, text: str) -> None:
    assert encoded(TURNS, max_tokens) == text


@pytest.mark.parametrize(
    ("max_tokens", "text"), [(99, "aaaa\nbbbb\ncccc\ndddd\neeee"), (14, "aaaa\nbbbb\ncccc"), (13, "aaaa"), (3, "aaa")]
)
def test_without_a_template_contents_are_joined_by_newlines(max_tokens: int, text: str) -> None:
    assert encoded(TURNS, max_tokens, byte_tokenizer(chat=False)) == text


@pytest.mark.parametrize("num_questions", [1, 2, 3, 5, 8, 9, 31])
def test_every_limit_gives_the_longest_run(num_questions: int) -> None:
    messages = [m for i in range(num_questions) for m in chat((USER, "q" * (i % 3 + 1)), (ANSWER, "a"))]
    tokenizer = byte_tokenizer()
    sizes = [len(encode(Prompt(0, tuple(messages[: 2 * i + 1])), tokenizer, 9999)) for i in range(num_questions)]
    for limit in range(sizes[0], sizes[-1] + 2):
        got = len(encode(Prompt(0, tuple(messages)), tokenizer, limit))
        assert got == max(size for size in sizes if size <= limit)


@pytest.mark.parametrize("max_tokens", [10_000, 3000])
def test_tokenizing_does_not_grow_with_the_square_of_the_messages(
    monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    rendered = 0
    render = encoding._render

    def counting(messages: Any, tokenizer: Any) -> list[int]:
        nonlocal rendered
        ids = render(messages, tokenizer)
        rendered += len(ids)
        return ids

    monkeypatch.setattr(encoding, "_render", counting)
    messages = chat((USER, "question"), (ANSWER, "answer")) * 600
    encoded(messages, max_tokens)
    assert rendered < 12 * max_tokens, f"{rendered} tokens rendered for {max_tokens}"


def test_the_system_message_is_kept_when_a_question_is_cut() -> None:
    messages = chat((SYSTEM, "be kind"), (USER, "a long question"), (ANSWER, "b"), (USER, "c"))
    assert encoded(messages, 14) == "<|human|>be kind<|human|>a lo<|gpt|>"


def test_the_system_message_is_dropped_where_it_leaves_no_room() -> None:
    messages = chat((SYSTEM, "be kind"), (USER, "question"), (ANSWER, "b"), (USER, "c"))
    assert encoded(messages, 10) == "<|human|>question<|gpt|>"
    assert encoded(messages, 5) == "<|human|>que<|gpt|>"


def test_characters_of_several_tokens_are_not_torn() -> None:
    assert encoded(chat((USER, "\U0001f600" * 4)), 13) == "<|human|>\U0001f600\U0001f600<|gpt|>"


def test_what_the_cut_makes_longer_is_cut_more() -> None:
    """The whole question's last letter and the template's full stop are one token; the cut question's are two."""
    bpe = Tokenizer(models.BPE({"<|end|>": 0, "a": 1, "b": 2, ".": 3, "b.": 4}, merges=[("b", ".")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>")
    tokenizer.chat_template = "{{ messages[0]['content'] }}."
    prompt = Prompt(0, chat((USER, "aaaab")))
    assert encode(prompt, tokenizer, 5) == [1, 1, 1, 1, 4]
    assert encode(prompt, tokenizer, 3) == [1, 1, 3]


def test_tokenizers_without_offsets_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", False)
    assert encoded(TURNS, 5) == "<|human|>aaa<|gpt|>"
    assert encoded(chat((USER, "\U0001f600" * 4)), 13) == "<|human|>\U0001f600\U0001f600<|gpt|>"


@pytest.mark.parametrize("limit", [-1, 0, 1, 2])
def test_a_limit_too_small_for_the_template_raises(limit: int) -> None:
    with pytest.raises(PromptError, match=rf"Prompt 7 cannot be cut to {limit} tokens: .* take 2 tokens alone"):
        encode(Prompt(7, chat((SYSTEM, "be kind"), (USER, "question"))), byte_tokenizer(), limit)


def test_templates_that_refuse_the_system_get_none() -> None:
    messages = (*chat((SYSTEM, "be kind")), *TURNS)
    tokenizer = with_template(REFUSES_SYSTEM)
    assert encoded(messages, 16, tokenizer) == "<|human|>aaaa<|human|>bbbb<|human|>cccc<|gpt|>"
    assert encoded(messages, 4, tokenizer) == "<|human|>aa<|gpt|>"


def test_a_run_ends_before_what_the_template_refuses() -> None:
    messages = (*TURNS[:3], *TURNS[2:])
    text = "<|human|>aaaa<|human|>bbbb<|human|>cccc<|gpt|>"
    assert encoded(messages, 1000, with_template(ALTERNATES)) == text


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('never') }}", "TemplateError: never"),
        ("{{ messages[0].none.x }}", "UndefinedError: .*none"),
    ],
)
def test_templates_that_render_nothing_raise(template: str, reason: str) -> None:
    for messages in (TURNS, (*chat((SYSTEM, "s")), *TURNS)):
        with pytest.raises(PromptError, match=f"cannot render prompt 7: {reason}") as caught:
            encode(Prompt(7, messages), with_template(template), 100)
        assert caught.value.__cause__ is not None


def test_a_prompt_without_a_question_raises() -> None:
    with pytest.raises(PromptError, match="Prompt 7 has no message of a user"):
        encode(Prompt(7, chat((ANSWER, "a"))), byte_tokenizer(), 100)


@pytest.mark.parametrize("chat_template", [True, False])
def test_long_prompts_are_no_reason_to_warn(chat_template: bool, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_tokenizer(chat_template)
    tokenizer.model_max_length = 4
    caplog.set_level(logging.WARNING)
    encoded(TURNS, 4, tokenizer)
    assert not caplog.records
