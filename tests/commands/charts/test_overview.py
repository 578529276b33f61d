"""Charts of all runs, and what is left of a page where nothing was counted."""

from __future__ import annotations

from synthetic_runs import make_run, resident_stats

from promoe.commands.charts.overview import overview
from promoe.commands.charts.section import section


def test_of_a_run_that_counted_nothing_there_are_its_times() -> None:
    loaded, served = make_run("loaded", stats=resident_stats(), tpot_s=0.01, ttft_s=0.2), make_run("served")
    alone = "".join(overview([loaded]))
    assert "Time per output token" in alone
    assert "Time to the first token" in alone
    assert "Bytes moved" not in alone
    assert "Where needed experts were" not in alone
    both = list(overview([loaded, served]))
    assert [("loaded" in chart, "served" in chart) for chart in both] == [(True, True)] * 2 + [(False, True)] * 2


def test_a_section_has_no_tile_without_a_number() -> None:
    loaded, served = make_run("loaded", stats=resident_stats(), tpot_s=0.01, ttft_s=0.2), make_run("served")
    html = section(0, loaded, [loaded], with_needs=False)
    assert html.count('class="tile"') == 2
    assert "–" not in html
    assert "Prefill and decode" not in html
    html = section(0, served, [served], with_needs=False)
    assert html.count('class="tile"') == 6
    assert "Prefill and decode" in html
