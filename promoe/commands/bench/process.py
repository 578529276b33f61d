"""The other end of a worker: starts its process, limits its memory, and asks."""

from __future__ import annotations

import multiprocessing
import os
from contextlib import suppress
from typing import Any

from promoe.commands.bench.worker import Answer, Contending, Facts, Opening, Preparing, Prompt, Sizes, serve
from promoe.commands.contention import Contention
from promoe.errors import PromoeError
from promoe.transfer.control_groups import MemoryGroup
from promoe.units import format_memory

LIMIT_FOR_ENDING_S = 20.0


class WorkerError(PromoeError):
    """A system failed: it was refused, raised, or was killed for its memory."""


class Worker:
    """A system in a process of its own.

    Args:
        opening: what it opens; by then its memory is limited.
        limit_bytes: memory for what it allocates and reads, page cache included, its interpreter and libraries not; None:
            no limit.
        around: the control group that the process's own is made in; needed for a limit.

    Raises:
        WorkerError: it could not be opened.
        NoControlGroupError: its memory could not be limited.
    """

    def __init__(self, opening: Opening, limit_bytes: int | None, around: MemoryGroup | None) -> None:
        self.name = opening.system.name
        self.limit_bytes = limit_bytes
        self._group: MemoryGroup | None = None
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other,), daemon=True, name=f"bench {self.name}")
        threads = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = str(opening.threads)
        try:
            self._process.start()
        finally:
            if threads is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = threads
        other.close()
        try:
            self._receive()
            if limit_bytes is not None:
                assert around is not None, "a limit needs a group"
                self._group = around.new_inside(limit_bytes)
                assert self._process.pid is not None
                self._group.add(self._process.pid)
            self._ask("open", opening)
        except BaseException:
            self.close()
            raise

    def answer(self, prompt: Prompt) -> Answer:
        """Let it answer a prompt."""
        result: Answer = self._ask("answer", prompt)
        return result

    def sizes(self) -> Sizes:
        """What the model takes."""
        result: Sizes = self._ask("sizes", None)
        return result

    def slots_bytes(self, cache: str) -> int:
        """What the slots of such a cache take.

        Raises:
            WorkerError: it is no size, or too small for one expert.
        """
        result: int = self._ask("slots", cache)
        return result

    def prepare(self, what: Preparing) -> None:
        """Write a peer's files, unless they are there."""
        self._ask("prepare", what)

    def contention(self, how: Contending) -> Contention:
        """What computing and reading lose to each other; of the unmodified model's process."""
        result: Contention = self._ask("contention", how)
        return result

    def reset(self) -> None:
        """Forget what was counted."""
        self._ask("reset", None)

    def facts(self) -> Facts:
        """What was counted."""
        result: Facts = self._ask("facts", None)
        return result

    @property
    def peak_limited_bytes(self) -> int | None:
        """The most that counted against its limit at once; None without a limit."""
        return None if self._group is None else self._group.peak_bytes

    def close(self) -> None:
        """End the process. Safe to repeat."""
        self._connection.close()
        self._process.join(LIMIT_FOR_ENDING_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        if self._group is not None:
            self._group.remove()

    def _ask(self, request: str, argument: Any) -> Any:
        with suppress(BrokenPipeError):  # it has ended: receiving says so
            self._connection.send((request, argument))
        answered, value = self._receive()
        if not answered:
            raise WorkerError(f"The system {self.name!r} failed. {value}")
        return value

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError):
            pass
        self._process.join(LIMIT_FOR_ENDING_S)
        code = self._process.exitcode
        if code == -9 and self.limit_bytes is not None:
            raise WorkerError(
                f"The system {self.name!r} was killed: it needs more than the {format_memory(self.limit_bytes)} that it may "
                "have. Give all systems more with --workspace."
            )
        raise WorkerError(f"The process of the system {self.name!r} ended with exit code {code}.")
