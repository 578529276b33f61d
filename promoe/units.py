"""Numbers as people read them.

Memory (cache, slots) is written in MiB and GiB, traffic in MB (10^6 bytes), because link speeds are given in GB/s.
A number that does not exist (nan or None) is written as a dash.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

DASH = "–"


def is_number(value: float | None) -> bool:
    """Return whether a quantity has a value: a hit rate without any visit, for example, is None or nan."""
    return value is not None and not math.isnan(value)


def aligned(rows: Sequence[Sequence[str]], narrowest: int = 0) -> list[str]:
    """Align a table: the first column to the left, the others to the right, at least `narrowest` characters wide."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for label, *cells in rows:
        padded = (cell.rjust(max(narrowest, width)) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([label.ljust(widths[0]), *padded]).rstrip())
    return lines


def ratio(numerator: float, denominator: float) -> float:
    """Return `numerator / denominator`; nan when the denominator is zero."""
    return numerator / denominator if denominator else math.nan


def format_memory(nbytes: float) -> str:
    """Write bytes of memory, for example `862.5 MiB`."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def format_megabytes(nbytes: float | None) -> str:
    """Write bytes of traffic in MB (10^6 bytes), number only, three significant digits or more: `212`, `9.37`."""
    return format_number(None if nbytes is None else nbytes / 1e6)


def format_bandwidth(bytes_per_s: float) -> str:
    """Write the bandwidth of a link in GB/s (10^9 bytes), three significant digits: `3.51 GB/s`."""
    return f"{format_number(bytes_per_s / 1e9)} GB/s"


def format_number(value: float | None) -> str:
    """Write a number with three significant digits, without an exponent: `1234`, `74.1`, `0.032`."""
    if value is None or math.isnan(value):
        return DASH
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    rounded = float(f"{value:.3g}")  # first, as rounding may add a digit before the point: 9.996 is 10.0
    digits = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{value:.{min(digits, 6)}f}"


def format_seconds(seconds: float | None) -> str:
    """Write a duration with its unit: `210 µs`, `74.1 ms`, `2.31 s`."""
    if seconds is None or math.isnan(seconds):
        return DASH
    if seconds == 0:
        return "0 ms"
    if abs(seconds) < 0.9995e-3:
        return f"{format_number(seconds * 1e6)} µs"
    if abs(seconds) < 0.9995:
        return f"{format_number(seconds * 1e3)} ms"
    return f"{format_number(seconds)} s"


def format_ms(seconds: float | None) -> str:
    """Write a duration in milliseconds, number only (for table columns whose head says ms)."""
    return format_number(None if seconds is None else seconds * 1e3)


def format_share(share: float | None) -> str:
    """Write a share (0..1) as per cent: `61.2%`; exactly 0 and 1 as `0%` and `100%`."""
    if share is None or math.isnan(share):
        return DASH
    return f"{share:.0%}" if share in (0.0, 1.0) else f"{share:.1%}"


def format_percent(share: float | None) -> str:
    """Write a share (0..1) in per cent, number only (for table columns whose head says %): `61.2`, `0`."""
    return format_share(share).removesuffix("%")


def format_times(factor: float | None) -> str:
    """Write a factor: `1.36x`."""
    if factor is None or math.isnan(factor):
        return DASH
    return f"{factor:.2f}x"
