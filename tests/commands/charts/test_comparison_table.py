from __future__ import annotations

import re

from synthetic_runs import make_run, make_stats

from promoe.commands.charts.comparison_table import difference_table, runs_table


def rows(html: str) -> dict[str, list[str]]:
    """Quantity -> its cells as text."""
    found = {}
    for row in re.findall(r"<tr><th scope=\"row\".*?</tr>", html):
        head, *cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)
        found[re.sub(r"<[^>]*>", "", head).strip()] = [re.sub(r"<[^>]*>", " ", cell).strip() for cell in cells]
    return found


def test_each_quantity_is_shown_for_both_with_what_changed() -> None:
    runs = [
        make_run("before", tpot_s=0.02, ttft_s=0.1),
        make_run("after", tpot_s=0.015, ttft_s=0.11, stats=make_stats(predictor="gate", ready=2)),
    ]
    found = rows(difference_table(runs, runs[0]))
    assert found["TPOT ms"] == ["20.0", "15.0", "−25.0% better"]
    assert found["TTFT ms"] == ["100", "110", "+10.0% worse"]
    assert found["hit %"] == ["50.0", "50.0", "the same"]
    assert found["ready %"] == ["50.0", "100", "+50.0 points better"]
    assert found["prefetch % on"] == ["–", "100", "–"]
    assert "speed" not in found
    swapped = rows(difference_table(runs, runs[1]))
    assert swapped["TPOT ms"] == ["15.0", "20.0", "+33.3% worse"]


def test_an_interval_stands_below_its_time() -> None:
    runs = [make_run("a", tpot_s=0.02, tpot_interval_s=(0.019, 0.021)), make_run("b")]
    assert '20.0<span class="interval-text">[19.0, 21.0]</span>' in difference_table(runs, runs[0])


def test_many_runs_have_a_line_each_with_the_best_and_the_baseline_named() -> None:
    runs = [
        make_run("a", tpot_s=0.02),
        make_run("b", tpot_s=0.01, bound_s=0.009),
        make_run("c", tpot_s=0.03, bound_s=0.04),
    ]
    html = runs_table(runs, runs[0])
    assert '<th scope="row">a<span class="tag">baseline</span></th>' in html
    assert '<tr class="best"><th scope="row">b<span class="tag">fastest with slots</span></th>' in html
    assert html.count('class="alarm"') == 1
    assert "0.75 !" in html
