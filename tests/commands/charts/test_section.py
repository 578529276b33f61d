from __future__ import annotations

import re

from synthetic_runs import make_run, make_stats, resident_stats

from promoe.commands.charts.section import accuracy_chart, section


def test_accuracy_falls_with_the_distance_and_stands_beside_chance() -> None:
    run = make_run(stats=make_stats(predictor="gate", experts=8, top_k=2, lookahead=3))
    chart = accuracy_chart(run)
    assert re.findall(r'class="total mid"[^>]*>([^<]*)<', chart) == ["100%", "75%", "70%"]
    assert chart.count("<title>by chance: 25%</title>") == 3
    assert "There were forecasts for 100% of the layer visits (k = 1)." in chart
    assert re.findall(r'<th scope="row">(\d)</th><td>(\d+)%</td>', chart) == [("1", "100"), ("2", "75"), ("3", "70")]


def test_a_section_has_no_tile_without_a_number() -> None:
    loaded, served = make_run("loaded", stats=resident_stats(), tpot_s=0.01, ttft_s=0.2), make_run("served")
    html = section(0, loaded, [loaded], with_needs=False)
    assert html.count('class="tile"') == 2
    assert "–" not in html
    assert "Prefill and decode" not in html
    html = section(0, served, [served], with_needs=False)
    assert html.count('class="tile"') == 6
    assert "Prefill and decode" in html
