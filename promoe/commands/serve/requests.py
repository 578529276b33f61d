"""A request to the server: what it asks for, what it may ask for, and what has become of it."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from promoe.errors import ConfigError, PromoeError
from promoe.model.context import longest_answer

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def is_loopback(name: str) -> bool:
    """Return whether a host name or address leads back to this machine."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Refused(PromoeError):
    """Raised for a request that is not answered.

    Args:
        message: what was asked, what was found, what to do.
        status: the HTTP status.
        param: the field that is refused.
        code: OpenAI's word for the reason, where there is one.
    """

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class Cancelled(PromoeError):
    """Raised to end a generation whose answer nobody waits for any more."""


@dataclass(frozen=True)
class Limits:
    """What one request may ask for.

    Attributes:
        model: the name by which clients call the model.
        body_bytes: the longest request.
        prompt_tokens: the longest prompt, after the chat template.
        new_tokens: the longest answer; also the length of one that is not asked for a length.
        waiting: the most requests that wait or are being answered at once.
        context: the most tokens of prompt and answer together that the model was made for; None: not known.
        vocabulary: the size of the model's vocabulary; None: not known.
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
    """The longest answer that it asks for; None: it does not say."""
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
        """Cancel the request: nobody waits any more, or the server is ending."""
        self._cancelled.set()
        if self.on_cancel is not None:
            self.on_cancel()

    @property
    def cancelled(self) -> bool:
        """Return whether `cancel` was called."""
        return self._cancelled.is_set()

    @property
    def outcome(self) -> Literal["answered", "refused", "failed", "cancelled"]:
        """Return what has become of it."""
        if self.cancelled:
            return "cancelled"
        return "failed" if self.error else "refused" if self.refusal else "answered"

    def wait_cancelled(self, timeout_s: float) -> bool:
        """Wait for `cancel`, and return whether it was called in that time."""
        return self._cancelled.wait(timeout_s)

    def check(self) -> None:
        """Raise Cancelled if nobody waits any more."""
        if self._cancelled.is_set():
            raise Cancelled("The answer was cancelled.")

    def admit(self, prompt_tokens: int, generation: Any, limits: Limits) -> None:
        """Check a tokenised request against the limits, and write what it asks for into its `GenerationConfig`.

        Args:
            prompt_tokens: the length of its prompt.
            generation: its `GenerationConfig`, which gets the number of tokens and the settings of sampling.
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
        try:
            longest = longest_answer(limits.context, prompt_tokens, self.new_tokens, limits.new_tokens)
        except ConfigError as error:
            raise Refused(str(error), param="max_tokens", code="context_length_exceeded") from None
        generation.max_new_tokens = longest
        if self.samples is not None:
            generation.do_sample = self.samples
        for name, value in self.settings.items():
            setattr(generation, name, value)
