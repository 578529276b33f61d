from __future__ import annotations

from synthetic_runs import make_run, make_stats

from promoe.commands.charts.needs import coverage_cards, coverage_pair, maps


def test_one_run_has_a_map_by_layer_and_one_over_time() -> None:
    html = maps([make_run("a run")])
    assert [html.count(kind) for kind in ("data-heat=", "data-use=")] == [1, 1]
    assert "a run" not in html


def test_of_two_runs_the_same_layer_is_shown_with_their_names() -> None:
    html = maps([make_run("first"), make_run("second", stats=make_stats(shift=1))])
    assert [html.count(f'<span class="tag">{name}</span>') for name in ("first", "second")] == [2, 2]
    assert html.count("MoE layer <b>0</b>") == 2


def test_a_run_that_decoded_nothing_has_no_map_over_time() -> None:
    html = maps([make_run(stats=make_stats(decode_passes=0))])
    assert [html.count(kind) for kind in ("data-heat=", "data-use=")] == [1, 0]


def test_concentration_is_of_all_or_of_each() -> None:
    runs = [make_run("first"), make_run("second", stats=make_stats(shift=1))]
    assert coverage_cards(runs).count("<svg") == 1
    assert coverage_pair(runs).count("<svg") == 2
