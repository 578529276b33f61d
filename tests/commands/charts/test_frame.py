from __future__ import annotations

from promoe.commands.charts.frame import Numbers, figure, sentence, table


def test_a_chart_has_title_legend_drawing_and_a_closed_table() -> None:
    html = figure("A & B", "how", [("hit", "a <hit>")], "<svg></svg>", Numbers(["x", "y"], [["1", "2"]]), css="wide")
    assert html.startswith('<figure class="chart wide"><figcaption><h3>A &amp; B</h3><p>how</p></figcaption>')
    assert '<span class="key hit"></span>a &lt;hit&gt;</li>' in html
    assert '<svg></svg><details class="data"><summary>Numbers</summary>' in html
    assert "tag" not in html
    assert 'class="tag">run <b></span>' not in figure("t", "s", [], "", Numbers([], []), of="run <b>")


def test_rows_have_heads_and_parts_of_a_row_are_set_in() -> None:
    assert table(Numbers(["", "n"], [["all", "3"], ["  of it", "<1"]])) == (
        '<table><thead><tr><th scope="col"></th><th scope="col">n</th></tr></thead><tbody>'
        '<tr><th scope="row">all</th><td>3</td></tr>'
        '<tr><th scope="row" class=sub>of it</th><td>&lt;1</td></tr></tbody></table>'
    )


def test_what_is_said_of_a_drawing() -> None:
    assert sentence("Time", ["a 1", "", "b 2"]) == "Time: a 1; b 2."
    assert sentence("Time", []) == "Time: nothing to show."
