from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import REPOSITORY, byte_tokenizer
from transformers import PreTrainedTokenizerFast

from promoe.commands.quality.options import Options
from promoe.commands.quality.sample import Sample, cut, first_of_texts, read_sample
from promoe.errors import ConfigError

CHAT = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}


def write(folder: Path, *records: dict[str, Any]) -> str:
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def text_of(tokenizer: PreTrainedTokenizerFast, ids: Any) -> str:
    return str(tokenizer.decode(ids))


def read(data: str | None, tokenizer: PreTrainedTokenizerFast, **options: Any) -> Sample:
    return read_sample(Options("model", data=data, **options), tokenizer)


def test_texts_follow_one_another_and_are_cut_into_windows(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    data = write(tmp_path, {"text": "abcdef"}, {"text": "ghij"}, {"text": "klm"})
    found = read(data, tokenizer, window=4, tokens=11)
    assert [text_of(tokenizer, window) for window in found.windows] == ["abcd", "efgh", "ijk"]
    assert (found.source, found.num_tokens, found.num_predicted) == (data, 11, 8)


def test_a_last_token_alone_predicts_nothing(tmp_path: Path) -> None:
    found = read(write(tmp_path, {"text": "abcdefghi"}), byte_tokenizer(), window=4)
    assert [len(window) for window in found.windows] == [4, 4]


def test_conversations_go_through_the_chat_template(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    found = read(write(tmp_path, CHAT), tokenizer, window=100)
    assert [text_of(tokenizer, window) for window in found.windows] == ["<|human|>Why?<|human|>So."]
    assert [text_of(tokenizer, prompt) for prompt in found.prompts] == ["<|human|>Why?<|gpt|>"]


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}", "{{ 1 / 0 }}"])
def test_without_a_template_or_if_it_refuses_messages_are_lines(template: str | None, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    found = read(write(tmp_path, CHAT), tokenizer, window=100)
    assert [text_of(tokenizer, window) for window in found.windows] == ["Why?\nSo."]
    assert [text_of(tokenizer, prompt) for prompt in found.prompts] == (["Why?"] if template is None else [])


def test_prompts_are_the_first_questions_or_beginnings(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    data = write(tmp_path, {"text": "a" * 50}, CHAT, {"text": "b" * 5}, {"text": "not this one"})
    found = read(data, tokenizer, prompts=3, tokens=20)  # two more texts than the windows need
    assert [text_of(tokenizer, prompt) for prompt in found.prompts] == ["a" * 32, "<|human|>Why?<|gpt|>", "b" * 5]
    assert found.num_tokens == 20
    assert read(data, tokenizer, prompts=0).prompts == ()


def test_by_default_the_held_out_prompts_are_read_as_questions() -> None:
    tokenizer = byte_tokenizer()
    texts = json.loads((REPOSITORY / "examples" / "sharegpt_moe" / "heldout_prompts.json").read_text())
    found = read(None, tokenizer)
    ids = list(chain.from_iterable(window.tolist() for window in found.windows))
    assert text_of(tokenizer, ids) == "".join(f"<|human|>{text}" for text in texts)
    assert [text_of(tokenizer, prompt) for prompt in found.prompts] == [f"<|human|>{text}<|gpt|>" for text in texts[:4]]
    assert found.source == "held-out prompts of the repository"


def test_without_a_checkout_data_have_to_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("promoe.__file__", str(tmp_path / "promoe" / "__init__.py"))
    with pytest.raises(ConfigError, match=r"Without --data, .* not here .* Give texts with --data FILE\.jsonl"):
        read(None, byte_tokenizer())


def test_fewer_tokens_than_were_asked_for(tmp_path: Path) -> None:
    data = write(tmp_path, {"text": "abcde"})
    message = r"^1,000 tokens were asked for, but the data \(.*texts\.jsonl\) have only 5 with this model's tokenizer\. Ask for"
    with pytest.raises(ConfigError, match=message):
        read(data, byte_tokenizer(), tokens=1000)
    assert read(data, byte_tokenizer(), tokens=5).num_tokens == 5
    with pytest.raises(ConfigError, match="have only 1 with"):
        read(write(tmp_path, {"text": "a"}), byte_tokenizer())


def test_a_window_begins_as_the_tokenizer_begins_a_text() -> None:
    assert [part.tolist() for part in cut([7, 1, 2, 3, 4, 5], 3, 7)] == [[7, 1, 2], [7, 4, 5]]
    assert [part.tolist() for part in cut([7, 1, 2, 3, 4, 5], 3, None)] == [[7, 1, 2], [3, 4, 5]]


def test_whether_a_tokenizer_begins_texts_with_a_token() -> None:
    class WithBos:
        bos_token_id = 7

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [7, 1]}

    assert first_of_texts(WithBos()) == 7  # type: ignore[arg-type]
    tokenizer = byte_tokenizer()
    assert first_of_texts(tokenizer) is None
    tokenizer.bos_token = "<|human|>"
    assert first_of_texts(tokenizer) is None  # it has one, but does not add it


def test_tokens_are_whole_numbers() -> None:
    assert all(part.dtype == torch.int64 for part in cut(list(range(10)), 4, None))
