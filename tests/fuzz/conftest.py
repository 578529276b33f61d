"""Says at the end how many inputs each target took."""

from __future__ import annotations

from typing import Any

from .inputs import FACTOR, refused, taken


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A line per target, where more than the suite's own few were asked for."""
    if FACTOR == 1 or not taken:
        return
    terminalreporter.section("inputs of each fuzz target")
    for target, count in sorted(taken.items()):
        terminalreporter.write_line(f"{target:40} {count:>8,} inputs, {refused[target]:>8,} refused")
    terminalreporter.write_line(f"{'all':40} {sum(taken.values()):>8,} inputs, {refused.total():>8,} refused")
