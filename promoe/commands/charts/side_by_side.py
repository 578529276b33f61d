"""Two runs beside each other, chart by chart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from promoe.commands.charts.section import Chart, introduction, layer_charts, numbers_card, wide_charts, words_card
from promoe.stats.run import Run


def chart_pairs(runs: Sequence[Run]) -> str:
    """Draw each chart of the first run beside the second's, on a phone below it. Wide charts are always below each other."""
    cards = "".join(
        f'<div class="intro"><h3>{escape(run.name)}</h3>{introduction(run)}</div>'
        f"{words_card(run, run.name)}{numbers_card(run, run.name)}"
        for run in runs
    )
    stacked = "".join(_paired(wide_charts, runs))
    pairs = "".join(f'<div class="pair">{pair}</div>' for pair in _paired(layer_charts, runs))
    return f'<div class="columns">{cards}</div>{stacked}{pairs}'


def _paired(charts: Callable[[Run, Sequence[Run], str], Iterable[Chart]], runs: Sequence[Run]) -> list[str]:
    """Return charts of the same kind beside each other, in the order of the run that has more of them."""
    found = [{chart.kind: chart.html for chart in charts(run, runs, run.name)} for run in runs]
    kinds = dict.fromkeys(kind for of_run in sorted(found, key=len, reverse=True) for kind in of_run)
    return ["".join(of.get(kind) or _missing(run) for run, of in zip(runs, found, strict=True)) for kind in kinds]


def _missing(run: Run) -> str:
    return f'<div class="card missing"><p class="rule">“{escape(run.name)}” has nothing to show here.</p></div>'
