from __future__ import annotations

from pathlib import Path

import pytest

import promoe.transfer.processor as module


def test_what_a_processor_says_of_itself(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(
        "processor : 0\nmodel name : Some CPU\nflags : fpu amx_bf16\n\nprocessor : 1\nmodel name : Some CPU\nflags : fpu\n"
    )
    assert module.processor_name(tmp_path) == "Some CPU"
    assert module.multiplies_bfloat16(tmp_path)
    (tmp_path / "cpuinfo").write_text("processor : 0\nFeatures : fp asimd bf16\n")
    assert module.multiplies_bfloat16(tmp_path)
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags : avx512_bf16x\n")
    assert not module.multiplies_bfloat16(tmp_path)
    assert not module.multiplies_bfloat16(tmp_path / "missing")


def in_group(tmp_path: Path, line: str, quotas: dict[str, dict[str, str]]) -> tuple[Path, Path]:
    """Make a process in a control group, and the groups' files by folder."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(f"{line}\n")
    for folder, files in quotas.items():
        (tmp_path / "cgroup" / folder).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (tmp_path / "cgroup" / folder / name).write_text(f"{content}\n")
    return tmp_path / "proc", tmp_path / "cgroup"


@pytest.mark.parametrize(
    ("line", "quotas", "expected"),
    [
        ("0::/jobs/mine", {"jobs/mine": {"cpu.max": "150000 100000"}, "jobs": {"cpu.max": "max 100000"}}, 1.5),
        ("0::/jobs/mine", {"jobs/mine": {"cpu.max": "400000 100000"}, "jobs": {"cpu.max": "100000 50000"}}, 2.0),
        ("0::/", {"": {"cpu.max": "max 100000"}}, None),
        ("4:cpu,cpuacct:/d", {"cpu/d": {"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"}}, 0.5),
        ("4:cpu,cpuacct:/d", {"cpu": {"cpu.cfs_quota_us": "300000", "cpu.cfs_period_us": "100000"}}, 3.0),
        ("4:cpu,cpuacct:/d", {"cpu/d": {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}}, None),
        ("0::/jobs", {"jobs": {"cpu.max": "damaged"}}, None),
        ("4:memory:/d", {}, None),
    ],
)
def test_a_control_groups_share_of_the_cores(
    tmp_path: Path,
    line: str,
    quotas: dict[str, dict[str, str]],
    expected: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = in_group(tmp_path, line, quotas)
    assert module.cpu_quota(*where) == expected
    monkeypatch.setattr(module, "usable_cores", lambda: frozenset(range(2)))
    assert module.num_cores(*where) == {None: 2, 0.5: 1, 1.5: 1, 2.0: 2, 3.0: 2}[expected]


@pytest.mark.parametrize(("quota", "expected"), [(None, None), (1.5, "1"), (3.2, "3"), (4.0, None), (9.0, None)])
def test_threads_are_chosen_by_the_quota_where_nobody_chose(
    quota: float | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: frozenset(range(4)))
    monkeypatch.setattr(module, "cpu_quota", lambda *where: quota)
    environment: dict[str, str] = {}
    module.choose_threads(environment)
    assert environment.get("OMP_NUM_THREADS") == expected
    environment = {"OMP_NUM_THREADS": "7"}
    module.choose_threads(environment)
    assert environment == {"OMP_NUM_THREADS": "7"}
