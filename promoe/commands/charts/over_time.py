"""How a run went on: which experts were needed when, and how hit and ready rates developed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from promoe.commands.charts.cells import LEVELS, Axis, cell_map, shade_scale
from promoe.commands.charts.figure import WIDTH, Numbers, figure, sentence
from promoe.commands.charts.svg import Canvas, coord, every
from promoe.stats.over_time import Stretch
from promoe.stats.run import Run
from promoe.stats.totals import Stats
from promoe.units import format_share, is_number, ratio

# A share of passes, 0 to 63, as one character: with it a whole model's map is as long as it has cells.
DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"
_TOP = len(DIGITS) - 1
MAX_CELLS = 150_000
"""Of one run's maps together: what has more is drawn in longer stretches."""


def use_map(run: Run, layer: int, of: str = "") -> str:
    """When each expert of a layer was needed, `[expert][stretch]`, as one figure; a script changes the layer.

    `of`: the run's name.
    """
    stats = run.stats
    stretches = _fewer(stats.over_time, sum(stats.num_experts))
    digits = [_digits(stretches, start, stop) for start, stop in _layer_bounds(stats)]
    num_experts, columns = stats.num_experts[layer], len(stretches)
    shades = [
        [
            math.ceil(DIGITS.index(digit) / _TOP * (LEVELS - 1))
            for digit in digits[layer][i * columns : (i + 1) * columns]
        ]
        for i in range(num_experts)
    ]
    passes = sum(stretch.passes for stretch in stretches)
    totals = [sum(stretch.expert_counts[i] for stretch in stretches) for i in range(*_layer_bounds(stats)[layer])]
    title = "Experts needed over time"
    begins = _begins(stretches)
    step = every(num_experts / 16)
    drawing = cell_map(
        shades,
        Axis("expert (index)", num_experts, [(i, str(i)) for i in range(0, num_experts, step)]),
        Axis("decode pass (a token of each sequence)", columns, _pass_ticks(begins)),
        height=num_experts * min(14.0, max(3.0, 384 / max(1, num_experts))),
        spoken=sentence(
            title, [f"layer {layer}, {num_experts} experts", _changes(stretches, _layer_bounds(stats)[layer])]
        ),
        row_tips=[f"expert {i}: needed in {count} of {passes} passes" for i, count in enumerate(totals)],
        kind="use",
        content={
            "begins": begins,
            "end": passes,
            "experts": list(stats.num_experts),
            "layers": digits,
            "layer": layer,
        },
    )
    options = "".join(
        f'<option value="{i}"{" selected" if i == layer else ""}>{i}</option>' for i in range(len(stats.num_experts))
    )
    choice = (
        f'<p class="choice"><label>MoE layer <b>{layer}</b><select data-layers hidden>{options}</select></label>'
        f"<span>of {len(stats.num_experts)}</span></p>"
    )
    scale = shade_scale("0%", "100% of the passes needed the expert")
    subtitle = "One row per expert, time from left to right. Stripes: what stays needed, and is worth keeping."
    return figure(title, subtitle, [], choice + scale + drawing, _use_numbers(stretches), css="wide", of=of)


def waited_longest(run: Run) -> int:
    """The layer to look at first."""
    layers = run.stats.decode.layers
    return max(range(len(layers)), key=lambda i: layers[i].stall_s)


def rates_chart(run: Run, of: str = "") -> str:
    """Hit and ready rate of the stretches of a run, as steps; `of`: the run's name."""
    stretches = run.stats.over_time
    height, left, right, top, bottom = 214, 42, 8, 10, 170
    canvas = Canvas(WIDTH, height)
    begins, passes = _begins(stretches), sum(stretch.passes for stretch in stretches)
    sx, sy = (WIDTH - left - right) / max(1, passes), bottom - top
    for tenth in range(0, 11, 2):
        canvas.line(left, bottom - sy * tenth / 10, WIDTH - right, bottom - sy * tenth / 10, "grid")
        canvas.text(left - 7, bottom - sy * tenth / 10 + 4, f"{tenth * 10}", "tick end")
    for number, name in _pass_ticks(begins):
        canvas.text(left + begins[number] * sx, bottom + 16, name, "tick mid")
    rates = {
        "ready": [ratio(s.ready, s.needed) for s in stretches],
        "hit": [ratio(s.hits, s.needed) for s in stretches],
    }
    for css, values in rates.items():
        d = "".join(
            f"{'L' if i else 'M'}{coord(left + begin * sx)} {coord(bottom - sy * value)}"
            f"H{coord(left + (begin + stretch.passes) * sx)}"
            for i, (begin, value, stretch) in enumerate(zip(begins, values, stretches, strict=True))
            if is_number(value)
        )
        if d:
            canvas.path(
                d if d[0] == "M" else f"M{d[1:]}", f"steps steps-{css}", f"{css} rate: {_first_to_last(values)}"
            )
    canvas.line(left, bottom, WIDTH - right, bottom, "axis")
    canvas.text(left + (WIDTH - left - right) / 2, height - 8, "decode pass (number)", "axis-label mid")
    canvas.text(11, top + sy / 2, "needed experts (%)", "axis-label mid", rotate=True)
    title = "Hit and ready rate over time"
    legend = [("k-hit-line", "hit: resident at gate time"), ("k-ready-line", "ready: also those that arrived in time")]
    spoken = sentence(title, (f"{css} rate {_first_to_last(values)}" for css, values in rates.items()))
    subtitle = "A cache that starts empty, or a text that changes its subject, shows here."
    return figure(title, subtitle, legend, canvas.render(spoken), _use_numbers(stretches), of=of)


def _first_to_last(rates: Sequence[float]) -> str:
    known = [rate for rate in rates if is_number(rate)]
    return f"{format_share(known[0])} at first, {format_share(known[-1])} at last" if known else "unknown"


def _layer_bounds(stats: Stats) -> list[tuple[int, int]]:
    """Where each layer's experts begin and end in a stretch's counts."""
    stops = list(accumulate(stats.num_experts))
    return list(zip([0, *stops], stops, strict=False))


def _fewer(stretches: Sequence[Stretch], num_experts: int) -> list[Stretch]:
    """Neighbours joined until the cells of all layers are few enough to be carried."""
    found = list(stretches)
    while len(found) > 1 and len(found) * num_experts > MAX_CELLS:
        odd = found[len(found) // 2 * 2 :]
        found = [a.plus(b) for a, b in zip(found[::2], found[1::2], strict=False)] + odd
    return found


def _digits(stretches: Sequence[Stretch], start: int, stop: int) -> str:
    """Of a layer: expert by expert, a digit per stretch."""
    return "".join(
        DIGITS[round(_TOP * min(1.0, stretch.expert_counts[i] / stretch.passes))]
        for i in range(start, stop)
        for stretch in stretches
    )


def _begins(stretches: Sequence[Stretch]) -> list[int]:
    """Passes before each stretch."""
    return list(accumulate((stretch.passes for stretch in stretches), initial=0))[:-1]


def _pass_ticks(begins: Sequence[int]) -> list[tuple[int, str]]:
    """(stretch, number of its first pass from 1) for about six of them."""
    step = max(1, math.ceil(len(begins) / 6))
    return [(i, str(begins[i] + 1)) for i in range(0, len(begins), step)]


def _changes(stretches: Sequence[Stretch], bounds: tuple[int, int]) -> str:
    """In how many stretches the most needed expert of a layer is another than in the one before."""
    tops = [max(range(*bounds), key=s.expert_counts.__getitem__) for s in stretches if bounds[0] < bounds[1]]
    changed = sum(1 for before, after in pairwise(tops) if before != after)
    return f"the most needed one changes {changed} times in {len(stretches)} stretches"


def _use_numbers(stretches: Sequence[Stretch]) -> Numbers:
    rows = []
    for begin, s in zip(_begins(stretches), stretches, strict=True):
        used = sum(1 for count in s.expert_counts if count)
        name = str(begin + 1) if s.passes == 1 else f"{begin + 1} to {begin + s.passes}"
        rates = (format_share(ratio(s.hits, s.needed)), format_share(ratio(s.ready, s.needed)))
        rows.append([name, f"{used:,}", *rates])
    return Numbers(["decode passes", "different experts needed", "hit rate", "ready rate"], rows)
