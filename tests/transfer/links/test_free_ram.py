from __future__ import annotations

import sys
from mmap import mmap
from pathlib import Path

import pytest

from promoe.transfer.links.free_ram import free_ram_bytes, own_ram_bytes

GIB = 1024**3


@pytest.fixture
def system(tmp_path: Path) -> tuple[Path, Path]:
    """Make a /proc with 8 GiB available, and control groups without limits."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {8 * GIB // 1024} kB\nSwapFree: 5 kB\n")
    (proc / "self" / "cgroup").write_text("1:memory:/old\n0::/jobs/mine\n")
    (cgroups / "jobs" / "mine").mkdir(parents=True)
    return proc, cgroups


def limit(group: Path, most: int | str, used: int, inactive_file: int = 0) -> None:
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {inactive_file}\nactive_file 3\n")


def test_what_the_system_says_is_available(system: tuple[Path, Path]) -> None:
    assert free_ram_bytes(*system) == 8 * GIB


def test_a_group_without_limit_changes_nothing(system: tuple[Path, Path]) -> None:
    limit(system[1] / "jobs" / "mine", "max", GIB)
    assert free_ram_bytes(*system) == 8 * GIB


def test_the_tightest_limit_around_the_process_counts(system: tuple[Path, Path]) -> None:
    limit(system[1] / "jobs" / "mine", 6 * GIB, GIB)
    assert free_ram_bytes(*system) == 5 * GIB
    limit(system[1] / "jobs", 10 * GIB, 7 * GIB)
    assert free_ram_bytes(*system) == 3 * GIB
    limit(system[1] / "jobs", 10 * GIB, 11 * GIB)
    assert free_ram_bytes(*system) == 0


def test_the_page_cache_of_a_group_can_be_reclaimed(system: tuple[Path, Path]) -> None:
    limit(system[1] / "jobs" / "mine", 6 * GIB, 4 * GIB, inactive_file=3 * GIB)
    assert free_ram_bytes(*system) == 5 * GIB


@pytest.mark.parametrize("content", ["", "nonsense\n", "1:memory:/old\n"])
def test_without_groups_of_version_2_there_are_no_limits(system: tuple[Path, Path], content: str) -> None:
    limit(system[1] / "jobs" / "mine", 1, 1)
    (system[0] / "self" / "cgroup").write_text(content)
    assert free_ram_bytes(*system) == 8 * GIB


@pytest.mark.parametrize("content", [None, "", "MemTotal: 5 kB\n", "MemAvailable: many kB\n", "MemAvailable:\n"])
def test_a_system_that_does_not_tell(system: tuple[Path, Path], content: str | None) -> None:
    if content is None:
        (system[0] / "meminfo").unlink()
    else:
        (system[0] / "meminfo").write_text(content)
    assert free_ram_bytes(*system) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/meminfo")
def test_this_machine_tells() -> None:
    free_bytes = free_ram_bytes()
    assert free_bytes is not None
    assert 0 < free_bytes < 1 << 50


def test_what_this_process_has_for_itself(system: tuple[Path, Path]) -> None:
    proc = system[0]
    assert own_ram_bytes(proc) is None
    status = proc / "self" / "status"
    status.write_text("Name:\tpython\nRssAnon:\t  100 kB\nRssFile:\t 5000 kB\nRssShmem:\t   20 kB\n")
    assert own_ram_bytes(proc) == 120 * 1024
    status.write_text("Name:\tpython\nRssAnon:\t  100 kB\n")
    assert own_ram_bytes(proc) is None


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells it")
def test_what_is_taken_is_counted() -> None:
    before = own_ram_bytes()
    with mmap(-1, 64 << 20) as taken:  # new pages: what malloc gives may be memory that this process held free
        taken.write(b"x" * len(taken))
        after = own_ram_bytes()
    assert before is not None
    assert after is not None
    assert after - before > 32 << 20
