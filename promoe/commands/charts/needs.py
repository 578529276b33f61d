"""Which experts a text needed: the maps, and how concentrated that is; of one run, of runs that needed the same, of two."""

from __future__ import annotations

from collections.abc import Sequence

from promoe.commands.charts.heatmap import coverage_chart, coverage_table, heat_map
from promoe.commands.charts.over_time import use_map, waited_longest
from promoe.stats.run import Run


def maps(runs: Sequence[Run]) -> str:
    """Experts by layer, and over time; of several runs below each other, of the same layer."""
    names = [run.name if len(runs) > 1 else "" for run in runs]
    layer = waited_longest(runs[0])
    by_layer = [heat_map(run.phase, run.phase_name, name) for run, name in zip(runs, names, strict=True)]
    by_time = [
        use_map(run, layer, name)
        for run, name in zip(runs, names, strict=True)
        if run.stats.over_time and run.stats.decode.needed
    ]
    return "".join([*by_layer, *by_time])


def coverage_cards(runs: Sequence[Run]) -> str:
    """How concentrated the needs are that all of `runs` had, as a chart and in numbers."""
    return f'<div class="grid">{coverage_chart(runs)}{coverage_table(runs)}</div>'


def coverage_pair(runs: Sequence[Run]) -> str:
    """The same where each of two runs had its own."""
    return f'<div class="pair">{"".join(coverage_chart([run], run.name) for run in runs)}</div>'
