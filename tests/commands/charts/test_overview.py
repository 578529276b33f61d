"""Charts of all runs, and what is left of a page where nothing was counted."""

from __future__ import annotations

from synthetic_runs import make_run, resident_stats

from promoe.commands.charts.overview import overview


def test_of_a_run_that_counted_nothing_there_are_its_times() -> None:
    loaded, served = make_run("loaded", stats=resident_stats(), tpot_s=0.01, ttft_s=0.2), make_run("served")
    alone = "".join(overview([loaded]))
    assert "Time per output token" in alone
    assert "Time to the first token" in alone
    assert "Bytes moved" not in alone
    assert "Where needed experts were" not in alone
    both = list(overview([loaded, served]))
    assert [("loaded" in chart, "served" in chart) for chart in both] == [(True, True)] * 2 + [(False, True)] * 2
