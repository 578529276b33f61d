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
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList

from promoe.errors import ConfigError, UnsupportedModelError, shown
from promoe.runtime.noise import with_noise
from promoe.runtime.paged import PagedRunner, is_paged
from promoe.runtime.sampling import Sampling, cut, end_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Prompts that are sorted by length together, in padded batches.
SORTED_BATCHES = 8


@dataclass(frozen=True, slots=True)
class BatchPrompt:
    """One prompt of many.

    Attributes:
        ids: its tokens.
        max_new_tokens: longest answer, in tokens.
        sampling: how its tokens are drawn.
    """

    ids: Sequence[int]
    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """The answer to one prompt of many.

    Attributes:
        number: the prompt's, from 0 in the order in which prompts were given.
        tokens: the answer's, without the one that ended it.
        ended: whether the model ended it; else it is as long as it may be.
        error: why there is none; None: there is one.
    """

    number: int
    tokens: list[int]
    ended: bool = False
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

    Of the model's `generation_config`, only the tokens that end an answer are used. Do not call the model before the last
    answer has come, or the generator was closed: a thread computes with it.

    Args:
        model: patched or not, in evaluation mode.
        prompts: token ids, or `BatchPrompt`.
        at_once: the most sequences that are computed together.
        step_tokens: the most tokens of a step. Long prompts are cut.
        kv_tokens: tokens of the KV cache, which all sequences share. A prompt and its answer must fit.

    Raises:
        ConfigError: a number is less than 1, a prompt is not token ids, or the model is in training mode.
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
    asked = map(_checked, prompts)
    num_ids = model.get_input_embeddings().num_embeddings
    if is_paged(model):
        yield from _paged(PagedRunner(model, at_once, step_tokens, kv_tokens), asked, at_once, num_ids)
    else:
        yield from _padded(model, asked, at_once, num_ids)


def _checked(prompt: BatchPrompt | Sequence[int] | torch.Tensor) -> BatchPrompt:
    """Return a prompt whose ids are a list of Python's integers."""
    asked = prompt if isinstance(prompt, BatchPrompt) else None
    ids: Any = prompt if asked is None else asked.ids
    try:
        whole = [operator.index(token) for token in getattr(ids, "tolist", lambda: ids)()]
        return BatchPrompt(whole) if asked is None else replace(asked, ids=whole)
    except TypeError as error:
        raise ConfigError(f"A prompt of generate_batch must be token ids. Got {shown(ids)} instead.") from error


def _refusal(prompt: BatchPrompt, kv_tokens: float, num_ids: int) -> str | None:
    if not prompt.ids or prompt.max_new_tokens < 1:
        return "The prompt has no tokens." if not prompt.ids else "The answer may have no tokens."
    if wrong := [token for token in prompt.ids if not 0 <= token < num_ids]:
        return f"The prompt has the token id {wrong[0]}; the model has ids from 0 to {num_ids - 1}."
    needed = len(prompt.ids) + prompt.max_new_tokens
    return (
        f"The prompt has {len(prompt.ids)} tokens and its answer up to {prompt.max_new_tokens}, but the KV cache has room "
        f"for {kv_tokens:.0f} tokens. Ask for a shorter answer, or for a larger KV cache."
        if needed > kv_tokens
        else None
    )


def _paged(runner: PagedRunner, prompts: Iterator[BatchPrompt], at_once: int, num_ids: int) -> Iterator[BatchAnswer]:
    waiting: set[int] = set()
    numbered = enumerate(prompts)
    with runner:
        while True:
            # As many again wait, so that a sequence that ends is replaced in the next step.
            for number, prompt in islice(numbered, max(0, 2 * at_once - len(waiting))):
                if (refusal := _refusal(prompt, runner.kv_tokens, num_ids)) is not None:
                    yield BatchAnswer(number, [], error=refusal)
                    continue
                runner.add(number, prompt.ids, prompt.max_new_tokens, prompt.sampling)
                waiting.add(number)
            if not waiting:
                return
            number, tokens, ended = runner.next()
            waiting.remove(number)
            yield BatchAnswer(number, tokens, ended)


def _padded(
    model: PreTrainedModel, prompts: Iterator[BatchPrompt], at_once: int, num_ids: int
) -> Iterator[BatchAnswer]:
    numbered = enumerate(prompts)
    while some := list(islice(numbered, at_once * SORTED_BATCHES)):
        for number, prompt in some:
            if (refusal := _refusal(prompt, torch.inf, num_ids)) is not None:
                yield BatchAnswer(number, [], error=refusal)
        good = [(number, prompt) for number, prompt in some if _refusal(prompt, torch.inf, num_ids) is None]
        # Longest first, as MoE-Lightning's Algorithm 2: neighbours need little padding.
        good.sort(key=lambda one: (-len(one[1].ids), one[0]))
        for start in range(0, len(good), at_once):
            yield from _padded_batch(model, good[start : start + at_once])


def _padded_batch(model: PreTrainedModel, batch: Sequence[tuple[int, BatchPrompt]]) -> Iterator[BatchAnswer]:
    prompts = [prompt for _, prompt in batch]
    longest = max(len(prompt.ids) for prompt in prompts)
    ends, pad = end_ids(model), model.generation_config.pad_token_id
    if pad is None:
        pad = ends[0] if ends else 0
    ids = torch.tensor([[pad] * (longest - len(prompt.ids)) + list(prompt.ids) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt.ids)) + [1] * len(prompt.ids) for prompt in prompts])
    own_start = model.config.is_encoder_decoder
    noise = _Noise([prompt.sampling for prompt in prompts], 1 if own_start else longest)
    with torch.inference_mode():
        output: Any = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max(prompt.max_new_tokens for prompt in prompts),
            do_sample=False,
            num_beams=1,
            num_return_sequences=1,
            return_dict_in_generate=False,
            pad_token_id=pad,
            logits_processor=LogitsProcessorList([noise]),
        )
    answers = output[:, noise.start :].tolist()
    for (number, prompt), tokens in zip(batch, answers, strict=True):
        yield BatchAnswer(number, *cut(tokens[: prompt.max_new_tokens], ends))


class _Noise(LogitsProcessor):  # type: ignore[misc]
    """Draws the tokens of each sequence of a padded batch."""

    def __init__(self, samplings: Sequence[Sampling], start: int) -> None:
        self._samplings = samplings
        self.start = start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores `[sequences, vocabulary]` whose largest ones are the tokens that are drawn."""
        if all(sampling.greedy for sampling in self._samplings):
            return scores
        position = input_ids.shape[1] - self.start
        rows = zip(scores.float(), self._samplings, strict=True)
        return torch.stack([with_noise(row, sampling, position) for row, sampling in rows])
