"""The prompts of a batch file as tokens, and how much work they are."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from promoe.commands.batch.lines import CHAT, LineError, Request, read_lines, read_request
from promoe.commands.plan.throughput import BatchWork
from promoe.errors import ConfigError

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


def count_lines(source: Path) -> int:
    """Return the number of lines that are not empty.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return sum(1 for _ in read_lines(source))
    except OSError as error:
        raise ConfigError(f"The prompts cannot be read: {error}. INPUT must be a file of JSON lines.") from error


def read_work(
    source: Path, tokenizer: PreTrainedTokenizerBase, max_tokens: int, done: Collection[str] = ()
) -> BatchWork | None:
    """Return how much work a file is; None: no line can be answered.

    Args:
        source: the file.
        tokenizer: the model's.
        max_tokens: the longest answer of lines that do not say it. All answers are taken to be as long as they may be.
        done: names of lines that are answered.

    Raises:
        ConfigError: the file cannot be read.
    """
    every = max(1, count_lines(source) // SAMPLED)
    answers = new_tokens = number = 0
    prompts: list[int] = []
    longest: list[tuple[int, int, int]] = []  # bytes, number, longest answer
    for line_number, line in read_lines(source):
        try:
            request = read_request(line_number, line, seed=0)
            if request.custom_id in done:
                continue
            allowed = max_tokens if request.max_tokens is None else request.max_tokens
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
        _longest(source, tokenizer, {line_number: allowed for _, line_number, allowed in longest}, max(prompts)),
    )


def _longest(source: Path, tokenizer: PreTrainedTokenizerBase, some: dict[int, int], prompt: int) -> int:
    """Return the tokens of the longest of some lines with its answer; at least those of a prompt with the longest answer."""
    found = prompt + max(some.values())
    for line_number, line in read_lines(source):
        if line_number in some:
            try:
                found = max(found, len(encoded(tokenizer, read_request(line_number, line, seed=0))) + some[line_number])
            except LineError:
                continue
    return found
