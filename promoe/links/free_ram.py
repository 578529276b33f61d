"""How much RAM could still be used without swapping: what decides between the page cache and O_DIRECT."""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def free_ram_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """RAM that is free or reclaimable, in bytes, within the memory limits of this process's control groups (v2).

    Returns:
        None where the system does not tell (other than Linux).
    """
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    return max(0, min([kib * 1024, *_below_limits(proc, cgroups)]))


def _below_limits(proc: Path, cgroups: Path) -> list[int]:
    """Bytes left below the limit of the process's group and of each group around it; empty without limits."""
    try:
        entries = [line.split(":", 2) for line in (proc / "self" / "cgroup").read_text().splitlines()]
        inside = next(path for hierarchy, controllers, path in entries if hierarchy == "0" and not controllers)
    except (OSError, StopIteration, ValueError):
        return []
    group = cgroups / inside.lstrip("/")
    left_bytes: list[int] = []
    for folder in (group, *group.parents):
        if folder != cgroups and cgroups not in folder.parents:
            break
        try:
            limit_bytes = int((folder / "memory.max").read_text())  # "max" is no limit
            used_bytes = int((folder / "memory.current").read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        left_bytes.append(limit_bytes - used_bytes + int(stat.get("inactive_file", 0)))
    return left_bytes
