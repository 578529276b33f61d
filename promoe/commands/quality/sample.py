"""Reads texts, and cuts them into windows of tokens for a model to predict, and prompts for it to answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch

from promoe.commands.bench.example import find_example, read_prompts
from promoe.commands.quality.options import DEFAULT_TOKENS, Options
from promoe.errors import ConfigError
from promoe.training import prompts
from promoe.training.encoding import encode
from promoe.training.prompts import Message, Prompt, PromptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Of a text without a question, the tokens for a model to continue.
BEGINNING = 32
HELDOUT = "held-out prompts of the repository"


@dataclass(frozen=True)
class Sample:
    """What every form reads.

    Attributes:
        source: where the texts are from.
        windows: token ids, each `[n]` with n of at least 2; only the last one may be shorter than the others.
        prompts: token ids, each `[n]`.
    """

    source: str
    windows: tuple[torch.Tensor, ...]
    prompts: tuple[torch.Tensor, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all windows."""
        return sum(map(len, self.windows))

    @property
    def num_predicted(self) -> int:
        """Tokens that are predicted: all but the first of each window."""
        return self.num_tokens - len(self.windows)


def read_sample(options: Options, tokenizer: PreTrainedTokenizerBase) -> Sample:
    """Read as many texts as are needed.

    Raises:
        PromoeError: the data cannot be read, or have fewer tokens than were asked for.
    """
    wanted = DEFAULT_TOKENS if options.tokens is None else options.tokens
    ids: list[int] = []
    asked: list[list[int]] = []
    source = HELDOUT if options.data is None else options.data
    for record, is_chat in _records(options.data):
        if len(ids) < wanted:
            ids += (_whole_chat if is_chat else _whole_text)(record.messages, tokenizer)
        if len(asked) < options.prompts:
            asked += _prompt(record, is_chat, tokenizer, options.window)
        if len(ids) >= wanted and len(asked) >= options.prompts:
            break
    if len(ids) < (2 if options.tokens is None else wanted):
        raise ConfigError(
            f"{wanted:,} tokens were asked for, but the data ({source}) have only {len(ids):,} with this model's tokenizer. "
            "Ask for fewer with --tokens, or give more with --data."
        )
    windows = cut(ids[:wanted], options.window, first_of_texts(tokenizer))
    return Sample(source, windows, tuple(torch.tensor(one) for one in asked))


def cut(ids: Sequence[int], window: int, first: int | None) -> tuple[torch.Tensor, ...]:
    """Return windows that do not overlap. A single token at the end, which nothing predicts, is left out.

    Args:
        ids: of all texts.
        window: tokens of each window; the last one may be shorter.
        first: the token that each window begins with, in place of its own first one, which is not predicted anyway; None:
            its own.
    """
    parts = [torch.tensor(ids[start : start + window]) for start in range(0, len(ids) - 1, window)]
    if first is not None:
        for part in parts:
            part[0] = first
    return tuple(parts)


def first_of_texts(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token that this tokenizer puts before each text (BOS); None if it does not."""
    bos: int | None = tokenizer.bos_token_id
    return bos if bos is not None and list(tokenizer("a")["input_ids"])[:1] == [bos] else None


def _records(data: str | None) -> Iterator[tuple[Prompt, bool]]:
    """Yield the texts, and whether each is a conversation."""
    if data is not None:
        yield from ((record, len(record.messages) > 1) for record in prompts.read_prompts(data))
        return
    try:
        path = find_example().prompts_file
    except ConfigError as error:
        raise ConfigError(
            f"Without --data, the {HELDOUT} are read, and they are not here ({error}) Give texts with --data FILE.jsonl."
        ) from error
    for idx, text in enumerate(read_prompts(path, 1, "Give texts with --data.")):
        yield Prompt(idx, (Message(role="user", content=text),)), True


def _whole_chat(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a conversation: by the chat template, or as lines if there is none or it refuses them."""
    if tokenizer.chat_template is not None:
        try:
            ids: list[int] = tokenizer.apply_chat_template(
                list(messages), tokenize=True, return_dict=False, tokenizer_kwargs={"verbose": False}
            )
            return list(ids)
        except Exception:  # a template is a program, and may refuse two messages of a user, one after the other
            pass
    return _whole_text(messages, tokenizer)


def _whole_text(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    # verbose=False: a text may be longer than the model allows, which does not matter here.
    return list(tokenizer("\n".join(message["content"] for message in messages), verbose=False)["input_ids"])


def _prompt(record: Prompt, is_chat: bool, tokenizer: PreTrainedTokenizerBase, most: int) -> list[list[int]]:
    """Return the tokens of a prompt; nothing if the chat template refuses it."""
    if not is_chat:
        return [_whole_text(record.messages, tokenizer)[:BEGINNING]]
    try:
        return [encode(_question(record), tokenizer, most)]
    except PromptError:
        return []


def _question(record: Prompt) -> Prompt:
    """Return a conversation up to its first question."""
    end = next(number for number, message in enumerate(record.messages, start=1) if message["role"] == "user")
    return Prompt(record.idx, tuple(islice(record.messages, end)))
