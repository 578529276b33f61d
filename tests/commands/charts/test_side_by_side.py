from __future__ import annotations

import re

from synthetic_runs import make_run, make_stats, make_token, resident_stats

from promoe.commands.charts.side_by_side import chart_pairs


def test_charts_are_paired_by_kind() -> None:
    runs = [
        make_run("first", token=make_token()),
        make_run("second", stats=make_stats(predictor="gate", lookahead=2), token=make_token(layer_s=1e-2)),
    ]
    html = chart_pairs(runs)
    titles = re.findall(r'<h3>([^<]*)<span class="tag">([^<]*)</span></h3>', html)
    assert [run for title, run in titles if title == "Stall by layer, decode"] == ["first", "second"]
    assert [run for title, run in titles if title == "One token, from begin to end"] == ["first", "second"]
    assert [run for title, run in titles if title == "Predictor accuracy, live"] == ["second"]
    assert "“first” has nothing to show here." in html
    assert html.count('<div class="pair">') == 6
    # One time axis for both: the shorter pass ends in the middle.
    assert html.count('<rect class="rest" x="0.0" width="1000.0"') == 1
    assert html.count('<rect class="rest" x="0.0" width="2000.0"') == 1


def test_a_run_without_counters_stands_beside_one_with() -> None:
    html = chart_pairs([make_run("loaded", stats=resident_stats(), tpot_s=0.01), make_run("served")])
    assert html.count("“loaded” has nothing to show here.") == 5
