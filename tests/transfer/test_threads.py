from __future__ import annotations

import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import promoe.transfer.threads as module
from promoe.transfer.threads import ThreadBeside, has_spare_core, hold_in_forks


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def multiply() -> None:
    """Multiply matrices so large that torch would use all threads it may."""
    (torch.ones(512, 512) @ torch.ones(512, 512)).relu_().to(torch.bfloat16)


def system_threads() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


def started_by(start: Callable[[Callable[[], None]], threading.Thread]) -> int:
    """Return how many more system threads there are while a thread multiplies, itself included."""
    multiplied, end = threading.Event(), threading.Event()

    def work() -> None:
        multiply()
        multiplied.set()
        end.wait()

    before = system_threads()
    thread = start(work)
    multiplied.wait()
    more = len(system_threads() - before)
    end.set()
    thread.join()
    return more


def start_plainly(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def start_beside(work: Callable[[], None]) -> threading.Thread:
    thread = ThreadBeside(work, "beside")
    thread.start()
    return thread


@pytest.mark.usefixtures("two_threads")
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_thread_beside_the_model_forms_no_team() -> None:
    multiply()  # this thread's own team
    assert started_by(start_plainly) > 1, "torch did not use two threads: the test shows nothing"
    assert started_by(start_beside) == 1


@pytest.mark.usefixtures("two_threads")
def test_other_threads_keep_their_number() -> None:
    numbers: dict[str, int] = {}
    start_beside(lambda: numbers.update(beside=torch.get_num_threads())).join()
    later = threading.Thread(target=lambda: numbers.update(later=torch.get_num_threads()))
    later.start()
    later.join()
    assert numbers == {"beside": 1, "later": 2}
    assert torch.get_num_threads() == 2


def test_the_thread_is_named_and_ends_with_the_process() -> None:
    end = threading.Event()
    thread = start_beside(lambda: end.wait() and None)
    assert (thread.name, thread.daemon, thread.is_alive()) == ("beside", True, True)
    end.set()
    thread.join()


@pytest.mark.parametrize(("cores", "spare"), [({0}, False), ({0, 5}, False), ({0, 1, 2}, True)])
@pytest.mark.usefixtures("two_threads")
def test_a_core_is_spare_if_torch_computes_on_fewer_than_the_process_may_use(
    cores: set[int], spare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: cores, raising=False)
    assert has_spare_core() == spare


@pytest.mark.usefixtures("two_threads")
def test_where_affinities_are_unknown_all_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    assert has_spare_core()
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert not has_spare_core()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_process_is_told_while_the_lock_is_held() -> None:
    class Owner:
        told_with_lock = False

    owner, gone, lock = Owner(), Owner(), threading.Lock()
    hold_in_forks(owner, lock, lambda owner: setattr(owner, "told_with_lock", lock.locked()))
    hold_in_forks(gone, lock, lambda gone: None)  # would wait for the same lock for ever
    del gone
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons: there are threads
        child = os.fork()
    if child == 0:
        os.write(write, b"told" if owner.told_with_lock and not lock.locked() else b"not")
        os._exit(0)
    assert os.read(read, 4) == b"told"
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    assert not owner.told_with_lock
    assert not lock.locked()


@pytest.mark.parametrize(
    ("threads", "cores", "quota", "said"),
    [
        (2, 2, None, None),
        (2, 1, None, "torch computes on 2 threads, and this process has 1 core\\(s\\): .*set_num_threads\\(1\\)"),
        (8, 1, 1.5, "8 threads, and this process gets the time of 1.5 cores .*OMP_NUM_THREADS=1"),
    ],
)
def test_more_threads_than_cores_are_told_once(
    threads: int,
    cores: int,
    quota: float | None,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "_warned", [])
    monkeypatch.setattr(module, "num_cores", lambda: cores)
    monkeypatch.setattr(module, "cpu_quota", lambda: quota)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for _ in range(2):
        module.warn_of_threads()
    assert len(caplog.records) == (said is not None)
    assert re.search(said or "", caplog.text)
