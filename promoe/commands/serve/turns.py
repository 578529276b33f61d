"""The order of answers: requests wait in order, one thread answers one at a time, and whoever leaves gives up the turn."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from promoe.commands.serve.requests import Asked, Cancelled, Limits, Refused
from promoe.errors import EngineError
from promoe.experts.moe_layers import find_moe_layers

logger = logging.getLogger(__name__)

ASKED: ContextVar[Asked] = ContextVar("asked")
"""The request that this task of the server's event loop answers."""

ENDING = "The server is ending."


class AnswerError(Exception):
    """Raised when a generation failed; the message is for the client, the cause is in the log."""


@dataclass(eq=False)
class _Turn:
    asked: Asked
    act: Callable[[], Any] | None
    done: Future[Any] = field(default_factory=Future)

    def drop(self) -> None:
        """Free what it would compute from, if it has not begun: it may stay in the queue for long."""
        if self.done.cancel():
            self.act = None


class Turns:
    """A queue of generations, which run in the thread that calls `run`: the one that opened the model.

    torch's threads belong to the thread that computes. Those of a second one would make the first one's sleep, and every
    operation slower.

    Args:
        limits: how many may wait.

    Attributes:
        tally: how many requests ended in each way: answered, refused, failed, cancelled.
        broken: why the model cannot answer, until it answers again.
    """

    def __init__(self, limits: Limits) -> None:
        self.tally: Counter[str] = Counter()
        self.broken: str | None = None
        self._limits = limits
        self._turns: queue.SimpleQueue[_Turn | None] = queue.SimpleQueue()
        self._open: dict[Asked, list[_Turn]] = {}
        self._lock = threading.Lock()
        self._ended = False
        self._current: Asked | None = None

    # -- the server's side --------------------------------------------------------------------------------------

    @contextmanager
    def taking(self, asked: Asked) -> Iterator[None]:
        """Let a request take part while the context lasts.

        Raises:
            Refused: too many take part, or the server is ending.
        """
        with self._lock:
            self._check_open()
            if len(self._open) >= self._limits.waiting:
                raise Refused(
                    f"{len(self._open)} requests are answered or wait, which is as many as this server takes at once "
                    "(--max-waiting). Try again later.",
                    status=503,
                    code="overloaded",
                )
            self._open[asked] = []
        try:
            yield
        finally:
            with self._lock:
                left = self._open.pop(asked)
                self.tally[asked.outcome] += 1
            for turn in left:
                turn.drop()

    def submit(self, act: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue a call for this task's request. The name is that of Transformers' inference thread.

        Raises:
            Refused: the server is ending.
        """
        turn = _Turn(ASKED.get(), lambda: act(*args, **kwargs))
        with self._lock:
            self._check_open()
            self._open.get(turn.asked, []).append(turn)
            self._turns.put(turn)
        return turn.done

    def async_submit(self, act: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        """Queue a call as `submit` does; the result is to be awaited."""
        return asyncio.wrap_future(self.submit(act, *args, **kwargs))

    def counts(self) -> dict[str, int]:
        """Return the numbers of requests now and so far."""
        with self._lock:
            running = int(self._current in self._open)
            counts = {"running": running, "waiting": len(self._open) - running}
            return counts | {name: self.tally[name] for name in ("answered", "refused", "failed", "cancelled")}

    def end(self) -> None:
        """Take no more requests, and cancel those that were taken. `run` returns when all have been told."""
        with self._lock:
            if not self._ended:
                self._ended = True
                self._turns.put(None)
            taken = list(self._open)
        for asked in taken:
            asked.cancel()

    def _check_open(self) -> None:
        if self._ended:
            raise Refused(ENDING, status=503, code="overloaded")

    # -- the computing thread's side ----------------------------------------------------------------------------

    def run(self) -> None:
        """Answer one request after the other until `end` is called."""
        while (turn := self._turns.get()) is not None:
            if not turn.done.set_running_or_notify_cancel():
                continue
            self._current = turn.asked
            assert turn.act is not None, "dropped turns are cancelled"
            try:
                turn.done.set_result(turn.act())
            except Exception as error:
                turn.done.set_exception(error)
            except BaseException:  # Ctrl-C: whoever waits for the answer is told, and the caller is, too
                if not turn.done.done():  # it may come while the answer is handed over
                    turn.done.set_exception(AnswerError(ENDING))
                raise
            finally:
                self._current = None
                del turn  # with the model's outputs
        self._turns.put(None)  # for whoever calls this again, to be sure that nothing is left

    @contextmanager
    def watching(self, model: PreTrainedModel) -> Iterator[ServedModel]:
        """Give handlers the model. While the context lasts, a forward that nobody waits for ends at its next MoE layer."""
        with ExitStack() as stack:
            stack.callback(model.register_forward_pre_hook(self._begin_pass).remove)
            for layer in find_moe_layers(model):
                stack.callback(layer.block.register_forward_pre_hook(self._check).remove)
            yield ServedModel(model, self)

    def generate(self, model: PreTrainedModel, **arguments: Any) -> Any:
        """Call `model.generate` for the request whose turn it is.

        Raises:
            Cancelled: nobody waits for it any more.
            AnswerError: it failed.
        """
        asked = self._current
        assert asked is not None, "a model is asked outside of a turn"
        try:
            asked.check()
            if asked.seed is not None:
                torch.manual_seed(asked.seed)
            with torch.inference_mode():
                output = model.generate(**arguments)
            self.broken = None
            return output
        except Cancelled:
            raise
        except Exception as error:
            logger.exception("A request for %s failed", asked.path)
            self.broken = type(error).__name__ if isinstance(error, EngineError) else None
            asked.error = f"The model could not answer: {type(error).__name__}. The server's log says why."
            raise AnswerError(asked.error) from error

    def _begin_pass(self, model: nn.Module, args: Any) -> None:
        if self._current is not None:
            self._current.passes += 1

    def _check(self, block: nn.Module, args: Any) -> None:
        if self._current is not None:
            self._current.check()


class ServedModel:
    """A model whose `generate` is that of `Turns`; all else is the model's.

    Args:
        model: the model.
        turns: the turns in which it generates.
        config: what is shown in place of the model's own.
    """

    def __init__(self, model: PreTrainedModel, turns: Turns, config: Any = None) -> None:
        self._model = model
        self._turns = turns
        self.config = config or model.config

    def showing(self, config: Any) -> ServedModel:
        """Return the same model with another `config`, for those who look at it."""
        return ServedModel(self._model, self._turns, config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, **arguments: Any) -> Any:
        """Generate as `Turns.generate` does."""
        return self._turns.generate(self._model, **arguments)
