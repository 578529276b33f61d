"""Which experts a text needs: the heat map (layers x experts), and how concentrated the needs are."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape

from promoe.counts import PhaseStats
from promoe.units import format_share, is_number, ratio
from promoe.viz.charts import WIDTH, figure
from promoe.viz.run import Run
from promoe.viz.svg import Canvas, coord, every
from promoe.viz.words import coverage

LEVELS = 9
_WIDE = 1180


def heat_map(phase: PhaseStats, phase_name: str) -> str:
    """Share of a layer's visits that needed each expert, `[layer][expert]`, as one figure.

    Cells of one shade are one path (6,144 of them stay below 100 KB). Their hover text comes from a script, which
    reads the counts from the figure's `data-heat`; without scripts each layer's row has a title of its own.
    """
    counts = phase.expert_counts
    visits = [max(1, layer.layer_visits) for layer in phase.layers]
    most = max((c / v for row, v in zip(counts, visits, strict=True) for c in row), default=0.0) or 1.0
    columns = max((len(row) for row in counts), default=1)
    left, top = 56, 6
    cell_w = (_WIDE - left - 8) / columns
    cell_h = min(26.0, max(8.0, 420 / max(1, len(counts))))
    canvas = Canvas(_WIDE, top + cell_h * len(counts) + 42)
    gap = 1.0 if min(cell_w, cell_h) > 6 else 0.5
    shades: list[list[str]] = [[] for _ in range(LEVELS)]
    for i, row in enumerate(counts):
        for j, count in enumerate(row):
            shade = math.ceil(count / visits[i] / most * (LEVELS - 1) - 1e-9)
            w, h = coord(cell_w - gap), coord(cell_h - gap)
            shades[shade].append(f"M{coord(left + j * cell_w)} {coord(top + i * cell_h)}h{w}v{h}h-{w}z")
    for shade, cells in enumerate(shades):
        if cells:
            canvas.path("".join(cells), f"h{shade}")
    _heat_axes(canvas, counts, visits, left, top, cell_w, cell_h)
    title = "Experts that the text needed"
    drawing = canvas.render(title)
    geometry = {
        "left": left,
        "top": top,
        "w": cell_w,
        "h": cell_h,
        "visits": visits,
        "counts": [list(r) for r in counts],
    }
    drawing = f'<div class="heat" data-heat="{escape(json.dumps(geometry, separators=(",", ":")))}">{drawing}</div>'
    scale = "".join(f'<span class="h{shade}"></span>' for shade in range(LEVELS))
    scale = f'<p class="scale">0% <i>{scale}</i> {format_share(most)} of the layer\'s visits needed the expert</p>'
    subtitle = f"One row per MoE layer, one cell per expert, {phase_name} passes. Stronger: needed more often."
    return figure(title, subtitle, [], scale + drawing, "wide")


def _heat_axes(
    canvas: Canvas,
    counts: Sequence[Sequence[int]],
    visits: Sequence[int],
    left: float,
    top: float,
    cell_w: float,
    cell_h: float,
) -> None:
    columns = max((len(row) for row in counts), default=1)
    bottom = top + cell_h * len(counts)
    for i in range(0, len(counts), every(14 / cell_h)):
        canvas.text(left - 8, top + (i + 0.5) * cell_h + 4, str(i), "tick end")
    for j in range(0, columns, every(26 / cell_w)):
        canvas.text(left + (j + 0.5) * cell_w, bottom + 15, str(j), "tick mid")
    canvas.text(left + cell_w * columns / 2, bottom + 34, "expert (index)", "axis-label mid")
    canvas.text(14, (top + bottom) / 2, "MoE layer (index)", "axis-label mid", rotate=True)
    for i, row in enumerate(counts):
        used, best = sum(1 for c in row if c), max(range(len(row)), key=row.__getitem__, default=0)
        share = format_share(row[best] / visits[i]) if row else ""
        most = f"most often expert {best}, in {share} of {visits[i]} visits"
        tip = f"layer {i}: {used} of {len(row)} experts needed; {most}"
        canvas.rect(left, top + i * cell_h, cell_w * len(row), cell_h, "row-tip", tip)


def coverage_chart(runs: Sequence[Run]) -> str:
    """How much of the needs the n most needed experts serve, with each run's hit rate at its cache rate.

    The curve comes from the first run's needs; every run has some.
    """
    height, left, right, top, bottom = 256, 56, 12, 8, 212
    canvas = Canvas(WIDTH, height)
    sx, sy = WIDTH - left - right, bottom - top
    for tenth in range(0, 11, 2):
        canvas.line(left, bottom - sy * tenth / 10, WIDTH - right, bottom - sy * tenth / 10, "grid")
        canvas.text(left - 8, bottom - sy * tenth / 10 + 4, f"{tenth * 10}", "tick end")
        canvas.text(left + sx * tenth / 10, bottom + 16, f"{tenth * 10}", "tick mid")
    canvas.line(left, bottom, WIDTH - right, top, "uniform", "every expert needed equally often")
    shares = coverage(runs[0].phase)
    points = [shares[round(i * (len(shares) - 1) / 200)] for i in range(201)] if shares else []
    if points:
        d = "M" + "L".join(f"{coord(left + sx * i / 200)} {coord(bottom - sy * y)}" for i, y in enumerate(points))
        canvas.path(d, "curve", "a cache that keeps the most needed experts and never changes")
    for run in runs:
        if is_number(run.phase.hit_rate) and run.stats.cache_rate < 1:
            x, y = left + sx * run.stats.cache_rate, bottom - sy * run.phase.hit_rate
            tip = f"{run.name}\ncache {format_share(run.stats.cache_rate)}, hit rate {format_share(run.phase.hit_rate)}"
            canvas.circle(x, y, 5.5, "dot", tip)
    canvas.line(left, bottom, WIDTH - right, bottom, "axis")
    canvas.text(left + sx / 2, height - 8, "experts kept, most needed first (% of all experts)", "axis-label mid")
    canvas.text(14, top + sy / 2, "needs served (%)", "axis-label mid", rotate=True)
    legend = [
        ("k-curve", "best fixed choice of experts"),
        ("k-uniform", "if all were needed equally"),
        ("k-dot", "hit rate of a run"),
    ]
    subtitle = "Dots above the curve follow the text better than any cache that never changes."
    return figure("How concentrated the needs are", subtitle, legend, canvas.render("How concentrated the needs are"))


def coverage_table(runs: Sequence[Run]) -> str:
    """The same in numbers: what the best fixed choice would serve at each run's cache rate, and what the run hit."""
    shares = coverage(runs[0].phase)
    rows = []
    for run in runs:
        kept = min(run.stats.cache_slots, len(shares) - 1)
        fixed = format_share(shares[kept]) if shares else format_share(None)
        cells = (format_share(min(1.0, run.stats.cache_rate)), fixed, format_share(run.phase.hit_rate))
        rows.append(
            f'<tr><th scope="row">{escape(run.name)}</th>' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
        )
    first, *others = ((f"{target:.0%}", _fewest(shares, target)) for target in (0.5, 0.75, 0.9, 0.99))
    sentence = f"{first[0]} of the needs fall on {first[1]} of the experts"
    sentence += "".join(f", {needs} on {experts}" for needs, experts in others) + "."
    heads = "<th></th><th>cache</th><th>best fixed choice</th><th>hit rate</th>"
    return (
        '<div class="card scroll numbers"><h3>What a fixed choice of experts would hit</h3>'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        f'<p class="rule foot">{sentence}</p></div>'
    )


def _fewest(shares: Sequence[float], target: float) -> str:
    """Least share of the experts that serves `target` of the needs."""
    return format_share(ratio(next((n for n, share in enumerate(shares) if share >= target), 0), len(shares) - 1))
