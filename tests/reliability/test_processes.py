"""Processes that are forked from one with a patched model, killed, or end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from served import checkpoint
from waiting import WAIT_S

import promoe
from promoe.errors import EngineError
from promoe.transfer.control_groups import memory_groups

from .support import FAMILY, WAYS, assert_right, assert_told, faulty, never

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


def in_fork(action: Callable[[], Any]) -> str:
    """Run `action` in a forked process. Return its error or "", and fail if it does not end."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons: there are threads
        child = os.fork()
    if child == 0:  # the test's clean-up and report must not run here
        try:
            action()
            os.write(write, b"-")
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    try:
        ended, _, _ = select.select([read], [], [], WAIT_S)
        if not ended:
            os.kill(child, signal.SIGKILL)
        assert ended, "the forked process hangs"
        return os.read(read, 65536).decode().removeprefix("-")
    finally:
        os.close(read)
        os.waitpid(child, 0)


@needs_fork
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("predictor", [None, "gate"])
def test_fork(way: str, predictor: str | None) -> None:
    """The copy raises that it has no workers. The process that patched the model goes on."""
    with faulty(way, never, predictor=predictor) as (model, _):
        assert_right(model)
        told = "This process was forked from the one that patched the model.*in the process that uses it"
        assert in_fork(lambda: assert_told(model, EngineError, told)) == ""
        assert_right(model)
        assert in_fork(lambda: assert_told(model, EngineError, told, "padded")) == ""
        assert_right(model, "padded")


@needs_fork
@pytest.mark.parametrize("way", ["RAM, workers", "files, workers"])
def test_fork_and_unpatch(way: str) -> None:
    """In the copy, the model can be unpatched, which needs no workers, and is right."""
    with faulty(way, never) as (model, _):
        assert_right(model)

        def use_it() -> None:
            promoe.unpatch(model)
            model.set_experts_implementation("grouped_mm")
            assert_right(model)

        assert in_fork(use_it) == ""
        assert_right(model)


@needs_fork
def test_fork_while_another_thread_computes() -> None:
    """The copy answers at once, whatever locks that thread held."""
    with faulty("RAM, workers", never) as (model, _):
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                assert_right(model, "short")

        thread = threading.Thread(target=work)
        thread.start()
        engine = model.promoe.runtime.engine
        try:
            for _ in range(20):
                # A gate's hints need our lock and never raise. They use no torch, whose locks are not ours.
                assert in_fork(lambda: (engine.hint(0, [0]), model.promoe.stats(), engine.close())) == ""
        finally:
            stop.set()
            thread.join()
        assert_right(model)


PROGRAM = """
    import sys, torch, promoe
    torch.set_num_threads(1)
    config = promoe.PromoeConfig(bypass=False)
    model = promoe.from_pretrained(sys.argv[1], cache="25%", config=config)
    ids = torch.arange(2, 14).unsqueeze(0)
    with torch.inference_mode():
        while True:
            model(ids)
            print("ready", flush=True)
"""


def test_killed_while_it_answers(tmp_path: Path) -> None:
    """After SIGKILL the checkpoint is as before, and shared memory, control groups and temporary folders are clean."""
    folder = checkpoint(FAMILY)
    before = contents(folder)
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(folder)]
    environment = {
        **os.environ,
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    with subprocess.Popen(program, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        for _ in range(3):
            assert process.stdout.readline() == b"ready\n"
        process.kill()
        assert process.wait(WAIT_S) == -signal.SIGKILL
    assert contents(folder) == before
    assert list(tmp_path.iterdir()) == []
    # Others use these folders, too. The names of what promoe and torch make there hold the process's number.
    shared = [Path("/dev/shm"), *(group.folder for group in memory_groups())]
    named = [entry for place in shared if place.is_dir() for entry in place.iterdir() if str(process.pid) in entry.name]
    assert [entry for entry in named if "promoe" in entry.name or "torch" in entry.name] == []


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of change of each file in a folder."""
    return {entry.name: (entry.stat().st_size, entry.stat().st_mtime_ns) for entry in folder.iterdir()}


# -- the end of the process -------------------------------------------------------------------------------------

START = """
    import sys, threading
    import torch, promoe
    from promoe.transfer.links import Fault, FaultyLink
    torch.set_num_threads(1)
    config = promoe.PromoeConfig(bypass=False, strict=True, stall_timeout_s=float(sys.argv[2]))
    ids = torch.arange(2, 6).unsqueeze(0)

    def opened(plan=lambda number, chunk: None, by_workers=True):
        model = promoe.from_pretrained(sys.argv[1], cache="40%", config=config)
        engine = model.promoe.runtime.engine
        assert engine.forwards_copy  # chunks as short as these
        engine.forwards_copy = not by_workers
        engine.link = FaultyLink(engine.link, plan)
        return model

    def stuck(number, chunk):
        return Fault("stuck") if number >= 3 else None

    def wait_for_stuck(model):
        assert model.promoe.runtime.engine.link.stuck.wait(60)

    @torch.inference_mode()
    def ask(model):
        return model(ids).logits

    def ask_beside(model):
        thread = threading.Thread(target=ask, args=[model], daemon=True)
        thread.start()
        return thread
"""

ENDS = {
    "idle, unpatched, closed": """
        idle, unpatched, closed = opened(), opened(), opened()
        for model in (idle, unpatched, closed):
            ask(model)
        promoe.unpatch(unpatched)
        closed.promoe.close()
    """,
    "a worker in a stuck read, more queued": """
        model = opened(stuck)
        asking = ask_beside(model)
        wait_for_stuck(model)
        assert model.promoe.runtime.engine.scheduler.has_orders
    """,
    "a forward in a stuck read": """
        model = opened(stuck, by_workers=False)
        asking = ask_beside(model)
        wait_for_stuck(model)
    """,
    "a predictor that computes": """
        computing = threading.Event()
        class Slow:
            def predict(self, visit):
                computing.set()
                numbers = torch.eye(20)
                for _ in range(5000):
                    numbers = numbers @ numbers
                return []
        model = promoe.from_pretrained(sys.argv[1], cache="40%", predictor=Slow(), config=config)
        ask(model)
        assert computing.wait(60)
    """,
    "closed with a stuck read": """
        model, raised = opened(stuck), []
        model.promoe.runtime.engine.clock = lambda: 0.0  # only closing gives up, however late it comes
        threading.excepthook = lambda args: raised.append(args.exc_type)
        asking = ask_beside(model)
        wait_for_stuck(model)
        model.promoe.close()
        asking.join()
        assert raised == [promoe.EngineClosedError], raised
    """,
}
LEFT_BEHIND = "still in a transfer after 2.0 s; left behind."


def ended(program: str, *options: str) -> str:
    """Run a process that must end in time with status 0. Return what it wrote to its standard error."""
    stall = "2.0" if program == ENDS["closed with a stuck read"] else "60.0"
    path = os.pathsep.join(path for path in sys.path if path)
    run = subprocess.run(
        [
            sys.executable,
            *options,
            "-c",
            textwrap.dedent(START) + textwrap.dedent(program),
            str(checkpoint(FAMILY)),
            stall,
        ],
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
    )
    assert run.returncode == 0, (run.returncode, run.stdout, run.stderr)
    return run.stderr


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id=""),
        pytest.param(("-X", "dev", "-W", "error::ResourceWarning"), id="development mode", marks=pytest.mark.slow),
    ],
)
def test_end_of_the_process(end: str, options: tuple[str, ...]) -> None:
    """Nobody waits for a read that hangs, and only intended messages are written, also with Python's own checks."""
    lines = ended(ENDS[end], *options).splitlines()
    if end == "closed with a stuck read":
        assert LEFT_BEHIND in lines.pop(0)
    assert not lines
