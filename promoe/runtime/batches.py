"""Answers any number of prompts, many at once: Transformers' continuous batching, or padded batches.

Each step of continuous batching computes the tokens of all sequences together, without padding, so that an expert is
loaded once for all of them. Its KV cache has a fixed size. Models that it cannot serve (encoder-decoders, linear attention)
are given padded batches of prompts of similar length instead. Knows nothing of files or text.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationMixin

from promoe.errors import ConfigError, UnsupportedModelError, shown
from promoe.runtime.admission import Admission, Admitted
from promoe.runtime.padded import padded_batch
from promoe.runtime.paged import PagedRunner, is_paged
from promoe.runtime.sampling import Sampling
from promoe.runtime.token_choice import EndsAt

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Prompts that are sorted by length together, in padded batches.
SORTED_BATCHES = 8


@dataclass(frozen=True, slots=True)
class BatchPrompt:
    """One prompt of many.

    Attributes:
        ids: its tokens.
        max_new_tokens: longest answer, in tokens; None: 128, or as many as the model's context leaves.
        sampling: how its tokens are drawn.
        ends_at: called with the tokens of the answer so far, after each one; returns whether the answer ends with it.
    """

    ids: Sequence[int]
    max_new_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    ends_at: EndsAt | None = None


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """The answer to one prompt of many.

    Attributes:
        number: the prompt's, from 0 in the order in which prompts were given.
        tokens: the answer's. A token of the model's that ended it is left out; one that `ends_at` stopped at is not.
        ended: whether the model or `ends_at` ended it; else it is as long as it may be.
        end: the model's token that ended it; None: none did.
        error: why there is none; None: there is one.
    """

    number: int
    tokens: list[int]
    ended: bool = False
    end: int | None = None
    error: str | None = None


def generate_batch(
    model: PreTrainedModel,
    prompts: Iterable[BatchPrompt | Sequence[int] | torch.Tensor],
    *,
    at_once: int = 64,
    step_tokens: int = 512,
    kv_tokens: int = 16384,
) -> Iterator[BatchAnswer]:
    """Answer prompts, and yield each answer as soon as it is complete.

    Prompts are taken as there is room, so there may be any number of them in bounded memory. The same prompts in the same
    order are computed in the same steps by a patched model and by the unmodified one, whose answers are the same.

    What a prompt's `sampling` does not say comes from the model's `generation_config`, as in `generate`: whether tokens are
    drawn, penalties, suppressed tokens, the tokens that end an answer. Settings that a batch does not have (beams, guidance)
    are named in a warning. Do not call the model before the last answer has come, or the generator was closed: a thread
    computes with it.

    Args:
        model: patched or not, in evaluation mode.
        prompts: token ids, or `BatchPrompt`.
        at_once: the most sequences that are computed together.
        step_tokens: the most tokens of a step. Long prompts are cut.
        kv_tokens: tokens of the KV cache, which all sequences share. A prompt and its answer must fit there, and into the
            model's context; one that does not gets an answer with an error.

    Raises:
        ConfigError: a number is less than 1, a prompt is not token ids, the model is in training mode, or its
            `generation_config` cannot be used.
        PatchStateError: the model is answering another batch.
        UnsupportedModelError: the model writes no text.
        PromoeError: an expert could not be fetched, or the model failed. Answers that were not yielded are lost.
    """
    for name, value in {"at_once": at_once, "step_tokens": step_tokens, "kv_tokens": kv_tokens}.items():
        if value < 1:
            raise ConfigError(f"The '{name}' parameter of generate_batch must be at least 1. Got {value} instead.")
    if model.training:
        raise ConfigError("The model is in training mode. Call model.eval() first.")
    if not isinstance(model, GenerationMixin) or not model.can_generate():
        raise UnsupportedModelError(
            f"{type(model).__name__} writes no text: it has no language head. Open the model with AutoModelForCausalLM, "
            "or with promoe.from_pretrained without a model class."
        )
    numbered = enumerate(map(_checked, prompts))
    if is_paged(model):
        runner = PagedRunner(model, at_once, step_tokens, kv_tokens)
        yield from _paged(runner, Admission(model, runner.kv_tokens), numbered, at_once)
    else:
        yield from _padded(model, Admission(model, None), numbered, at_once)


def _checked(prompt: BatchPrompt | Sequence[int] | torch.Tensor) -> BatchPrompt:
    """Return a prompt whose ids are a list of Python's integers."""
    asked = prompt if isinstance(prompt, BatchPrompt) else None
    ids: Any = prompt if asked is None else asked.ids
    try:
        whole = [operator.index(token) for token in getattr(ids, "tolist", lambda: ids)()]
        return BatchPrompt(whole) if asked is None else replace(asked, ids=whole)
    except TypeError as error:
        raise ConfigError(f"A prompt of generate_batch must be token ids. Got {shown(ids)} instead.") from error


def _admitted(admission: Admission, number: int, prompt: BatchPrompt) -> Admitted | BatchAnswer:
    """Return a prompt that is answered, or an answer that says why it is not."""
    try:
        return admission.admit(number, prompt.ids, prompt.max_new_tokens, prompt.sampling, prompt.ends_at)
    except ValueError as error:
        return BatchAnswer(number, [], error=str(error))


def _paged(
    runner: PagedRunner, admission: Admission, numbered: Iterator[tuple[int, BatchPrompt]], at_once: int
) -> Iterator[BatchAnswer]:
    waiting: set[int] = set()
    with runner:
        while True:
            # As many again wait, so that a sequence that ends is replaced in the next step.
            for number, prompt in islice(numbered, max(0, 2 * at_once - len(waiting))):
                one = _admitted(admission, number, prompt)
                if isinstance(one, BatchAnswer):
                    yield one
                    continue
                runner.add(number, one.ids, one.max_new_tokens, one.choice)
                waiting.add(number)
            if not waiting:
                return
            answer = BatchAnswer(*runner.next())
            waiting.remove(answer.number)
            yield answer


def _padded(
    model: PreTrainedModel, admission: Admission, numbered: Iterator[tuple[int, BatchPrompt]], at_once: int
) -> Iterator[BatchAnswer]:
    while some := [_admitted(admission, *one) for one in islice(numbered, at_once * SORTED_BATCHES)]:
        yield from (one for one in some if isinstance(one, BatchAnswer))
        good = [one for one in some if isinstance(one, Admitted)]
        # Longest first, as MoE-Lightning's Algorithm 2: neighbours need little padding.
        good.sort(key=lambda one: (-len(one.ids), one.number))
        for start in range(0, len(good), at_once):
            for answer in padded_batch(model, good[start : start + at_once]):
                yield BatchAnswer(*answer)
