"""Linux control groups of this process, version 1 and 2: their limits of memory, and new groups inside them."""

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
    """The name in memory.stat of file pages that can be freed at once."""


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
        """Bytes that its processes can still get; None if there is no limit or it is unknown."""
        try:
            limit_bytes = int((self.folder / self.names.limit).read_text())  # version 2 says "max" for no limit
            used_bytes = int((self.folder / self.names.used).read_text())
            stat = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            return None
        return limit_bytes - used_bytes + int(stat.get(self.names.inactive, 0))

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes that its processes have had at once, page cache included; None if unknown."""
        try:
            return int((self.folder / self.names.peak).read_text())
        except (OSError, ValueError):  # memory.peak is from Linux 5.19
            return None

    def new_inside(self, limit_bytes: int) -> MemoryGroup:
        """Make a group inside this one, for processes that together get at most `limit_bytes`, page cache included.

        Raises:
            NoControlGroupError: this process may not make one, or the group does not keep a limit.
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
        """Remove groups inside this one whose makers were killed. A group that still has a process stays."""
        for folder in self.folder.glob("promoe-*-*"):
            pid = folder.name.split("-")[1]
            if pid.isdigit() and not (PROC / pid).exists():
                MemoryGroup(folder, self.names).remove()

    def add(self, pid: int) -> None:
        """Count from now on what all threads of a process allocate and read.

        Raises:
            NoControlGroupError: the process may not be moved here.
        """
        try:
            (self.folder / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            raise NoControlGroupError(f"Cannot put process {pid} into '{self.folder}': {error}") from error

    def remove(self) -> None:
        """Remove the group, unless one of its processes still runs."""
        try:
            self.folder.rmdir()
        except OSError:
            return


def memory_groups(proc: Path = PROC, cgroups: Path = CGROUPS) -> list[MemoryGroup]:
    """Return this process's own group and those around it, innermost first; empty if there are none."""
    return [
        MemoryGroup(folder, names)
        for folder in groups_of("memory", proc, cgroups)
        for names in (_VERSION_1, _VERSION_2)
        if (folder / names.used).exists()
    ]


def groups_of(controller: str, proc: Path = PROC, cgroups: Path = CGROUPS) -> list[Path]:
    """Return the folders of this process's groups for a controller ("memory" or "cpu"), innermost first."""
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
