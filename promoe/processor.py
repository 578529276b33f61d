"""What the processor is, and how much of it this process may use."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
# On x86 and ARM, as Linux names them.
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def processor_name(proc: Path = PROC) -> str:
    """As it calls itself: "AMD EPYC 7B13"."""
    return _fields(proc).get("model name") or platform.processor() or platform.machine()


def multiplies_bfloat16(proc: Path = PROC) -> bool:
    """Whether it has products of bf16 numbers."""
    fields = _fields(proc)
    return not BFLOAT16_FLAGS.isdisjoint(f"{fields.get('flags', '')} {fields.get('Features', '')}".split())


def usable_cores() -> frozenset[int]:
    """The numbers of those that this process may use."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def num_cores() -> int:
    """That this process may use."""
    return len(usable_cores())


def _fields(proc: Path) -> dict[str, str]:
    """What Linux says of the first core, by name."""
    with suppress(OSError):
        lines = (proc / "cpuinfo").read_text(encoding="utf-8").splitlines()
        return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    return {}
