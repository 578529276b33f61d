"""Charts with a share of the needed experts on the y axis: how concentrated needs are, and rates over time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from promoe.commands.charts.frame import WIDTH, Numbers, figure, sentence, table
from promoe.commands.charts.needs_maps import first_passes, pass_ticks, stretch_numbers
from promoe.commands.charts.svg import Canvas, coord
from promoe.stats.run import Run
from promoe.stats.words import coverage
from promoe.units import format_share, is_number, ratio

_LEFT, _RIGHT, _TOP, _BELOW = 42, WIDTH - 12, 10, 44


class _Plane:
    """A drawing with x from 0 to 1, and shares from 0 to 100% on the y axis.

    Args:
        height: of the drawing, in px.
        x_label: of the x axis.
        y_label: of the y axis.
        x_ticks: (x, name) of the ticks of the x axis.
    """

    def __init__(self, height: int, x_label: str, y_label: str, x_ticks: Iterable[tuple[float, str]]) -> None:
        self.canvas = Canvas(WIDTH, height)
        self._bottom = height - _BELOW
        self._labels = x_label, y_label
        for tenth in range(0, 11, 2):
            y = self.y(tenth / 10)
            self.canvas.line(_LEFT, y, _RIGHT, y, "grid")
            self.canvas.text(_LEFT - 7, y + 4, f"{tenth * 10}", "tick end")
        for x, name in x_ticks:
            self.canvas.text(self.x(x), self._bottom + 16, name, "tick mid")

    def x(self, share: float) -> float:
        """Return where a share of the x axis is."""
        return _LEFT + (_RIGHT - _LEFT) * share

    def y(self, share: float) -> float:
        """Return where a share of the y axis is."""
        return self._bottom - (self._bottom - _TOP) * share

    def render(self, spoken: str) -> str:
        """Draw the axes on top, and return the `<svg>` element; `spoken` is what a screen reader says."""
        self.canvas.line(_LEFT, self._bottom, _RIGHT, self._bottom, "axis")
        self.canvas.text(self.x(0.5), self.canvas.height - 8, self._labels[0], "axis-label mid")
        self.canvas.text(11, self.y(0.5), self._labels[1], "axis-label mid", rotate=True)
        return self.canvas.render(spoken)


def rates_chart(run: Run, of: str = "") -> str:
    """Draw the hit and ready rate of the stretches of a run, as steps; `of`: the run's name."""
    stretches = run.stats.over_time
    begins, passes = first_passes(stretches), max(1, sum(stretch.passes for stretch in stretches))
    ticks = [(begins[number] / passes, name) for number, name in pass_ticks(begins)]
    plane = _Plane(214, "decode pass (number)", "needed experts (%)", ticks)
    rates = {
        "ready": [ratio(s.ready, s.needed) for s in stretches],
        "hit": [ratio(s.hits, s.needed) for s in stretches],
    }
    for css, values in rates.items():
        d = "".join(
            f"{'L' if i else 'M'}{coord(plane.x(begin / passes))} {coord(plane.y(value))}"
            f"H{coord(plane.x((begin + stretch.passes) / passes))}"
            for i, (begin, value, stretch) in enumerate(zip(begins, values, stretches, strict=True))
            if is_number(value)
        )
        if d:
            tip = f"{css} rate: {_first_to_last(values)}"
            plane.canvas.path(d if d[0] == "M" else f"M{d[1:]}", f"steps steps-{css}", tip)
    title = "Hit and ready rate over time"
    legend = [("k-hit-line", "hit: resident at gate time"), ("k-ready-line", "ready: also those that arrived in time")]
    spoken = sentence(title, (f"{css} rate {_first_to_last(values)}" for css, values in rates.items()))
    subtitle = "A cache that starts empty, or a text that changes its subject, shows here."
    return figure(title, subtitle, legend, plane.render(spoken), stretch_numbers(stretches), of=of)


def _first_to_last(rates: Sequence[float]) -> str:
    known = [rate for rate in rates if is_number(rate)]
    return f"{format_share(known[0])} at first, {format_share(known[-1])} at last" if known else "unknown"


def coverage_cards(runs: Sequence[Run]) -> str:
    """Show how concentrated the needs are that all of `runs` had, as a chart and in numbers."""
    return f"{coverage_chart(runs)}{coverage_table(runs)}"


def coverage_chart(runs: Sequence[Run], of: str = "") -> str:
    """Draw how much of the needs the n most needed experts serve, with each run's hit rate at its cache rate.

    The curve comes from the needs of the first run; every run has some. `of`: the run's name.
    """
    ticks = [(tenth / 10, f"{tenth * 10}") for tenth in range(0, 11, 2)]
    plane = _Plane(236, "experts kept, most needed first (% of all experts)", "needs served (%)", ticks)
    plane.canvas.line(plane.x(0), plane.y(0), plane.x(1), plane.y(1), "uniform", "every expert needed equally often")
    shares = coverage(runs[0].phase)
    points = [shares[round(i * (len(shares) - 1) / 200)] for i in range(201)] if shares else []
    if points:
        d = "M" + "L".join(f"{coord(plane.x(i / 200))} {coord(plane.y(y))}" for i, y in enumerate(points))
        plane.canvas.path(d, "curve", "a cache that keeps the most needed experts and never changes")
    for run in runs:
        if is_number(run.phase.hit_rate) and run.stats.cache_rate < 1:
            tip = f"{run.name}\ncache {format_share(run.stats.cache_rate)}, hit rate {format_share(run.phase.hit_rate)}"
            plane.canvas.circle(plane.x(run.stats.cache_rate), plane.y(run.phase.hit_rate), 5.5, "dot", tip)
    legend = [
        ("k-curve", "best fixed choice of experts"),
        ("k-uniform", "if all were needed equally"),
        ("k-dot", "hit rate of a run"),
    ]
    title = "How concentrated the needs are"
    subtitle = "Dots above the curve follow the text better than any cache that never changes."
    spoken = sentence(title, [_concentration(shares)])
    return figure(title, subtitle, legend, plane.render(spoken), _coverage_numbers(runs, shares), of=of)


def coverage_table(runs: Sequence[Run]) -> str:
    """Show the same in numbers: what the best fixed choice would serve at each run's cache rate, and what the run hit."""
    shares = coverage(runs[0].phase)
    return (
        '<div class="card scroll numbers"><h3>What a fixed choice of experts would hit</h3>'
        f"{table(_coverage_numbers(runs, shares))}"
        f'<p class="rule foot">{escape(_concentration(shares))}.</p></div>'
    )


def _coverage_numbers(runs: Sequence[Run], shares: Sequence[float]) -> Numbers:
    rows = []
    for run in runs:
        kept = min(run.stats.cache_slots, len(shares) - 1)
        fixed = format_share(shares[kept]) if shares else format_share(None)
        rows.append([run.name, format_share(min(1.0, run.stats.cache_rate)), fixed, format_share(run.phase.hit_rate)])
    return Numbers(["run", "cache", "best fixed choice", "hit rate"], rows)


def _concentration(shares: Sequence[float]) -> str:
    first, *others = ((f"{target:.0%}", _fewest(shares, target)) for target in (0.5, 0.75, 0.9, 0.99))
    words = f"{first[0]} of the needs fall on {first[1]} of the experts"
    return words + "".join(f", {needs} on {experts}" for needs, experts in others)


def _fewest(shares: Sequence[float], target: float) -> str:
    """Return the least share of the experts that serves `target` of the needs."""
    return format_share(ratio(next((n for n, share in enumerate(shares) if share >= target), 0), len(shares) - 1))
