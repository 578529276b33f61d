"""What the systems have to answer: held-out prompts, and long ones made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from promoe.commands.bench.options import Options
from promoe.commands.bench.worker import Prompt
from promoe.commands.demo.example import read_prompts
from promoe.errors import CheckpointError, UnsupportedModelError
from promoe.model.hub import base_of
from promoe.model.tokenizer import load_tokenizer, prompt_inputs

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


def make_tasks(options: Options, checkpoint: Path, prompts: Path) -> list[Task]:
    """To generate from ordinary prompts, then to read those of each length that was asked for.

    Args:
        options: how many prompts, tokens and lengths.
        checkpoint: whose tokenizer reads them.
        prompts: file with a JSON list of texts.

    Raises:
        ConfigError: there are too few, or the file is not such a list.
        CheckpointError: there is no tokenizer, or no configuration that Transformers knows.
        UnsupportedModelError: the model has an encoder of its own.
    """
    _check_is_decoder(checkpoint)
    tokenizer: Any = load_tokenizer(str(checkpoint))
    texts = read_prompts(prompts, options.pairs + 1, "One of them warms up. Lower --pairs.")
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


def _check_is_decoder(checkpoint: Path) -> None:
    from transformers import AutoConfig

    base = base_of(checkpoint)
    try:
        config = AutoConfig.from_pretrained(base, trust_remote_code=False)
    except Exception as error:  # Transformers computes with what config.json says
        raise CheckpointError(
            f"Cannot open {checkpoint}: {type(error).__name__}: {str(error)[:2000].rstrip('. ')}. This Transformers "
            "cannot make a model of its config.json."
        ) from error
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"promoe bench measures models that continue their prompt, and {config.model_type} has an encoder and a decoder. "
            "Measure your own calls with model.promoe.stats()."
        )


def _long(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], length: int, count: int) -> list[list[int]]:
    """`count` prompts of exactly `length` tokens: consecutive pieces of all texts, again from the start if they end."""
    encoded = [tokenizer(text)["input_ids"] for text in texts]
    ids: list[int] = list(chain.from_iterable(encoded))
    repeated = ids * (-(-length * count // len(ids)))
    return [repeated[start : start + length] for start in range(0, length * count, length)]
