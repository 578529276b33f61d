"""Where answers end. The expected ids are those that llama.cpp prints as end-of-generation tokens for such a vocabulary."""

from __future__ import annotations

from typing import Any

import pytest

from promoe.model.gguf.ends import end_tokens, named_token


def metadata(tokens: list[str] | None, **named: Any) -> dict[str, Any]:
    found = {f"tokenizer.ggml.{name}_token_id": number for name, number in named.items()}
    return found if tokens is None else {**found, "tokenizer.ggml.tokens": tokens}


@pytest.mark.parametrize(
    ("tokens", "named", "expected"),
    [
        # Qwen3: the header has <|im_end|>; base models end at <|endoftext|>.
        (
            [
                "a",
                "<|endoftext|>",
                "<|im_start|>",
                "<|im_end|>",
                "<|fim_middle|>",
                "<|fim_suffix|>",
                "<|fim_pad|>",
                "<|repo_name|>",
                "<|file_sep|>",
            ],
            {"eos": 3},
            [3, 1, 6, 7, 8],
        ),
        # Llama: the header names a token, or two.
        (["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], {"eos": 0}, [0, 1, 2]),
        (["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], {"eos": 2, "eot": 0, "eom": 1}, [2, 0, 1]),
        # gpt-oss: <|end|> ends a message, and other messages of the same answer follow.
        (["<|endoftext|>", "<|return|>", "<|end|>", "<|call|>", "<|message|>"], {"eos": 1}, [1, 0, 3]),
        (["<|endoftext|>", "<|return|>", "<|end|>", "<|call|>"], {"eos": 1, "eot": 2}, [1, 0, 3]),
        (["<|endoftext|>", "<|end|>", "<|call|>"], {"eos": 0}, [0, 1, 2]),  # Phi
        (["<|endoftext|>", "<|flush|>", "<|end|>", "<|calls|>"], {"eos": 0}, [0, 1, 3]),  # Solar Open
        # Gemma 4: </s> is a word.
        (["<eos>", "<turn|>", "</s>", "<|tool_response>"], {"eos": 0}, [0, 1, 3]),
        (["<unk>", "<s>", "</s>"], {"eos": 2}, [2]),
        (["x", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<EOT>", "_<EOT>"], {}, [1, 2, 3]),
        (["[BOS]", "[EOS]", "[EOT]", "[PAD]", "[e~["], {"eos": 1}, [1, 2, 3, 4]),
        # What the header says of a role comes before texts.
        (["x", "<|fim_pad|>", "<PAD>", "y"], {"eos": 0, "fim_pad": 3}, [0, 3]),
        (["x", "<PAD>", "<|fim_pad|>"], {"eos": 0}, [0, 2]),
        (["x", "<|im_end|>", "<|im_end|>"], {"eos": 0}, [0, 1, 2]),
        (["x", "<|im_start|>", "im_end", " <|im_end|>"], {"eos": 0}, [0]),
        (["x"], {"eos": 1, "eot": -1, "eom": "0"}, []),  # tokens that are not there
        (None, {"eos": 5, "eot": 7}, [5, 7]),
        (None, {}, []),
    ],
)
def test_ends(tokens: list[str] | None, named: dict[str, Any], expected: list[int]) -> None:
    assert end_tokens(metadata(tokens, **named)) == expected


@pytest.mark.parametrize(("number", "expected"), [(1, 1), (2, None), (-1, None), (True, None), ("1", None)])
def test_a_token_that_the_header_names(number: Any, expected: int | None) -> None:
    assert named_token(metadata(["a", "b"], bos=number), "bos") == expected


@pytest.mark.parametrize("damaged", [[], [1, 2], "tokens", 7])
def test_a_damaged_list_of_tokens(damaged: Any) -> None:
    assert end_tokens({"tokenizer.ggml.tokens": damaged, "tokenizer.ggml.eos_token_id": 3}) == [3]
