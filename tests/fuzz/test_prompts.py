"""Conversations and prompts: ShareGPT arrays, JSON lines, lists of texts to leave out; and what is encoded of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_checkpoint import byte_tokenizer

from promoe.training.encoding import encode
from promoe.training.prompts import ROLES, Prompt, PromptError, read_exclusions, read_prompts
from promoe.training.sharegpt import Conversation, ShareGptError, read_conversations

from .inputs import fuzzed, outcome
from .mutations import DEEP, MANY_DIGITS, TEXTS, damaged, json_bytes, written

SHAREGPT: list[Any] = [
    {"id": "a_0", "conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]},
    {
        "id": "b_0",
        "conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "ü\ud83d\ude00"}],
    },
    {"id": "c_0", "conversations": []},
]
LINES: list[Any] = [
    {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": None}]},
    {"conversations": [{"from": "human", "value": "How?"}], "id": 3},
    {"prompt": "What?"},
    {"text": "Who?", "prompt": None},
]
WHOLE = written(SHAREGPT)
WHOLE_LINES = b"".join(written(line) + b"\n" for line in LINES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def check_prompts(prompts: list[Prompt] | None) -> None:
    last = -1
    for prompt in prompts or ():
        assert prompt.idx > last
        last = prompt.idx
        roles = [message["role"] for message in prompt.messages]
        assert "user" in roles
        assert set(roles) <= set(ROLES.values())
        for message in prompt.messages:
            assert message["content"].strip()
            message["content"].encode()


def parsed(content: bytes) -> Any:
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError):
        return None


@fuzzed(120)
@given(content=json_bytes(SHAREGPT))
@example(content=b"[" + b"[" * DEEP)
@example(content=b'[{"id": "a", "conversations": ' + b'{"a":' * DEEP)
@example(content=b"[" + b"1" * MANY_DIGITS + b"]")
@example(content=b'[{"id": 3, "conversations": []}]')
@example(content=b'[{"id": null, "conversations": []}, {"id": ["x"], "conversations": []}]')
@example(content=b'[{"id": "\\ud800", "conversations": [{"from": "human", "value": "\\udc00"}]}]')
def test_sharegpt(folder: Path, content: bytes) -> None:
    path = folder / "sharegpt.json"
    path.write_bytes(content)
    found = outcome("ShareGPT", lambda: list(read_conversations(path)))
    check_prompts(outcome("ShareGPT as prompts", lambda: list(read_prompts(str(path)))))
    for conversation in found or ():
        check_conversation(conversation)
    records = parsed(content)
    if found is not None and isinstance(records, list):  # nothing that is whole is lost
        assert [(one.id, [(turn.speaker, turn.text) for turn in one.turns]) for one in found] == [
            (record["id"], [(turn["from"], turn["value"]) for turn in record["conversations"]]) for record in records
        ]


def check_conversation(conversation: Conversation) -> None:
    assert isinstance(conversation.stem, str)
    assert all(isinstance(text, str) for turn in conversation.turns for text in (turn.speaker, turn.text))


@fuzzed(120)
@given(content=damaged(WHOLE))
def test_bytes_of_sharegpt(folder: Path, content: bytes) -> None:
    path = folder / "bytes.json"
    path.write_bytes(content)
    for conversation in outcome("ShareGPT: bytes", lambda: list(read_conversations(path))) or ():
        check_conversation(conversation)


@fuzzed(80)
@given(cut=st.integers(0, len(WHOLE)), chunk_bytes=st.integers(1, 40))
def test_a_file_that_is_cut_off(folder: Path, cut: int, chunk_bytes: int) -> None:
    path = folder / "cut.json"
    path.write_bytes(WHOLE[:cut])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("promoe.training.sharegpt.CHUNK_BYTES", chunk_bytes)
        found = outcome("ShareGPT: cut off", lambda: list(read_conversations(path)))
    if found is not None:
        assert [one.id for one in found] == [record["id"] for record in SHAREGPT][: len(found)]
        assert len(found) == len(SHAREGPT) or cut < len(WHOLE)


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """Lines of which one is damaged, in any order, with any ends."""
    content = [written(line) for line in LINES]
    which = draw(st.integers(0, len(content) - 1))
    content[which] = draw(json_bytes(LINES[which]))
    end = draw(st.sampled_from((b"\n", b"\n", b"\r\n", b"\n\n", b"\r", b"")))
    return end.join(draw(st.permutations(content))) + draw(st.sampled_from((b"\n", b"")))


@fuzzed(120)
@given(content=lines() | damaged(WHOLE_LINES))
@example(content=b'{"prompt": ' + b"[" * DEEP + b"\n")
@example(content=b'{"prompt": ' + b"1" * MANY_DIGITS + b"}\n")
@example(content=b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}\n")
def test_json_lines(folder: Path, content: bytes) -> None:
    path = folder / "prompts.jsonl"
    path.write_bytes(content)
    check_prompts(outcome("JSON lines", lambda: list(read_prompts(str(path)))))


@fuzzed(80)
@given(content=json_bytes(["Why?", "How?"]))
@example(content=b"[" * DEEP)
def test_exclusions(folder: Path, content: bytes) -> None:
    path = folder / "exclude.json"
    path.write_bytes(content)
    found = outcome("exclusions", lambda: read_exclusions(path))
    assert found is None or all(isinstance(text, str) for text in found)


@fuzzed(80)
@given(
    data=st.sampled_from((*TEXTS, ".", "/", "~", "..", "no/such", "a/b/c", "a\nb", "x.jsonl", "x" * 300 + ".json"))
    | st.text(max_size=12)
)
@example(data="x" * 5000)
@example(data="x" * 5000 + ".jsonl")
@example(data="a\0b.json")
@example(data="\ud800.jsonl")
def test_names_of_sources(folder: Path, data: str) -> None:
    if data not in ("sharegpt", ".", "/", "..") and not Path(data[:99].replace("\0", "_")).is_dir():
        outcome("names of prompt sources", lambda: next(read_prompts(data), None))


@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
def test_a_pipe_is_no_file(tmp_path: Path, name: str) -> None:
    """Which nobody writes to: opening it would not end."""
    os.mkfifo(tmp_path / name)
    with pytest.raises((PromptError, ShareGptError), match="Not a plain file"):
        next(read_prompts(str(tmp_path / name)))


TOKENIZERS = {chat: byte_tokenizer(chat) for chat in (True, False)}
ROLE_NAMES = ("system", "user", "assistant")
messages = st.lists(
    st.tuples(st.sampled_from(ROLE_NAMES), st.text(max_size=30) | st.sampled_from(TEXTS)), min_size=1, max_size=6
)


TEMPLATES = (
    None, "{{ messages[7].content }}", "{{ 1 / 0 }}", "{% for %}", "{{ raise_exception('no') }}", "{{ messages + 1 }}", "", "é",
    "{{ (1).__class__.__mro__ }}", "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "{{ 'x' * 200 }}", "{{ no_such.x }}",
    "{{ 9 ** 9 ** 2 }}", "{{ messages | no_such_filter }}", "{{ messages[0]['content'] | int + 'a' }}",
)  # fmt: skip


@fuzzed(80)
@given(messages=messages, max_tokens=st.integers(-1, 60), chat=st.booleans(), template=st.sampled_from(TEMPLATES))
@example(messages=[("user", "x")], max_tokens=20, chat=True, template="{{ 1 / 0 }}")
@example(messages=[("user", "x")], max_tokens=20, chat=True, template="{{ messages + 1 }}")
@example(messages=[("user", "x")], max_tokens=20, chat=True, template="{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}")
def test_encoding(messages: list[tuple[str, str]], max_tokens: int, chat: bool, template: str | None) -> None:
    usable = [(role, text.encode("utf-8", "replace").decode()) for role, text in messages]
    prompt = Prompt(0, tuple({"role": role, "content": text} for role, text in usable))  # type: ignore[typeddict-item,misc]
    tokenizer = TOKENIZERS[chat]
    kept = tokenizer.chat_template
    if chat and template is not None:
        tokenizer.chat_template = template
    try:
        ids = outcome("prompts, encoded", lambda: encode(prompt, tokenizer, max_tokens))
    finally:
        tokenizer.chat_template = kept
    assert ids is None or len(ids) <= max_tokens
