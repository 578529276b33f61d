"""Which experts a text needs: the heat map (layers x experts), and how concentrated the needs are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from promoe.commands.charts.cells import LEVELS, cell_map, numbered, shade_scale
from promoe.commands.charts.figure import WIDTH, Numbers, figure, sentence, table
from promoe.commands.charts.svg import Canvas, coord
from promoe.stats.counts import PhaseStats
from promoe.stats.run import Run
from promoe.stats.words import coverage
from promoe.units import format_share, is_number, ratio


def heat_map(phase: PhaseStats, phase_name: str, of: str = "") -> str:
    """Share of a layer's visits that needed each expert, `[layer][expert]`, as one figure; `of`: the run's name."""
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


def coverage_chart(runs: Sequence[Run], of: str = "") -> str:
    """How much of the needs the n most needed experts serve, with each run's hit rate at its cache rate.

    The curve comes from the first run's needs; every run has some. `of`: the run's name.
    """
    height, left, right, top, bottom = 236, 42, 12, 8, 192
    canvas = Canvas(WIDTH, height)
    sx, sy = WIDTH - left - right, bottom - top
    for tenth in range(0, 11, 2):
        canvas.line(left, bottom - sy * tenth / 10, WIDTH - right, bottom - sy * tenth / 10, "grid")
        canvas.text(left - 7, bottom - sy * tenth / 10 + 4, f"{tenth * 10}", "tick end")
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
    canvas.text(11, top + sy / 2, "needs served (%)", "axis-label mid", rotate=True)
    legend = [
        ("k-curve", "best fixed choice of experts"),
        ("k-uniform", "if all were needed equally"),
        ("k-dot", "hit rate of a run"),
    ]
    title = "How concentrated the needs are"
    subtitle = "Dots above the curve follow the text better than any cache that never changes."
    spoken = sentence(title, [_concentration(shares)])
    return figure(title, subtitle, legend, canvas.render(spoken), _coverage_numbers(runs, shares), of=of)


def coverage_table(runs: Sequence[Run]) -> str:
    """The same in numbers: what the best fixed choice would serve at each run's cache rate, and what the run hit."""
    shares = coverage(runs[0].phase)
    return (
        '<div class="card scroll numbers"><h3>What a fixed choice of experts would hit</h3>'
        f"{table(_coverage_numbers(runs, shares))}"
        f'<p class="rule foot">{escape(_concentration(shares))}.</p></div>'
    )


def _coverage_numbers(runs: Sequence[Run], shares: Sequence[float]) -> Numbers:
    rows = []
    for run in runs:
        kept = min(run.stats.cache_slots, len(shares) - 1)
        fixed = format_share(shares[kept]) if shares else format_share(None)
        rows.append([run.name, format_share(min(1.0, run.stats.cache_rate)), fixed, format_share(run.phase.hit_rate)])
    return Numbers(["run", "cache", "best fixed choice", "hit rate"], rows)


def _concentration(shares: Sequence[float]) -> str:
    first, *others = ((f"{target:.0%}", _fewest(shares, target)) for target in (0.5, 0.75, 0.9, 0.99))
    words = f"{first[0]} of the needs fall on {first[1]} of the experts"
    return words + "".join(f", {needs} on {experts}" for needs, experts in others)


def _fewest(shares: Sequence[float], target: float) -> str:
    """Least share of the experts that serves `target` of the needs."""
    return format_share(ratio(next((n for n, share in enumerate(shares) if share >= target), 0), len(shares) - 1))
