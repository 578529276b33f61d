"""Answers requests with a model: requests become prompts, and answers become lines of the result file."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from promoe.commands.batch.lines import CHAT, LineError, Request
from promoe.commands.batch.prompts import encoded
from promoe.commands.batch.results import answer_line, error_line
from promoe.commands.batch.stops import StopTexts
from promoe.errors import ConfigError
from promoe.model.context import context_tokens, longest_answer
from promoe.runtime.batches import BatchAnswer, BatchPrompt, generate_batch
from promoe.runtime.paged import PAGE_TOKENS, is_paged, kv_token_bytes
from promoe.transfer.links.free_ram import free_ram_bytes
from promoe.units import format_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Done:
    """A request that is done with.

    Attributes:
        line: line of the result file, but for its id.
        prompt_tokens: tokens that were read for its answer; 0: it was refused.
        new_tokens: tokens that were generated.
    """

    line: dict[str, Any]
    prompt_tokens: int = 0
    new_tokens: int = 0

    @property
    def answered(self) -> bool:
        """Whether it has an answer, not an error."""
        return self.line["error"] is None


def refused(error: LineError) -> Done:
    """Return what is written for a request that cannot be answered."""
    return Done(error_line(error.custom_id, str(error)))


@dataclass(slots=True)
class _Pending:
    """A request that is being answered: the tokens of its prompt, its stop texts, and its choices so far."""

    request: Request
    ids: list[int]
    stops: StopTexts
    choices: dict[int, BatchAnswer] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Aside:
    """A request that needs a larger KV cache, and the tokens that it needs."""

    request: Request
    kv_tokens: int


class Answering:
    """Answers requests with one model.

    Args:
        model: the opened model.
        tokenizer: its tokenizer.
        name: name of the model, for the answers.
        max_tokens: longest answer, in tokens, of requests that do not say it; less where the model's context leaves less.
        sizes: sizes of `generate_batch`. Requests that need a larger KV cache are answered last, with one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        max_tokens: int,
        sizes: Mapping[str, int],
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._name = name
        self._max_tokens = max_tokens
        self._sizes: dict[str, Any] = dict(sizes)
        self._context = context_tokens(model.config)
        self._apart = model.config.is_encoder_decoder
        self._paged = is_paged(model)
        self._pending: dict[int, tuple[_Pending, int]] = {}
        self._refused: deque[Done] = deque()

    def run(self, requests: Iterable[Request]) -> Iterator[Done]:
        """Yield each request as soon as all its choices are complete, or once it is refused.

        Raises:
            PromoeError: the model has failed.
        """
        aside: list[_Aside] = []
        yield from self._answered(requests, self._sizes, aside)
        fitting = [one for one in aside if not self._too_large(one)]
        if fitting:
            largest = max(one.kv_tokens for one in fitting)
            logger.info("%d lines are answered with a KV cache of %d tokens.", len(fitting), largest)
            yield from self._answered((one.request for one in fitting), {**self._sizes, "kv_tokens": largest}, [])
        yield from self._take_refused()

    def _answered(self, requests: Iterable[Request], sizes: dict[str, Any], aside: list[_Aside]) -> Iterator[Done]:
        """Answer requests with a KV cache of some size, and set those aside that do not fit there."""
        for answer in generate_batch(self._model, self._prompts(requests, sizes["kv_tokens"], aside), **sizes):
            yield from self._take_refused()
            if (done := self._take(answer)) is not None:
                yield done
        yield from self._take_refused()

    def _prompts(self, requests: Iterable[Request], kv_tokens: int, aside: list[_Aside]) -> Iterator[BatchPrompt]:
        """Yield a prompt for every choice of every request."""
        number = 0
        for request in requests:
            try:
                ids = encoded(self._tokenizer, request)
                longest = self._longest(request, ids)
            except LineError as error:
                self._refused.append(refused(error))
                continue
            needed = -(-(len(ids) + longest) // PAGE_TOKENS) * PAGE_TOKENS
            if self._paged and needed > kv_tokens:
                aside.append(_Aside(request, needed))
                continue
            stops = StopTexts(self._tokenizer, request.stops)
            pending = _Pending(request, ids, stops)
            for choice in range(request.choices):
                self._pending[number] = pending, choice
                number += 1
                sampling = replace(request.sampling, seed=request.sampling.seed + choice)
                yield BatchPrompt(ids, longest, sampling, stops if request.stops else None)

    def _longest(self, request: Request, ids: list[int]) -> int:
        try:
            return longest_answer(self._context, len(ids), request.max_tokens, self._max_tokens, apart=self._apart)
        except ConfigError as error:
            raise LineError(request.custom_id, str(error)) from None

    def _too_large(self, one: _Aside) -> bool:
        """Return whether there is no memory for the KV cache of a request, and refuse it then."""
        needed_bytes, free_bytes = one.kv_tokens * kv_token_bytes(self._model), free_ram_bytes()
        if self._model.device.type != "cpu" or free_bytes is None or needed_bytes <= free_bytes:
            return False
        message = (
            f"The prompt and its answer need a KV cache of {one.kv_tokens} tokens, {format_memory(needed_bytes)}, and "
            f"{format_memory(free_bytes)} are free. Ask for a shorter answer, or give a smaller --cache."
        )
        self._refused.append(refused(LineError(one.request.custom_id, message)))
        return True

    def _take_refused(self) -> Iterator[Done]:
        while self._refused:
            yield self._refused.popleft()

    def _take(self, answer: BatchAnswer) -> Done | None:
        pending, choice = self._pending.pop(answer.number)
        pending.choices[choice] = answer
        request = pending.request
        if len(pending.choices) < request.choices:
            return None
        if answer.error is not None:
            return refused(LineError(request.custom_id, answer.error))
        count = sum(len(one.tokens) for one in pending.choices.values())
        return Done(answer_line(request.custom_id, self._body(pending, count)), len(pending.ids), count)

    def _body(self, pending: _Pending, count: int) -> dict[str, Any]:
        request = pending.request
        is_chat = request.url == CHAT
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request.custom_id}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": self._name,
            "choices": [self._choice(pending, idx) for idx in range(request.choices)],
            "usage": {
                "prompt_tokens": len(pending.ids),
                "completion_tokens": count,
                "total_tokens": len(pending.ids) + count,
            },
        }

    def _choice(self, pending: _Pending, idx: int) -> dict[str, Any]:
        answer = pending.choices[idx]
        text, stopped = pending.stops.text(answer.tokens, answer.end)
        reason = "stop" if stopped or answer.ended else "length"
        is_chat = pending.request.url == CHAT
        content = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        return {"index": idx, **content, "logprobs": None, "finish_reason": reason}
