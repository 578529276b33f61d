"""How much RAM is free, and how much this process has. The former decides between page cache and O_DIRECT."""

from __future__ import annotations

from pathlib import Path

from promoe.transfer.control_groups import CGROUPS, PROC, memory_groups


def free_ram_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Return the RAM that is free or reclaimable, in bytes, within the memory limits of this process's control groups.

    None where the system does not say (other than Linux).
    """
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    left = [group.left_bytes for group in memory_groups(proc, cgroups)]
    return max(0, min([kib * 1024, *(nbytes for nbytes in left if nbytes is not None)]))


def own_ram_bytes(proc: Path = PROC) -> int | None:
    """Return the RAM that this process has for itself, in bytes: without mapped files such as a checkpoint.

    None where the system does not say (other than Linux).
    """
    try:
        lines = (proc / "self" / "status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return None
