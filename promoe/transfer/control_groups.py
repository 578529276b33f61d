"""Linux control groups of this process that count memory, version 1 and 2: their limits, and new ones inside them."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

from promoe.errors import PromoeError

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
_numbers = itertools.count()


class NoControlGroupError(PromoeError):
    """Memory cannot be limited here."""


@dataclass(frozen=True)
class _Names:
    """The files of one version of control groups."""

    limit: str
    used: str
    peak: str
    inactive: str
    """In memory.stat: file pages that can be had back at once."""


_VERSION_1 = _Names(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes", "total_inactive_file"
)
_VERSION_2 = _Names("memory.max", "memory.current", "memory.peak", "inactive_file")


@dataclass(frozen=True)
class MemoryGroup:
    """One control group that counts memory, page cache included."""

    folder: Path
    names: _Names

    @property
    def left_bytes(self) -> int | None:
        """Bytes that its processes can still have; None: no limit, or it does not tell."""
        try:
            limit_bytes = int((self.folder / self.names.limit).read_text())  # version 2 says "max" for no limit
            used_bytes = int((self.folder / self.names.used).read_text())
            stat = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            return None
        return limit_bytes - used_bytes + int(stat.get(self.names.inactive, 0))

    @property
    def peak_bytes(self) -> int | None:
        """The most that its processes have had at once, page cache included; None: it does not tell."""
        try:
            return int((self.folder / self.names.peak).read_text())
        except (OSError, ValueError):  # memory.peak is from Linux 5.19
            return None

    def new_inside(self, limit_bytes: int) -> MemoryGroup:
        """A group inside this one, for processes that together get at most `limit_bytes`, page cache included.

        Raises:
            NoControlGroupError: it may not be made, or does not keep a limit.
        """
        self._remove_left_behind()
        folder = self.folder / f"promoe-{os.getpid()}-{next(_numbers)}"
        made = MemoryGroup(folder, self.names)
        try:
            folder.mkdir()
            try:
                (folder / self.names.limit).write_text(str(limit_bytes))
                if (folder / "memory.swap.max").exists():
                    (folder / "memory.swap.max").write_text("0")
            except OSError:
                made.remove()
                raise
        except OSError as error:
            raise NoControlGroupError(f"Cannot limit memory with a control group: {error}") from error
        return made

    def _remove_left_behind(self) -> None:
        """Groups inside this one whose makers were killed; one that still has a process stays."""
        for folder in self.folder.glob("promoe-*-*"):
            pid = folder.name.split("-")[1]
            if pid.isdigit() and not (PROC / pid).exists():
                MemoryGroup(folder, self.names).remove()

    def add(self, pid: int) -> None:
        """Count from now on what this process, all of its threads, allocates and reads.

        Raises:
            NoControlGroupError: it may not be moved.
        """
        try:
            (self.folder / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            raise NoControlGroupError(f"Cannot put process {pid} into '{self.folder}': {error}") from error

    def remove(self) -> None:
        """Remove the group. Its processes must have ended; one that has not is left in it."""
        try:
            self.folder.rmdir()
        except OSError:
            return


def memory_groups(proc: Path = PROC, cgroups: Path = CGROUPS) -> list[MemoryGroup]:
    """This process's own group and those around it, innermost first; empty where there are none."""
    return [
        MemoryGroup(folder, names)
        for folder in groups_of("memory", proc, cgroups)
        for names in (_VERSION_1, _VERSION_2)
        if (folder / names.used).exists()
    ]


def groups_of(controller: str, proc: Path = PROC, cgroups: Path = CGROUPS) -> list[Path]:
    """Return the folders of the groups that this process is in, innermost first, where a controller may count.

    Args:
        controller: "memory" or "cpu".
        proc: for tests.
        cgroups: for tests.
    """
    try:
        entries = [line.split(":", 2) for line in (proc / "self" / "cgroup").read_text().splitlines()]
    except OSError:
        return []
    found: list[Path] = []
    for entry in entries:
        if len(entry) != 3:
            continue
        hierarchy, controllers, path = entry
        if controller in controllers.split(","):
            found += _upwards(cgroups / controller, path)
        elif hierarchy == "0" and not controllers:
            found += _upwards(cgroups, path)
    return found


def _upwards(root: Path, path: str) -> list[Path]:
    group = root / path.lstrip("/")
    return [folder for folder in (group, *group.parents) if folder == root or root in folder.parents]
