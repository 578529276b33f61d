"""The prompts of a batch file as tokens, and how much work they are."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from promoe.commands.batch.lines import CHAT, LineError, Request, read_request
from promoe.commands.batch.source import Source
from promoe.commands.plan.throughput import BatchWork

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Lines that are encoded to learn how long prompts are: spread evenly over the file, and the longest.
SAMPLED, LONGEST = 256, 8


def encoded(tokenizer: PreTrainedTokenizerBase, request: Request) -> list[int]:
    """Return the tokens of a prompt.

    Raises:
        LineError: the tokenizer or its chat template cannot encode it.
    """
    try:
        if request.url == CHAT:
            ids: Any = tokenizer.apply_chat_template(
                request.content, add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
        elif isinstance(request.content, str):
            ids = tokenizer(request.content)["input_ids"]
        else:
            ids = request.content
    except Exception as error:  # a template is a program, and may raise anything
        raise LineError(
            request.custom_id,
            f"The tokenizer or its chat template cannot encode this: {type(error).__name__}: {error}.",
        ) from error
    return list(ids)


def read_work(
    source: Source, tokenizer: PreTrainedTokenizerBase, max_tokens: int, context: int, done: Collection[str] = ()
) -> BatchWork | None:
    """Return how much work a file is; None: no line can be answered.

    Args:
        source: the prompts.
        tokenizer: the model's.
        max_tokens: the longest answer of lines that do not say it. All answers are taken to be as long as they may be.
        context: tokens that the model has positions for. Lines that ask for more are left out.
        done: names of lines that are answered.

    Raises:
        ConfigError: they cannot be read.
    """
    every = max(1, source.count() // SAMPLED)
    answers = new_tokens = number = 0
    prompts: list[int] = []
    longest: list[tuple[int, int, int]] = []  # bytes, number, longest answer
    for line_number, line in source.lines():
        try:
            request = read_request(line_number, line, seed=0)
            allowed = max_tokens if request.max_tokens is None else request.max_tokens
            if request.custom_id in done or allowed > context:
                continue
            if number % every == 0:
                prompts.append(len(encoded(tokenizer, request)))
            heapq.heappush(longest, (len(line), line_number, allowed))
        except LineError:
            continue
        if len(longest) > LONGEST:
            heapq.heappop(longest)
        number += 1
        answers += request.choices
        new_tokens += request.choices * allowed
    if not prompts:
        return None
    return BatchWork(
        answers,
        sum(prompts) / len(prompts),
        new_tokens / answers,
        min(
            context,
            _longest(source, tokenizer, {line_number: allowed for _, line_number, allowed in longest}, max(prompts)),
        ),
    )


def _longest(source: Source, tokenizer: PreTrainedTokenizerBase, some: dict[int, int], prompt: int) -> int:
    """Return the tokens of the longest of some lines with its answer; at least those of a prompt with the longest answer."""
    found = prompt + max(some.values())
    for line_number, line in source.lines():
        if line_number in some:
            try:
                found = max(found, len(encoded(tokenizer, read_request(line_number, line, seed=0))) + some[line_number])
            except LineError:
                continue
    return found
