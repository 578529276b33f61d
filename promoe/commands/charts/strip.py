"""Draws one token's time as lanes, in HTML: computing, waiting, what each reader of the link fetched, when the predictor ran.

A lane stretches to whatever width there is; names and times stand outside of it.
"""

from __future__ import annotations

from collections import defaultdict
from html import escape

from promoe.commands.charts.frame import Numbers, figure, sentence
from promoe.commands.charts.svg import every, tick_labels, ticks
from promoe.commands.charts.token_lanes import CSS_OF_CAUSE, Lane, lanes_of
from promoe.stats.lanes import Lanes
from promoe.units import format_seconds, format_share, ratio

UNITS = 2000
"""Length of a lane, in units of its drawing."""
_THINNEST = 5.0
_LAYER_LABELS = 24


def strip(token: Lanes, of: str = "", longest_s: float | None = None) -> str:
    """Draw a pass.

    Args:
        token: the pass.
        of: name of the run, if two runs are beside each other.
        longest_s: end of the time axis, so that both have the same; None: the end of the pass.
    """
    end_s = max(token.duration_s, longest_s or 0.0) or 1e-9
    lanes = list(lanes_of(token))
    rows = "".join(_lane_row(lane, end_s) for lane in lanes)
    values = [value for value in ticks(end_s * 1e3, 8) if value <= end_s * 1e3]
    labels = tick_labels(values) if len(values) > 1 else ["0"]
    axis = "".join(
        f'<span style="left:{100 * value / (end_s * 1e3):.2f}%">{label}</span>'
        for value, label in zip(values, labels, strict=True)
    )
    drawn = {bar.css for lane in lanes for bar in lane.bars}
    legend = [(css, name) for css, name in _LEGEND if css in drawn]
    title = "One token, from begin to end"
    subtitle = (
        f"The decode pass that took the median time, {format_seconds(token.duration_s)}: "
        f"{format_seconds(token.experts_s)} experts, {format_share(ratio(token.stall_s, token.duration_s))} waiting."
    )
    drawing = (
        f'<div class="strip"><div class="layers"><b>layer</b><div>{_layer_labels(token, end_s)}</div></div>{rows}'
        f'<div class="times"><div>{axis}</div></div><p class="x-name">time since the pass began (ms)</p></div>'
    )
    return figure(title, subtitle, legend, drawing, _numbers(token), css="wide", of=of)


_LEGEND = (
    ("compute", "experts of a layer"),
    ("rest", "all else: attention, gates, norms, head"),
    ("waited", "waiting for experts"),
    ("demand", "fetched on demand"),
    ("arrived", "fetched ahead of need"),
    ("predict", "predictor"),
)


def _lane_row(lane: Lane, end_s: float) -> str:
    marks = []
    for bar in lane.bars:
        x, width = UNITS * bar.start_s / end_s, UNITS * (bar.end_s - bar.start_s) / end_s
        title = f"<title>{escape(bar.tip)}</title>"
        marks.append(
            f'<rect class="{bar.css}" x="{x:.1f}" width="{max(_THINNEST, width):.1f}" height="1" data-mark="">{title}</rect>'
        )
    spoken = escape(sentence(lane.name, [lane.spoken]))
    return (
        f'<div class="lane"><b>{escape(lane.name)}</b><svg viewBox="0 0 {UNITS} 1" preserveAspectRatio="none" role="img" '
        f'aria-label="{spoken}">{"".join(marks)}</svg></div>'
    )


def _layer_labels(token: Lanes, end_s: float) -> str:
    """Write the numbers of some layers, where their experts are."""
    step = every(len(token.visits) / _LAYER_LABELS)
    return "".join(
        f'<span style="left:{100 * (v.start_s + v.end_s) / 2 / end_s:.2f}%"{" class=minor" if i % (2 * step) else ""}>'
        f"{v.layer}</span>"
        for i, v in enumerate(token.visits)
        if i % step == 0
    )


def _numbers(token: Lanes) -> Numbers:
    # One pass over each list: a file from somebody else may have very many.
    waits_s: dict[int | None, float] = defaultdict(float)
    for wait in token.waits:
        waits_s[wait.layer] += wait.duration_s
    fetched: dict[tuple[int | None, str], set[int]] = defaultdict(set)
    for one in token.transfers:
        fetched[one.layer, one.cause].add(one.expert)
    rows = []
    for visit in token.visits:
        wait_s = waits_s.get(visit.layer, 0.0)
        counts = [str(len(fetched.get((visit.layer, cause), ()))) for cause in CSS_OF_CAUSE]
        rows.append([str(visit.layer), format_seconds(visit.duration_s - wait_s), format_seconds(wait_s), *counts])
    return Numbers(["layer", "computing experts", "waiting", "experts fetched on demand", "fetched ahead"], rows)
