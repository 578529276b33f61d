from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

import promoe.transfer.cpu_contention as module
from promoe.transfer.cpu_contention import BusyCores, CoreWatch, Taken, busy_cores_logger, without_busy_cores

TICKS = os.sysconf("SC_CLK_TCK")


class Machine:
    """A made-up /proc/stat, a clock, and what this process has used."""

    def __init__(self, folder: Path, cores: int) -> None:
        self.folder, self.now_s, self.own_s = folder, 100.0, 5.0
        self.busy_s, self.idle_s, self.withheld_s = ([seconds] * cores for seconds in (10.0, 20.0, 1.0))
        self.write()

    def write(self) -> None:
        rows = zip(self.busy_s, self.idle_s, self.withheld_s, strict=True)
        lines = ["cpu  999999 0 0 0 0 0 0 0 0 0"]
        for core, (busy_s, idle_s, withheld_s) in enumerate(rows):
            ticks = [int(TICKS * seconds) for seconds in (busy_s / 2, 0, busy_s / 2, idle_s, idle_s, 0, 0, withheld_s)]
            lines.append(f"cpu{core} {' '.join(map(str, ticks))} 0 0")
        (self.folder / "stat").write_text("\n".join([*lines, "intr 1 2 3", "ctxt 4"]))

    def pass_s(self, seconds: float, busy: list[float], own: float = 0.0, withheld: float = 0.0) -> None:
        """Let time pass, with the share in which each core is busy, and how many cores this process takes."""
        self.now_s += seconds
        self.own_s += own * seconds
        for core, share in enumerate(busy):
            self.busy_s[core] += share * seconds
            self.withheld_s[core] += withheld * seconds
            self.idle_s[core] += (1 - share - withheld) * seconds
        self.write()

    def watch(self, cores: list[int]) -> CoreWatch:
        return CoreWatch(self.folder, cores, lambda: self.now_s, lambda: self.own_s)


def test_what_is_not_this_process_s_own_is_taken_by_others(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 2)
    watch = machine.watch([0, 1])
    machine.pass_s(10, [0.9, 0.6], own=1.0, withheld=0.1)
    taken = watch.taken()
    assert taken is not None
    assert taken.cores == 2
    assert taken.by_others == pytest.approx(0.5, abs=0.01)
    assert taken.withheld == pytest.approx(0.2, abs=0.01)
    assert taken.much_by_others
    assert taken.describe() == "other processes took 0.50 of 2 cores, the host withheld 0.20"


def test_cores_that_this_process_may_not_use_do_not_count(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 4)
    watch = machine.watch([2, 3])
    machine.pass_s(10, [1.0, 1.0, 0.0, 0.1])
    taken = watch.taken()
    assert taken is not None
    assert taken.cores == 2
    assert taken.by_others == pytest.approx(0.1, abs=0.01)
    assert not taken.much_by_others
    assert taken.withheld == 0.0


@pytest.mark.parametrize(
    ("cores", "by_others", "threads"), [(2, 0.5, 1), (2, 1.9, 1), (2, 5.0, 1), (8, 1.2, 7), (8, 2.0, 6)]
)
def test_no_more_threads_than_cores_are_free(cores: int, by_others: float, threads: int) -> None:
    assert f"OMP_NUM_THREADS={threads}, or torch.set_num_threads({threads})" in Taken(cores, by_others, 0.0).remedy


def test_never_less_than_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1)
    watch = machine.watch([0])
    machine.pass_s(10, [0.5], own=0.6)  # ticks are coarse
    assert watch.taken() == Taken(1, 0.0, 0.0)


def test_unknown_where_the_system_does_not_say(tmp_path: Path) -> None:
    assert CoreWatch(tmp_path).taken() is None
    machine = Machine(tmp_path, 1)
    watch = machine.watch([0])
    assert watch.taken() is None, "no time has passed"
    machine.pass_s(0.05, [0.5])
    assert watch.taken() is None, "a few ticks"
    machine.pass_s(0.1, [0.5])
    assert watch.taken() is not None
    (tmp_path / "stat").write_text("cpu0 1 2\n")
    assert CoreWatch(tmp_path, [0]).taken() is None, "fewer numbers than Linux writes"


def _compute(seconds: float) -> None:
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        pass


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no Linux")
def test_what_this_process_and_its_children_compute_is_their_own() -> None:
    before_s = module._own_s(module.PROC)
    _compute(0.2)
    child = multiprocessing.get_context("spawn").Process(target=_compute, args=(0.2,))
    child.start()
    child.join()
    assert module._own_s(module.PROC) - before_s >= 0.39


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no Linux")
def test_a_child_that_still_runs_counts_already() -> None:
    context = multiprocessing.get_context("spawn")
    end = context.Event()
    child = context.Process(target=_spin_until, args=(end,))
    before_s = module._own_s(module.PROC)
    child.start()
    try:
        deadline_s = time.monotonic() + 60
        while module._child_s(module.PROC, child.pid) < 0.3 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert module._own_s(module.PROC) - before_s >= 0.29
    finally:
        end.set()
        child.join()
    assert module._child_s(module.PROC, child.pid) == 0.0


def _spin_until(end: object) -> None:
    while not end.is_set():  # type: ignore[attr-defined]
        pass


class Decoding:
    """A model that decodes on a made-up machine of two cores, 0.5 s a token."""

    def __init__(self, folder: Path, threads: int = 2) -> None:
        self.machine = Machine(folder, 2)
        self.busy_cores = BusyCores(lambda: threads, lambda: self.machine.watch([0, 1]), lambda: self.machine.now_s)
        self.told: list[str] = []

    def tokens(self, count: int, others: float, own: float = 1.0, between_s: float = 0.0) -> None:
        for _ in range(count):
            self.machine.pass_s(between_s + 0.5, [(others + own) / 2] * 2, own=own)
            if (told := self.busy_cores.pass_ended(0.5)) is not None:
                self.told.append(told)


def test_cores_that_others_keep_busy_are_told_once(tmp_path: Path) -> None:
    decoding = Decoding(tmp_path)
    decoding.tokens(100, others=0.1, own=1.9)
    assert decoding.told == []
    decoding.tokens(100, others=1.0)
    (told,) = decoding.told
    assert told.startswith("other processes took 1.0")
    assert "while 8 tokens took 4.0 s. Stop them, or compute on as many threads as cores are free" in told
    assert told.endswith("OMP_NUM_THREADS=1, or torch.set_num_threads(1) in Python.")


def test_more_threads_than_cores_are_nobody_elses_doing(tmp_path: Path) -> None:
    decoding = Decoding(tmp_path, threads=4)
    decoding.tokens(60, others=0.0, own=2.0)
    assert decoding.told == []


@pytest.mark.parametrize("what", ["threads are few", "the model waits for its user", "a short while"])
def test_where_there_is_nothing_to_mend_nothing_is_told(what: str, tmp_path: Path) -> None:
    decoding = Decoding(tmp_path, threads=1 if what == "threads are few" else 2)
    between_s = 2.0 if what == "the model waits for its user" else 0.0
    decoding.tokens(7 if what == "a short while" else 60, others=1.0, between_s=between_s)
    assert decoding.told == []


def test_a_pause_begins_a_new_stretch(tmp_path: Path) -> None:
    """It does not matter what others take while nothing is computed."""
    decoding = Decoding(tmp_path)
    for _ in range(10):
        decoding.tokens(7, others=0.0, own=2.0)
        decoding.machine.pass_s(60.0, [1.0, 1.0])
    assert decoding.told == []


def test_where_the_system_does_not_say_nothing_is_told(tmp_path: Path) -> None:
    decoding = Decoding(tmp_path)
    (tmp_path / "stat").unlink()
    for _ in range(60):
        decoding.machine.now_s += 0.5
        assert decoding.busy_cores.pass_ended(0.5) is None


def test_the_warning_can_be_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with without_busy_cores(), without_busy_cores():
        busy_cores_logger.warning("within")
    busy_cores_logger.warning("after")
    assert [record.message for record in caplog.records] == ["after"]
