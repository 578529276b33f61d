"""Draws SVG marks as text. Colours are CSS classes, so that one drawing serves light mode, dark mode and paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape


class Canvas:
    """The marks of one drawing, in px from the top left."""

    def __init__(self, width: float, height: float) -> None:
        self.width = width
        self.height = height
        self._marks: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, css: str, tip: str = "") -> None:
        """Draw a rectangle; `tip` shows on hover."""
        place = f'x="{coord(x)}" y="{coord(y)}" width="{coord(max(0.0, width))}" height="{coord(max(0.0, height))}"'
        self._add("rect", f'class="{css}" {place}', tip)

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str, tip: str = "") -> None:
        """Draw a straight line."""
        place = f'x1="{coord(x1)}" y1="{coord(y1)}" x2="{coord(x2)}" y2="{coord(y2)}"'
        self._add("line", f'class="{css}" {place}', tip)

    def path(self, d: str, css: str, tip: str = "") -> None:
        """Draw a path; `d` as in SVG."""
        self._add("path", f'class="{css}" d="{d}"', tip)

    def circle(self, x: float, y: float, radius: float, css: str, tip: str = "") -> None:
        """Draw a dot."""
        self._add("circle", f'class="{css}" cx="{coord(x)}" cy="{coord(y)}" r="{coord(radius)}"', tip)

    def text(self, x: float, y: float, text: str, css: str, *, rotate: bool = False, tip: str = "") -> None:
        """Write text at its baseline; with `rotate` it reads upwards."""
        turn = f' transform="rotate(-90 {coord(x)} {coord(y)})"' if rotate else ""
        body = escape(text) + (f"<title>{escape(tip)}</title>" if tip else "")
        self._marks.append(f'<text class="{css}" x="{coord(x)}" y="{coord(y)}"{turn}>{body}</text>')

    def render(self, label: str) -> str:
        """Return the `<svg>` element; `label` is what a screen reader says."""
        box = f'viewBox="0 0 {coord(self.width)} {coord(self.height)}"'
        return f'<svg {box} role="img" aria-label="{escape(label)}">{"".join(self._marks)}</svg>'

    def _add(self, tag: str, attributes: str, tip: str) -> None:
        if tip:
            self._marks.append(f'<{tag} {attributes} data-mark=""><title>{escape(tip)}</title></{tag}>')
        else:
            self._marks.append(f"<{tag} {attributes}/>")


def coord(value: float) -> str:
    """Write a coordinate with at most one decimal, to keep pages small."""
    return f"{value:.1f}".removesuffix(".0")


def ticks(top: float, count: int = 5) -> list[float]:
    """Return about `count` round values from 0 to the first one at or above `top`."""
    if not (top > 0 and math.isfinite(top)):
        return [0.0, 1.0]
    raw = top / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * (1 - 1e-9))
    return [step * i for i in range(math.ceil(top / step - 1e-9) + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Write ticks with equal precision: `0, 0.5, 1.0`."""
    step = values[1] - values[0]
    decimals = next((d for d in range(7) if abs(step - round(step, d)) < step * 1e-6), 6)
    return [f"{value:.{decimals}f}" if value else "0" for value in values]


def every(least: float) -> int:
    """Return a power of two of at least `least`. Label every so many bars, so that labels do not touch."""
    return 1 << max(0, math.ceil(math.log2(least))) if least > 1 else 1


def wrapped(text: str, width: int, lines: int = 2) -> list[str]:
    """Break text at spaces into at most `lines` lines of `width` characters; what is left out becomes `…`."""
    result: list[str] = []
    for word in text.split():
        if result and len(result[-1]) + 1 + len(word) <= width:
            result[-1] += " " + word
        else:
            result.append(word)
    kept = [line if len(line) <= width else line[: width - 1] + "…" for line in result[:lines]]
    if len(result) > lines:
        kept[-1] = kept[-1].removesuffix("…")[: width - 1].rstrip() + "…"
    return kept or [""]
