"""What `promoe report` can be asked for."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True)
class Options:
    """Make a page from saved runs: one, two set side by side, or more.

    With --report a.html, the command run saves its run as a.json beside that page. The comparison is printed as text too.

    Example: `promoe report a.json b.json --out compare.html`
    """

    runs: list[str]
    """JSON files of runs of one model"""
    _: KW_ONLY
    out: str
    """file for the page"""
    baseline: str | None = None
    """name of the run that others are compared with (a file's name without its ending); by default the first whose experts do
    not all fit its cache"""
