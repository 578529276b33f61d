"""A request to the server: what it asks for, what it may ask for, and what becomes of it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from promoe.errors import PromoeError

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


class Refused(PromoeError):
    """A request that is not answered.

    Args:
        message: what was asked, what was found, what to do.
        status: of HTTP.
        param: the field it is about.
        code: OpenAI's word for it, where there is one.
    """

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class Cancelled(PromoeError):
    """Nobody waits for this answer any more: its generation ends here."""


@dataclass(frozen=True)
class Limits:
    """What one request may ask for.

    Attributes:
        model: the name by which clients call the model.
        body_bytes: of a request.
        prompt_tokens: of a prompt, after the chat template.
        new_tokens: of an answer; also how many it gets that does not say.
        waiting: requests that wait or are being answered at once.
        context: tokens of prompt and answer together that the model was made for; None: not said.
        vocabulary: of the model; None: not said.
    """

    model: str
    body_bytes: int = 2**20
    prompt_tokens: int = 8192
    new_tokens: int = 1024
    waiting: int = 32
    context: int | None = None
    vocabulary: int | None = None


@dataclass(eq=False)
class Asked:
    """One request, and what has become of it."""

    path: str
    stream: bool = False
    new_tokens: int | None = None
    """Longest answer that it asks for; None: it does not say."""
    samples: bool | None = None
    """Whether it asks for sampling, or for the most likely tokens; None: the model's own setting."""
    seed: int | None = None
    settings: dict[str, float | int] = field(default_factory=dict)
    """Fields of a `GenerationConfig` that it sets: `top_k`, `min_p`, `repetition_penalty`."""
    prompt_ids: list[int] | None = None
    """The prompt's tokens, where the client has sent these; None: it has sent text."""
    prompt_tokens: int = 0
    passes: int = 0
    """Forward passes so far: one for each token of the answer."""
    refusal: str | None = None
    """Why it was not answered, for the client."""
    error: str | None = None
    """Why its generation failed, for the client."""
    on_cancel: Callable[[], object] | None = None
    """Called when it is cancelled, from any thread."""
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Nobody waits any more, or the server is ending."""
        self._cancelled.set()
        if self.on_cancel is not None:
            self.on_cancel()

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled.is_set()

    @property
    def outcome(self) -> Literal["answered", "refused", "failed", "cancelled"]:
        """What has become of it."""
        if self.cancelled:
            return "cancelled"
        return "failed" if self.error else "refused" if self.refusal else "answered"

    def wait_cancelled(self, timeout_s: float) -> bool:
        """Wait for `cancel`; False if it was not called in that time."""
        return self._cancelled.wait(timeout_s)

    def check(self) -> None:
        """Raise Cancelled if nobody waits any more."""
        if self._cancelled.is_set():
            raise Cancelled("The answer was cancelled.")

    def admit(self, prompt_tokens: int, generation: Any, limits: Limits) -> None:
        """Hold a tokenised request to the limits.

        Args:
            prompt_tokens: of its prompt.
            generation: the `GenerationConfig` it would run with, which is told how many tokens it may generate, and how.
            limits: see `Limits`.

        Raises:
            Refused: the prompt is too long, alone or together with the answer it asks for.
        """
        self.prompt_tokens = prompt_tokens
        if prompt_tokens > limits.prompt_tokens:
            raise Refused(
                f"The prompt has {prompt_tokens} tokens; this server takes {limits.prompt_tokens}. Shorten it.",
                param="prompt" if self.path == COMPLETION else "messages",
                code="context_length_exceeded",
            )
        left = math.inf if limits.context is None else limits.context - prompt_tokens
        least = 1 if self.new_tokens is None else self.new_tokens
        if least > left:
            raise Refused(
                f"The model's context is {limits.context} tokens. The prompt has {prompt_tokens}, and an answer of {least} was "
                "asked for. Shorten either.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        generation.max_new_tokens = int(min(self.new_tokens or limits.new_tokens, left))
        if self.samples is not None:
            generation.do_sample = self.samples
        for name, value in self.settings.items():
            setattr(generation, name, value)
