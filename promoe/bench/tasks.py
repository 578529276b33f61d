"""What the systems have to answer: held-out prompts, and long ones made of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from promoe.bench.options import Options
from promoe.bench.worker import Prompt
from promoe.demo.example import Example
from promoe.errors import ConfigError
from promoe.running import load_tokenizer, prompt_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATE = "generate"


@dataclass(frozen=True)
class Task:
    """One set of prompts; the first of them warms up and is not measured.

    Attributes:
        name: "generate", or "prompts of N tokens".
        prompts: all of them.
    """

    name: str
    prompts: Sequence[Prompt]


def make_tasks(options: Options, checkpoint: Path, example: Example | None) -> list[Task]:
    """To generate from ordinary prompts, then to read those of each length that was asked for.

    Args:
        options: how many prompts, tokens and lengths.
        checkpoint: whose tokenizer reads them.
        example: whose held-out prompts are used where `options` names no file.

    Raises:
        ConfigError: there are too few prompts.
        CheckpointError: there is no tokenizer.
    """
    tokenizer: Any = load_tokenizer(str(checkpoint))
    texts = _texts(options, example)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def prompt(ids: Sequence[int], new_tokens: int) -> Prompt:
        return Prompt(ids, new_tokens, options.seconds_per_answer, pad)

    ids = [prompt_inputs(tokenizer, text)["input_ids"][0].tolist() for text in texts[: options.pairs + 1]]
    tasks = [Task(GENERATE, [prompt(one, options.max_new_tokens) for one in ids])]
    for length in options.prompt_tokens:
        tasks.append(
            Task(f"prompts of {length} tokens", [prompt(one, 1) for one in _long(tokenizer, texts, length, len(ids))])
        )
    return tasks


def _long(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], length: int, count: int) -> list[list[int]]:
    """`count` prompts of exactly `length` tokens: consecutive pieces of all texts, again from the start if they end."""
    encoded = [tokenizer(text)["input_ids"] for text in texts]
    ids: list[int] = list(chain.from_iterable(encoded))
    repeated = ids * (-(-length * count // len(ids)))
    return [repeated[start : start + length] for start in range(0, length * count, length)]


def _texts(options: Options, example: Example | None) -> list[str]:
    needed = options.pairs + 1
    if options.prompts is None:
        assert example is not None, "prompts come from a file or from the example"
        return example.all_prompts(needed)
    path = Path(options.prompts)
    try:
        texts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"Cannot read the prompts '{path}': {error}. Give a file with a JSON list of texts."
        ) from error
    if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ConfigError(f"'{path}' must hold a JSON list of texts that are not empty.")
    if len(texts) < needed:
        raise ConfigError(f"'{path}' holds {len(texts)} prompts; {needed} are needed (one warms up). Lower --pairs.")
    return texts
