from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from synthetic_runs import make_run, make_stats

from promoe.commands.charts.over_time import DIGITS, MAX_CELLS, rates_chart, use_map, waited_longest


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


def test_rates_are_steps_from_the_first_pass_to_the_last() -> None:
    chart = rates_chart(make_run(stats=make_stats(decode_passes=5, hits=1, ready=2)))
    hit, ready = (re.search(rf'class="steps steps-{css}" d="([^"]*)"', chart)[1] for css in ("hit", "ready"))  # type: ignore[index]
    assert hit.count("H") == ready.count("H") == 5
    assert hit.startswith("M42 90H")
    assert ready.startswith("M42 10H")
    assert "hit rate 50.0% at first, 50.0% at last" in chart
    assert "ready rate 100% at first, 100% at last" in chart
