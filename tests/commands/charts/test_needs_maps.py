from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from synthetic_runs import make_run, make_stats

from promoe.commands.charts.needs_maps import DIGITS, MAX_CELLS, heat_map, maps, use_map, waited_longest
from promoe.commands.charts.style import LEVELS
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


def content(figure: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(html.unescape(re.search(r'data-use="([^"]*)"', figure)[1]))  # type: ignore[index]
    return found


def test_the_map_carries_every_layer_and_draws_one() -> None:
    run = make_run(stats=make_stats(layers=3, experts=8, top_k=2, decode_passes=6))
    figure = use_map(run, layer=1)
    use = content(figure)
    assert (use["begins"], use["end"], use["experts"], use["layer"]) == ([0, 1, 2, 3, 4, 5], 6, [8, 8, 8], 1)
    for layer, digits in enumerate(use["layers"]):
        truth = [[expert in ((p % 3 + layer) % 8, (p % 3 + layer + 1) % 8) for p in range(6)] for expert in range(8)]
        assert digits == "".join(DIGITS[-1] if needed else DIGITS[0] for row in truth for needed in row)
    drawn = {css: d.count("M") for css, d in re.findall(r'<path class="(h\d)" d="([^"]*)"', figure)}
    assert drawn == {"h0": 8 * 6 - 12, "h8": 12}
    assert "<b>1</b>" in figure
    assert figure.count("<option") == 3
    assert '<option value="1" selected>' in figure


def test_a_share_of_passes_is_a_digit_and_a_shade() -> None:
    run = make_run(stats=make_stats(layers=1, experts=4, top_k=1, decode_passes=48 * 3))
    use = content(use_map(run, layer=0))
    width = use["begins"][1]
    assert width == 4
    assert len(use["begins"]) == 36
    shares = [DIGITS.index(digit) / 63 for digit in use["layers"][0][:36]]  # expert 0: every third pass
    assert all(share == pytest.approx(n / 4, abs=0.01) for share, n in zip(shares, [2, 1, 1] * 12, strict=True))


def test_large_models_are_drawn_in_longer_stretches() -> None:
    run = make_run(stats=make_stats(layers=48, experts=128, top_k=8, decode_passes=47))
    use = content(use_map(run, layer=0))
    assert sum(map(len, use["layers"])) <= MAX_CELLS
    assert use["end"] == 47
    assert len(use["begins"]) == 24


def test_the_layer_to_look_at_first_is_the_one_that_waited_longest() -> None:
    stats = make_stats(layers=3)
    layers = [
        replace(layer, stall_s=waited_s) for layer, waited_s in zip(stats.decode.layers, (1.0, 3.0, 2.0), strict=True)
    ]
    run = make_run(stats=replace(stats, decode=replace(stats.decode, layers=tuple(layers))))
    assert waited_longest(run) == 1


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
