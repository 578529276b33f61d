"""The processor, and how much of it this process may use."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

from promoe.transfer.control_groups import CGROUPS, PROC, groups_of

# Flags of processors that multiply bf16, on x86 and ARM, as Linux names them.
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def processor_name(proc: Path = PROC) -> str:
    """Return the processor's name, such as "AMD EPYC 7B13"."""
    return _fields(proc).get("model name") or platform.processor() or platform.machine()


def multiplies_bfloat16(proc: Path = PROC) -> bool:
    """Return whether the processor has instructions that multiply bf16."""
    fields = _fields(proc)
    return not BFLOAT16_FLAGS.isdisjoint(f"{fields.get('flags', '')} {fields.get('Features', '')}".split())


def usable_cores() -> frozenset[int]:
    """Return the numbers of the cores that this process may use."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def num_cores(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return how many cores this process may keep busy at once, limited by its control groups' quota of time.

    With a quota of 1.5 cores that is 1: threads that compute together wait for the one that the quota has stopped.
    """
    quota = cpu_quota(proc, cgroups)
    count = len(usable_cores())
    return count if quota is None else max(1, min(count, math.floor(quota)))


def cpu_quota(proc: Path = PROC, cgroups: Path = CGROUPS) -> float | None:
    """Return how many cores' time this process's control groups give it (`docker run --cpus 2`); None if unlimited."""
    folders = groups_of("cpu", proc, cgroups)
    quotas = [quota for folder in folders if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def _quota(folder: Path) -> float | None:
    with suppress(OSError, ValueError, ZeroDivisionError):
        if (folder / "cpu.max").exists():  # version 2: "max 100000", or microseconds of each 100000
            most, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            return None if most == "max" else int(most) / int(period)
        quota_us = int((folder / "cpu.cfs_quota_us").read_text(encoding="ascii"))
        return None if quota_us < 0 else quota_us / int((folder / "cpu.cfs_period_us").read_text(encoding="ascii"))
    return None


def choose_threads(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let torch compute on as many threads as a quota allows, unless the user chose a number.

    Call it before torch is imported. By default torch takes one thread for each core of the machine, and all of them
    wait for those that the quota has stopped: on two cores with a quota of one, a token takes twice as long.
    """
    if (quota := cpu_quota()) is not None and quota < len(usable_cores()):
        environment.setdefault("OMP_NUM_THREADS", str(num_cores()))


def _fields(proc: Path) -> dict[str, str]:
    """Return what Linux says of the first core, by name."""
    with suppress(OSError):
        lines = (proc / "cpuinfo").read_text(encoding="utf-8").splitlines()
        return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    return {}
