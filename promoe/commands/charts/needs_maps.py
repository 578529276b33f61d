"""Maps of the experts that a text needed: layers x experts, and experts x time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from promoe.commands.charts.cells import Axis, cell_map, numbered, shade_scale
from promoe.commands.charts.frame import Numbers, figure, sentence
from promoe.commands.charts.style import LEVELS
from promoe.commands.charts.svg import every
from promoe.stats.counts import PhaseStats
from promoe.stats.over_time import Stretch
from promoe.stats.run import Run
from promoe.stats.totals import Stats
from promoe.units import format_share, ratio

# A share of passes, 0 to 63, as one character, so that the text of a map is as long as the map has cells.
DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"
_TOP = len(DIGITS) - 1
MAX_CELLS = 150_000
"""Of all maps over time of one run; longer stretches are drawn where there are more."""


def maps(runs: Sequence[Run]) -> str:
    """Draw the experts of runs by layer, and over time. The maps of several runs are below each other, of the same layer."""
    names = [run.name if len(runs) > 1 else "" for run in runs]
    layer = waited_longest(runs[0])
    by_layer = [heat_map(run.phase, run.phase_name, name) for run, name in zip(runs, names, strict=True)]
    by_time = [
        use_map(run, layer, name)
        for run, name in zip(runs, names, strict=True)
        if run.stats.over_time and run.stats.decode.needed
    ]
    return "".join([*by_layer, *by_time])


def heat_map(phase: PhaseStats, phase_name: str, of: str = "") -> str:
    """Draw the share of a layer's visits that needed each expert, `[layer][expert]`; `of`: the run's name."""
    counts = phase.expert_counts
    visits = [max(1, layer.layer_visits) for layer in phase.layers]
    most = max((c / v for row, v in zip(counts, visits, strict=True) for c in row), default=0.0) or 1.0
    shades = [
        [math.ceil(count / visits[i] / most * (LEVELS - 1) - 1e-9) for count in row] for i, row in enumerate(counts)
    ]
    title = "Experts that the text needed"
    layers, experts = len(counts), max((len(row) for row in counts), default=0)
    drawing = cell_map(
        shades,
        numbered("MoE layer (index)", layers, 32),
        numbered("expert (index)", experts, 12),
        height=layers * min(24.0, max(8.0, 420 / max(1, layers))),
        spoken=sentence(
            title, [f"{layers} layers of up to {experts} experts, the most needed in {format_share(most)}"]
        ),
        row_tips=[f"layer {i}: {_row_words(row, visits[i])}" for i, row in enumerate(counts)],
        kind="heat",
        content={"visits": visits, "counts": [list(row) for row in counts]},
    )
    scale = shade_scale("0%", f"{format_share(most)} of the layer's visits needed the expert")
    subtitle = f"One row per MoE layer, one cell per expert, {phase_name} passes. Stronger: needed more often."
    return figure(title, subtitle, [], scale + drawing, _heat_numbers(counts, visits), css="wide", of=of)


def _row_words(row: Sequence[int], visits: int) -> str:
    used = sum(1 for count in row if count)
    if not used:
        return f"0 of {len(row)} experts needed"
    top = max(range(len(row)), key=row.__getitem__)
    often = f"most often expert {top}, in {format_share(row[top] / visits)} of {visits} visits"
    return f"{used} of {len(row)} experts needed; {often}"


def _heat_numbers(counts: Sequence[Sequence[int]], visits: Sequence[int]) -> Numbers:
    rows = []
    for i, row in enumerate(counts):
        top = sorted(range(len(row)), key=lambda j: -row[j])[:3]
        most = ", ".join(f"{j} ({format_share(row[j] / visits[i])})" for j in top if row[j])
        rows.append([str(i), f"{sum(map(bool, row))} of {len(row)}", most or "none"])
    return Numbers(["layer", "experts needed", "most needed (share of visits)"], rows)


def use_map(run: Run, layer: int, of: str = "") -> str:
    """Draw when each expert of a layer was needed, `[expert][stretch]`. The page's script changes the layer.

    `of`: the run's name.
    """
    stats = run.stats
    stretches = _fewer(stats.over_time, sum(stats.num_experts))
    bounds = _layer_bounds(stats)
    digits = [_digits(stretches, start, stop) for start, stop in bounds]
    num_experts, columns = stats.num_experts[layer], len(stretches)
    shades = [
        [
            math.ceil(DIGITS.index(digit) / _TOP * (LEVELS - 1))
            for digit in digits[layer][i * columns : (i + 1) * columns]
        ]
        for i in range(num_experts)
    ]
    passes = sum(stretch.passes for stretch in stretches)
    totals = [sum(stretch.expert_counts[i] for stretch in stretches) for i in range(*bounds[layer])]
    title = "Experts needed over time"
    begins = first_passes(stretches)
    step = every(num_experts / 16)
    drawing = cell_map(
        shades,
        Axis("expert (index)", num_experts, [(i, str(i)) for i in range(0, num_experts, step)]),
        Axis("decode pass (a token of each sequence)", columns, pass_ticks(begins)),
        height=num_experts * min(14.0, max(3.0, 384 / max(1, num_experts))),
        spoken=sentence(title, [f"layer {layer}, {num_experts} experts", _changes(stretches, bounds[layer])]),
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
    return figure(title, subtitle, [], choice + scale + drawing, stretch_numbers(stretches), css="wide", of=of)


def waited_longest(run: Run) -> int:
    """Return the layer that waited longest, which is to be looked at first."""
    layers = run.stats.decode.layers
    return max(range(len(layers)), key=lambda i: layers[i].stall_s)


def _layer_bounds(stats: Stats) -> list[tuple[int, int]]:
    """Return where each layer's experts begin and end in a stretch's counts."""
    stops = list(accumulate(stats.num_experts))
    return list(zip([0, *stops], stops, strict=False))


def _fewer(stretches: Sequence[Stretch], num_experts: int) -> list[Stretch]:
    """Join neighbours until the cells of all layers are few enough for a page."""
    found = list(stretches)
    while len(found) > 1 and len(found) * num_experts > MAX_CELLS:
        odd = found[len(found) // 2 * 2 :]
        found = [a.plus(b) for a, b in zip(found[::2], found[1::2], strict=False)] + odd
    return found


def _digits(stretches: Sequence[Stretch], start: int, stop: int) -> str:
    """Return a digit per stretch for each expert of a layer, expert by expert."""
    return "".join(
        DIGITS[round(_TOP * min(1.0, stretch.expert_counts[i] / stretch.passes))]
        for i in range(start, stop)
        for stretch in stretches
    )


def first_passes(stretches: Sequence[Stretch]) -> list[int]:
    """Return how many passes were before each stretch."""
    return list(accumulate((stretch.passes for stretch in stretches), initial=0))[:-1]


def pass_ticks(begins: Sequence[int]) -> list[tuple[int, str]]:
    """Return (stretch, number of its first pass from 1) for about six of them."""
    step = max(1, math.ceil(len(begins) / 6))
    return [(i, str(begins[i] + 1)) for i in range(0, len(begins), step)]


def _changes(stretches: Sequence[Stretch], bounds: tuple[int, int]) -> str:
    """Say how often the most needed expert of a layer is another one than in the stretch before."""
    tops = [max(range(*bounds), key=s.expert_counts.__getitem__) for s in stretches if bounds[0] < bounds[1]]
    changed = sum(1 for before, after in pairwise(tops) if before != after)
    return f"the most needed one changes {changed} times in {len(stretches)} stretches"


def stretch_numbers(stretches: Sequence[Stretch]) -> Numbers:
    """Return a row per stretch: how many experts it needed, and its rates."""
    rows = []
    for begin, s in zip(first_passes(stretches), stretches, strict=True):
        used = sum(1 for count in s.expert_counts if count)
        name = str(begin + 1) if s.passes == 1 else f"{begin + 1} to {begin + s.passes}"
        rates = (format_share(ratio(s.hits, s.needed)), format_share(ratio(s.ready, s.needed)))
        rows.append([name, f"{used:,}", *rates])
    return Numbers(["decode passes", "different experts needed", "hit rate", "ready rate"], rows)
