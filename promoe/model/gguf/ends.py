"""The tokens that end an answer: those that a GGUF file's header names, and those known by their text.

Most headers name one token, and the model may end its turns with another one. llama.cpp therefore ends answers at all
tokens with certain texts, whatever type the file gives them. The lists are those of its `llama-vocab.cpp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What the header calls tokens that end an answer.
_NAMED = ("eos", "eot", "eom")
_TEXTS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"),
        *("</s>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "[e~[", "<end_of_utterance>"),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<turn|>", "<|tool_response>"),
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    )
)
# Of code models: tokens that lead to another file. By what the header calls them; otherwise the first text that is there.
_OF_CODE = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# Tokens that end no answer if tokens with all these texts do: in these formats, they end a part of an answer.
_NO_ENDS = (
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|return|>", "<|calls|>"}),
    ("<|end|>", {"<|flush|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|calls|>"}),
    ("</s>", {"<|tool_response>"}),
)


def named_token(metadata: Mapping[str, Any], name: str) -> int | None:
    """Return the id of the token that the header names, such as "eos"; None: it names none, or one that is not there."""
    found, tokens = metadata.get(f"tokenizer.ggml.{name}_token_id"), _tokens(metadata)
    return found if type(found) is int and found >= 0 and not (tokens and found >= len(tokens)) else None


def end_tokens(metadata: Mapping[str, Any]) -> list[int]:
    """Return the ids of all tokens that end an answer: first those that the header names, then the others by number."""
    by_text: dict[str, list[int]] = {}
    for idx, text in enumerate(tokens := _tokens(metadata)):
        by_text.setdefault(text, []).append(idx)
    named = [named_token(metadata, name) for name in _NAMED]
    others = {idx for text in _TEXTS for idx in by_text.get(text, ())}
    for name, texts in _OF_CODE.items():
        first = next((by_text[text] for text in texts if text in by_text), [])
        others |= set(first if (of_code := named_token(metadata, name)) is None else [of_code])
    ends = list(dict.fromkeys([*(idx for idx in named if idx is not None), *sorted(others)]))
    present = {tokens[idx] for idx in ends if tokens}
    dropped = {text for text, with_these in _NO_ENDS if with_these <= present}
    return [idx for idx in ends if not (tokens and tokens[idx] in dropped)]


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    """Return the texts of the tokens; none if the file has no tokenizer, or a damaged one."""
    found = metadata.get("tokenizer.ggml.tokens")
    # All elements of a list have one type.
    return found if isinstance(found, list) and isinstance(next(iter(found), None), str) else []
