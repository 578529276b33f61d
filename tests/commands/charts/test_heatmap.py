from __future__ import annotations

import html
import json
import re

from synthetic_runs import make_run, make_stats

from promoe.commands.charts.heatmap import LEVELS, coverage_chart, coverage_table, heat_map
from promoe.stats.counts import LayerStats, PhaseStats


def phase(*rows: tuple[int, ...], visits: int = 10) -> PhaseStats:
    return PhaseStats(layers=tuple(LayerStats(layer_visits=visits, expert_counts=row) for row in rows))


def cells(figure: str, shade: int) -> int:
    found = re.search(rf'class="h{shade}" d="([^"]*)"', figure)
    return found[1].count("M") if found else 0


def test_each_expert_has_one_cell_in_the_shade_of_its_share() -> None:
    figure = heat_map(phase((0, 1, 10), (5, 0, 0)), "decode")
    assert sum(cells(figure, shade) for shade in range(LEVELS)) == 6
    assert cells(figure, 0) == 3
    assert cells(figure, 1) == 1
    assert cells(figure, 4) == 1
    assert cells(figure, LEVELS - 1) == 1
    assert "100% of the layer" in figure


def test_hover_text_has_the_counts() -> None:
    figure = heat_map(phase((0, 1, 10), (5, 0, 0)), "decode")
    heat = json.loads(html.unescape(re.search(r'data-heat="([^"]*)"', figure)[1]))  # type: ignore[index]
    assert heat["counts"] == [[0, 1, 10], [5, 0, 0]]
    assert heat["visits"] == [10, 10]
    assert "layer 0: 2 of 3 experts needed; most often expert 2, in 100% of 10 visits" in figure


def test_layers_may_have_different_numbers_of_experts() -> None:
    figure = heat_map(phase((1, 2), (1, 2, 3, 4)), "decode")
    assert sum(cells(figure, shade) for shade in range(LEVELS)) == 6


def test_nothing_needed_is_an_empty_map() -> None:
    figure = heat_map(phase((0, 0), visits=0), "prefill")
    assert cells(figure, 0) == 2


def test_a_large_map_stays_small() -> None:
    assert len(heat_map(phase(*[tuple(range(128))] * 48), "decode")) < 300_000


def test_coverage_shows_each_run_that_caches_where_it_stands() -> None:
    runs = [make_run("half"), make_run("all", stats=make_stats(slots=32, hits=2, ready=2))]
    chart = coverage_chart(runs)
    assert chart.count("<circle") == 1
    assert "half\ncache 25.0%, hit rate 50.0%" in chart
    table = coverage_table(runs)
    assert re.findall(r"<td>([^<]*)</td>", table)[3:] == ["100%", "100%", "100%"]
