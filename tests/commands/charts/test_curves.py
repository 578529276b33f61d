from __future__ import annotations

import re

from synthetic_runs import make_run, make_stats

from promoe.commands.charts.curves import coverage_cards, coverage_chart, coverage_table, rates_chart


def test_rates_are_steps_from_the_first_pass_to_the_last() -> None:
    chart = rates_chart(make_run(stats=make_stats(decode_passes=5, hits=1, ready=2)))
    hit, ready = (re.search(rf'class="steps steps-{css}" d="([^"]*)"', chart)[1] for css in ("hit", "ready"))  # type: ignore[index]
    assert hit.count("H") == ready.count("H") == 5
    assert hit.startswith("M42 90H")
    assert ready.startswith("M42 10H")
    assert "hit rate 50.0% at first, 50.0% at last" in chart
    assert "ready rate 100% at first, 100% at last" in chart


def test_coverage_shows_each_run_that_caches_where_it_stands() -> None:
    runs = [make_run("half"), make_run("all", stats=make_stats(slots=32, hits=2, ready=2))]
    chart = coverage_chart(runs)
    assert chart.count("<circle") == 1
    assert "half\ncache 25.0%, hit rate 50.0%" in chart
    table = coverage_table(runs)
    assert re.findall(r"<td>([^<]*)</td>", table)[3:] == ["100%", "100%", "100%"]


def test_concentration_is_of_all_or_of_each() -> None:
    runs = [make_run("first"), make_run("second", stats=make_stats(shift=1))]
    assert coverage_cards(runs).count("<svg") == 1
    assert [coverage_chart([run], run.name).count("<svg") for run in runs] == [1, 1]
