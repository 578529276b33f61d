"""Encodes a prompt for a model to continue: as much of a conversation as fits. Knows chat templates; not models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from promoe.training.prompts import Message, Prompt, PromptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[int]:
    """Return at most `max_tokens` token ids for a model to continue.

    They encode the first messages up to the last one of a user with which they fit and the chat template accepts them,
    with the template's generation prompt. Without a template, the messages are joined with newlines. If the first user's
    message alone is too long, its end is cut off. System messages are dropped if the template refuses them, or if they leave
    no room.

    Raises:
        PromptError: The template refuses even the first user's message, or leaves no room for any of it.
    """
    attempts = [prompt]
    without_system = tuple(message for message in prompt.messages if message["role"] != "system")
    if len(without_system) < len(prompt.messages):
        attempts.append(Prompt(prompt.idx, without_system))
    for attempt in attempts:
        try:
            return _encode_longest_run(attempt, tokenizer, max_tokens)
        except (TemplateError, PromptError) as error:
            cause = error
    if isinstance(cause, PromptError):
        raise cause
    raise PromptError(
        f"The tokenizer's chat template cannot render prompt {prompt.idx:,}: {type(cause).__name__}: {cause}. "
        "Mend the template, or leave the prompt out."
    ) from cause


def _encode_longest_run(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[int]:
    """Encode as many messages as fit; raise TemplateError or PromptError if the first user's message cannot be encoded."""
    ends = [number for number, message in enumerate(prompt.messages, start=1) if message["role"] == "user"]
    if not ends:
        raise PromptError(f"Prompt {prompt.idx:,} has no message of a user to answer. Leave it out.")

    first = prompt.messages[: ends[0]]
    best = _render(first, tokenizer)
    if len(best) > max_tokens:
        return _cut_question(Prompt(prompt.idx, first), len(best), tokenizer, max_tokens)
    # Doubling, then halving, keeps what is tokenized in proportion to the result, not to the square of the conversation.
    fits, fails = 1, len(ends) + 1
    while fits + 1 < fails:
        count = min(2 * fits, len(ends)) if fails > len(ends) else (fits + fails) // 2
        try:
            ids = _render(prompt.messages[: ends[count - 1]], tokenizer)
        except TemplateError:  # for example: two messages of a user, one after the other
            fails = count
            continue
        if len(ids) <= max_tokens:
            best, fits = ids, count
        else:
            fails = count
    return best


def _render(messages: Iterable[Message], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    # verbose=False: a text may be longer than the model allows here, which is nothing to warn of.
    if tokenizer.chat_template is None:
        text = "\n".join(message["content"] for message in messages)
        return list(tokenizer(text, verbose=False)["input_ids"])
    try:
        ids = tokenizer.apply_chat_template(
            list(messages),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            tokenizer_kwargs={"verbose": False},
        )
    except TemplateError:
        raise
    except Exception as error:  # a template computes, and may divide by zero
        raise TemplateError(f"{type(error).__name__}: {error}") from error
    return list(ids)


def _cut_question(prompt: Prompt, num_tokens: int, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[int]:
    """Cut the end of the last message, so that of `num_tokens` at most `max_tokens` are left."""
    *before, question = prompt.messages
    content = question["content"]
    options = {"add_special_tokens": False, "verbose": False}
    encoded = tokenizer(content, return_offsets_mapping=tokenizer.is_fast, **options)
    num_added = num_tokens - len(encoded["input_ids"])
    kept = max_tokens - num_added
    while kept > 0:
        if tokenizer.is_fast:
            text = content[: max(end for _, end in encoded["offset_mapping"][:kept])]
        else:
            text = tokenizer.decode(encoded["input_ids"][:kept]).rstrip("\ufffd")
        if not text:
            break
        ids = _render([*before, Message(role=question["role"], content=text)], tokenizer)
        if len(ids) <= max_tokens:
            return ids
        # The cut was inside a character, or the new end is tokenized in another way.
        kept -= len(ids) - max_tokens
    raise PromptError(
        f"Prompt {prompt.idx:,} cannot be cut to {max_tokens:,} tokens: the chat template, and messages before the "
        f"user's, take {num_added:,} tokens alone. Raise --max-prompt-tokens well above {num_added:,}."
    )
