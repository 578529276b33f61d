"""Answers requests with a model: requests become prompts, and answers become lines of the result file."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from promoe.commands.batch.lines import CHAT, LineError, Request
from promoe.commands.batch.prompts import encoded
from promoe.commands.batch.results import answer_line, error_line
from promoe.runtime.batches import BatchAnswer, BatchPrompt, generate_batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Done:
    """A request that is done with.

    Attributes:
        line: of the result file.
        prompt_tokens: that were read for its answer; 0: it was refused.
        new_tokens: that were generated.
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
    """A request that is being answered: the tokens of its prompt, and its choices as far as they are complete."""

    request: Request
    ids: list[int]
    choices: dict[int, BatchAnswer] = field(default_factory=dict)


class Answering:
    """Answers requests with one model.

    Args:
        model: opened.
        tokenizer: its tokenizer.
        name: of the model, for the answers.
        max_tokens: the longest answer of requests that do not say it.
        sizes: of `generate_batch`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        max_tokens: int,
        sizes: Mapping[str, int],
    ) -> None:
        self._model, self._tokenizer, self._name = model, tokenizer, name
        self._max_tokens, self._sizes = max_tokens, sizes
        self._pending: dict[int, tuple[_Pending, int]] = {}
        self._refused: deque[Done] = deque()

    def run(self, requests: Iterable[Request]) -> Iterator[Done]:
        """Yield each request as soon as all its choices are complete, or once it is refused.

        Raises:
            PromoeError: the model has failed.
        """
        for answer in generate_batch(self._model, self._prompts(requests), **self._sizes):
            yield from self._take_refused()
            if (done := self._take(answer)) is not None:
                yield done
        yield from self._take_refused()

    def _prompts(self, requests: Iterable[Request]) -> Iterator[BatchPrompt]:
        """Yield a prompt for every choice of every request."""
        number = 0
        for request in requests:
            try:
                pending = _Pending(request, encoded(self._tokenizer, request))
            except LineError as error:
                self._refused.append(refused(error))
                continue
            longest = self._max_tokens if request.max_tokens is None else request.max_tokens
            for choice in range(request.choices):
                self._pending[number] = pending, choice
                number += 1
                sampling = replace(request.sampling, seed=request.sampling.seed + choice)
                yield BatchPrompt(pending.ids, longest, sampling)

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
            "choices": [self._choice(request, idx, pending.choices[idx]) for idx in range(request.choices)],
            "usage": {
                "prompt_tokens": len(pending.ids),
                "completion_tokens": count,
                "total_tokens": len(pending.ids) + count,
            },
        }

    def _choice(self, request: Request, idx: int, answer: BatchAnswer) -> dict[str, Any]:
        text = self._tokenizer.decode(answer.tokens, skip_special_tokens=True)
        places = [place for stop in request.stops if (place := text.find(stop)) >= 0]
        text = text[: min(places)] if places else text
        reason = "stop" if places or answer.ended else "length"
        content = {"message": {"role": "assistant", "content": text}} if request.url == CHAT else {"text": text}
        return {"index": idx, **content, "logprobs": None, "finish_reason": reason}
