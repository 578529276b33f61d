from __future__ import annotations

import os
from pathlib import Path

import pytest

from promoe.transfer.control_groups import MemoryGroup, NoControlGroupError, memory_groups

GIB = 1024**3


def process_in(tmp_path: Path, *lines: str) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("".join(f"{line}\n" for line in lines))
    return tmp_path / "proc"


def version_1(folder: Path, limit: int, used: int, inactive: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.max_usage_in_bytes").write_text(f"{used + 5}\n")
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {inactive}\n")
    return folder


def version_2(folder: Path, limit: int | str, used: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text("inactive_file 7\n")
    return folder


def test_groups_of_version_1_innermost_first(tmp_path: Path) -> None:
    proc = process_in(tmp_path, "5:devices:/", "4:cpu,memory:/jobs/mine", "0::/")
    inner = version_1(tmp_path / "cgroup" / "memory" / "jobs" / "mine", 4 * GIB, GIB, inactive=GIB // 2)
    outer = version_1(tmp_path / "cgroup" / "memory", 1 << 62, GIB)
    groups = memory_groups(proc, tmp_path / "cgroup")
    assert [group.folder for group in groups] == [inner, outer]
    assert groups[0].left_bytes == 3 * GIB + GIB // 2
    assert groups[0].peak_bytes == GIB + 5


def test_groups_of_version_2(tmp_path: Path) -> None:
    proc = process_in(tmp_path, "0::/jobs")
    version_2(tmp_path / "cgroup" / "jobs", "max", 10)
    (group,) = memory_groups(proc, tmp_path / "cgroup")
    assert group.left_bytes is None
    assert group.peak_bytes is None, "before Linux 5.19 there is no memory.peak"
    version_2(group.folder, 100, 10)
    assert group.left_bytes == 97


@pytest.mark.parametrize("lines", [(), ("nonsense",), ("0::/gone",), ("3:cpu:/",)])
def test_no_groups(tmp_path: Path, lines: tuple[str, ...]) -> None:
    assert memory_groups(process_in(tmp_path, *lines), tmp_path / "cgroup") == []
    assert memory_groups(tmp_path / "absent", tmp_path / "cgroup") == []


def test_a_new_group_inside_another(tmp_path: Path) -> None:
    proc = process_in(tmp_path, "4:memory:/")
    version_1(tmp_path / "cgroup" / "memory", 1 << 62, GIB)
    (around,) = memory_groups(proc, tmp_path / "cgroup")
    made, other = around.new_inside(12345), around.new_inside(1)
    assert made.folder.parent == around.folder
    assert made.folder != other.folder
    assert (made.folder / "memory.limit_in_bytes").read_text() == "12345"
    made.add(77)
    assert (made.folder / "cgroup.procs").read_text() == "77"


def test_groups_of_processes_that_were_killed_are_removed(tmp_path: Path) -> None:
    proc = process_in(tmp_path, "4:memory:/")
    version_1(tmp_path / "cgroup" / "memory", 1 << 62, GIB)
    (around,) = memory_groups(proc, tmp_path / "cgroup")
    left, used, others = (
        around.folder / name for name in ("promoe-999999999-0", f"promoe-{os.getppid()}-3", "promoe-x-1")
    )
    for folder in (left, used, others):
        folder.mkdir()
    around.new_inside(1)
    assert not left.exists()
    assert used.exists()
    assert others.exists()


def test_a_group_that_may_not_be_made(tmp_path: Path) -> None:
    around = MemoryGroup(tmp_path / "absent", memory_names())
    with pytest.raises(NoControlGroupError, match="Cannot limit memory with a control group"):
        around.new_inside(1)
    with pytest.raises(NoControlGroupError, match="Cannot put process 5"):
        around.add(5)


def memory_names() -> object:
    from promoe.transfer import control_groups

    return control_groups._VERSION_1


def test_a_real_group_counts_and_limits() -> None:
    """Where this machine does not let us make a group, the refusal is the result."""
    groups = memory_groups()
    if not groups:
        pytest.skip("no control groups for memory")
    try:
        made = groups[0].new_inside(64 * 2**20)
    except NoControlGroupError as error:
        pytest.skip(str(error))
    try:
        child = os.fork()
        if child == 0:
            made.add(os.getpid())
            content = bytearray(16 * 2**20)
            content[::4096] = b"x" * len(content[::4096])
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert made.left_bytes is not None
        assert made.left_bytes <= 64 * 2**20
        assert made.peak_bytes is not None
        assert 16 * 2**20 <= made.peak_bytes <= 64 * 2**20
    finally:
        made.remove()
    assert not made.folder.exists()
