"""What the systems have to answer, and the answers of the unmodified model that theirs are compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from promoe.commands.bench.example import read_prompts
from promoe.commands.bench.messages import Answer, Prompt
from promoe.commands.bench.options import Options
from promoe.commands.bench.process import OpenSystem
from promoe.commands.measure import Generation
from promoe.errors import CheckpointError, PromoeError, UnsupportedModelError
from promoe.model.gguf.finding import is_gguf
from promoe.model.hub import base_of
from promoe.model.tokenizer import load_tokenizer, prompt_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATE = "generate"


class TokensDifferError(PromoeError):
    """A system generated other tokens than the unmodified model. This must never happen."""


@dataclass(frozen=True)
class Task:
    """A set of prompts. The first one warms up and is not measured.

    Attributes:
        name: "generate", or "prompts of N tokens".
        prompts: all of them.
    """

    name: str
    prompts: Sequence[Prompt]

    @property
    def reads(self) -> bool:
        """Whether only reading the prompts is measured, and not generating."""
        return self.name != GENERATE


@dataclass(frozen=True)
class Reference:
    """The answers that all systems have to give to a task, with their routing.

    Attributes:
        task: the task.
        answers: one per prompt, in order.
        unmodified: whether the unmodified model gave them, with everything in memory. If so, its times are those of computing.
        given_by: what gave them, in words.
    """

    task: Task
    answers: Sequence[Answer]
    unmodified: bool = True
    given_by: str = "the unmodified model"

    @property
    def measured(self) -> list[Generation]:
        """The answers to the prompts that are measured."""
        return [answer.generation for answer in self.answers[1:]]

    @property
    def compute_s(self) -> float:
        """Seconds per token, as the quicker tokens took them. Slower ones were beside other work of the machine."""
        return float(np.quantile([gap_s for answer in self.measured for gap_s in answer.gaps_s], 0.25))

    def verify(self, name: str, number: int, answer: Generation, *, partly: bool = False) -> None:
        """Compare an answer with the expected one.

        Args:
            name: of the system that gave it.
            number: of the prompt.
            answer: the answer.
            partly: whether the answer may be shorter than the expected one.

        Raises:
            TokensDifferError: the tokens are not the same.
        """
        expected = self.answers[number].generation.tokens
        if partly:
            expected = expected[: max(1, len(answer.tokens))]
        if answer.tokens == expected:
            return
        same = num_same(answer.tokens, expected)
        raise TokensDifferError(
            f"“{name}” generated other tokens than {self.given_by}: prompt {number}, from token {same} on: "
            f"{list(answer.tokens[same : same + 5])} instead of {list(expected[same : same + 5])}. The promise of "
            "identical output is broken. Please report it with the versions of promoe, torch and transformers."
        )


def num_same(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return how many tokens two answers have in common before they first differ."""
    pairs = zip(tokens, others, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(tokens), len(others)))


def refer(system: OpenSystem, task: Task, *, unmodified: bool = True, given_by: str = Reference.given_by) -> Reference:
    """Let a system answer a task, and record the routing. No answer is cut short: others are compared with them."""
    bar = tqdm(task.prompts, desc=f"reference: {task.name}", unit="answer", disable=None, leave=False)
    return Reference(
        task, [system.answer(replace(prompt, record=True, seconds=math.inf)) for prompt in bar], unmodified, given_by
    )


def make_tasks(options: Options, checkpoint: Path, prompts: Path) -> list[Task]:
    """Make the tasks: to generate from ordinary prompts, then to read prompts of each length that was asked for.

    Args:
        options: how many prompts, tokens and lengths.
        checkpoint: whose tokenizer reads them.
        prompts: file with a JSON list of texts.

    Raises:
        ConfigError: there are too few prompts, or the file is not such a list.
        CheckpointError: there is no tokenizer, or no configuration that Transformers knows.
        UnsupportedModelError: the model has an encoder of its own.
    """
    _check_is_decoder(checkpoint)
    tokenizer: Any = load_tokenizer(str(checkpoint))
    count = options.pairs + 1
    texts = read_prompts(prompts, count, "One of them warms up. Lower --pairs.")
    tasks = [generate_task(tokenizer, texts[:count], options.max_new_tokens, seconds=options.seconds_per_answer)]
    for length in options.prompt_tokens:
        long = [replace(tasks[0].prompts[0], ids=ids, new_tokens=1) for ids in _long(tokenizer, texts, length, count)]
        tasks.append(Task(f"prompts of {length} tokens", long))
    return tasks


def generate_task(
    tokenizer: Any,
    texts: Sequence[str],
    new_tokens: int,
    *,
    warm_up_tokens: int | None = None,
    seconds: float = math.inf,
) -> Task:
    """Make the task of answering some texts.

    Args:
        tokenizer: of the model.
        texts: the prompts.
        new_tokens: to generate for each.
        warm_up_tokens: at most so many for the first prompt; None: as for the others.
        seconds: an answer that takes longer is cut short.
    """
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    ids = [prompt_inputs(tokenizer, text)["input_ids"][0].tolist() for text in texts]
    first, *others = (Prompt(one, new_tokens, pad, seconds) for one in ids)
    if warm_up_tokens is not None:
        first = replace(first, new_tokens=min(warm_up_tokens, new_tokens))
    return Task(GENERATE, [first, *others])


def _check_is_decoder(checkpoint: Path) -> None:
    from transformers import AutoConfig

    if is_gguf(checkpoint):  # none of its families has an encoder
        return
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
    """Return `count` prompts of `length` tokens: consecutive pieces of all texts, from the start again if they end."""
    encoded = [tokenizer(text)["input_ids"] for text in texts]
    ids: list[int] = list(chain.from_iterable(encoded))
    repeated = ids * (-(-length * count // len(ids)))
    return [repeated[start : start + length] for start in range(0, length * count, length)]
