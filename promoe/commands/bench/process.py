"""A system in a process of its own, so that its memory can be limited and measured."""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import transformers

from promoe.commands.bench.messages import Answer, Facts, Opening, Prompt
from promoe.commands.bench.served import Served
from promoe.errors import PromoeError
from promoe.stores.gguf_parts import locate_parts
from promoe.transfer.control_groups import MemoryGroup
from promoe.transfer.cpu_contention import without_busy_cores
from promoe.transfer.links.disk import drop_files
from promoe.units import format_memory

LIMIT_FOR_ENDING_S = 20.0
# A system hangs if its answer does not come for so long after its time is up, or llama.cpp if it opens a file for so long.
# With a little too little memory, Linux may read the same pages again and again, and not kill the process.
PATIENCE_S = 300.0

P = ParamSpec("P")
T = TypeVar("T")


class WorkerError(PromoeError):
    """A system failed: it was refused, raised an error, or was killed because of its memory."""


class Worker:
    """A system in a process of its own.

    Args:
        opening: what the process opens. Its memory is limited before that.
        threads: that compute.
        limit_bytes: memory for what the process allocates and reads, page cache included, without its interpreter and
            libraries; None: no limit.
        around: the control group that contains the one of the process; needed for a limit.

    Raises:
        WorkerError: the system cannot be opened.
        NoControlGroupError: its memory cannot be limited.
    """

    def __init__(
        self, opening: Opening, threads: int, limit_bytes: int | None = None, around: MemoryGroup | None = None
    ) -> None:
        self.name = opening.system.name
        self.limit_bytes = limit_bytes
        self._group: MemoryGroup | None = None
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,), daemon=True, name=f"bench {self.name}")
        threads_before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = str(threads)
        try:
            self._process.start()
        finally:
            if threads_before is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = threads_before
        other.close()
        try:
            self._receive()
            if limit_bytes is not None:
                assert around is not None, "a limit needs a group"
                self._group = around.new_inside(limit_bytes)
                assert self._process.pid is not None
                self._group.add(self._process.pid)
            self._send("open", (opening, threads), {})
            if opening.system.is_llama_cpp:
                self._wait(PATIENCE_S, "did not open its file")
            self._result()
        except BaseException:
            self.close()
            raise

    def ask(self, method: Callable[Concatenate[Served, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of `Served` in the process, and return its result.

        Raises:
            WorkerError: the method raised an error, or the process ended.
        """
        self._send(method.__name__, args, kwargs)
        result: T = self._result()
        return result

    def answer(self, prompt: Prompt) -> Answer:
        """Answer a prompt, and time it.

        Raises:
            WorkerError: as in `ask`; or there was no answer `PATIENCE_S` after the time of the prompt was up. The process
                was then ended.
        """
        self._send(Served.answer.__name__, (prompt,), {})
        if math.isfinite(prompt.seconds):
            self._wait(prompt.seconds + PATIENCE_S, f"gave no answer to a prompt of {len(prompt.ids)} tokens")
        answer: Answer = self._result()
        return answer

    def facts(self) -> Facts:
        """Return what was counted."""
        return self.ask(Served.facts)

    def reset(self) -> None:
        """Forget what was counted."""
        self.ask(Served.reset)

    @property
    def peak_limited_bytes(self) -> int | None:
        """The most that counted against the limit at once; None without a limit."""
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

    def _send(self, *message: Any) -> None:
        with suppress(BrokenPipeError):  # the process has ended: receiving says so
            self._connection.send(message)

    def _wait(self, limit_s: float, what: str) -> None:
        """Wait for the process to send something. If it does not, end it, and raise WorkerError."""
        if self._connection.poll(limit_s):
            return
        self._process.kill()
        raise WorkerError(
            f"The system {self.name!r} {what} within {limit_s:.0f} s, and was ended. Give all systems more memory with "
            "--workspace, or leave it out."
        )

    def _result(self) -> Any:
        succeeded, value = self._receive()
        if not succeeded:
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


OpenSystem = Served | Worker
"""A system that is open, in this process or in one of its own."""


@without_busy_cores()  # said below each table
def _serve(connection: Connection) -> None:
    """Run the process: open a system, then call its methods until the other end closes. Errors are sent back."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    connection.send(None)  # ready: from here on memory is the system's own
    served: Served | None = None
    with suppress(EOFError):
        while True:
            method, args, kwargs = connection.recv()
            try:
                result = None
                if served is None:
                    served = _open(*args)
                else:
                    result = getattr(served, method)(*args, **kwargs)
                connection.send((True, result))
            except Exception as error:
                connection.send((False, f"{type(error).__name__}: {error}"))
    if served is not None:
        served.close()


def _end_with_parent() -> None:
    """End the process as soon as the one that started it has ended: killed, it could not say so, and answers take minutes."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _open(opening: Opening, threads: int) -> Served:
    torch.set_num_threads(threads)
    # What others read or wrote of its files is still in the page cache, and would not count against its limit.
    for place in filter(None, (opening.checkpoint, opening.folder)):
        drop_files(locate_parts(place) if place.is_file() else (path for path in place.rglob("*") if path.is_file()))
    return Served(opening)
