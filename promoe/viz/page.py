"""The HTML report: one file that holds everything, and fetches nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from promoe.units import format_memory, is_number
from promoe.viz.heatmap import coverage_chart, coverage_table, heat_map
from promoe.viz.overview import overview
from promoe.viz.run import Run
from promoe.viz.section import section
from promoe.viz.style import CSS, PATTERNS, SCRIPT
from promoe.viz.table import Column, columns_for
from promoe.viz.words import BOUND_TOLERANCE, comparison

# The page may run its own script and style, and load nothing, from nowhere.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

_WORDS = (
    ("Expert cache, slot", "a fixed pool of expert-sized buffers in fast memory; cache rate = slots / all experts."),
    ("Hit", "a needed expert was in its slot when the gate chose it."),
    ("Ready", "it was there when its layer came to compute it: a hit, or it arrived in time."),
    ("Stall", "time in which compute waits for weights."),
    ("Demand, prefetch", "moved because a gate had chosen the expert, or because a prediction said that one would."),
    ("Bound", "no run can be faster: the larger of compute alone and missed bytes / bandwidth of the link."),
    ("TTFT, TPOT", "time to the first token; time per output token after it."),
)


def page(runs: Sequence[Run], baseline: Run, title: str, conditions: Mapping[str, str]) -> Iterator[str]:
    """The report's HTML in pieces. `baseline` is one of `runs`; every string is escaped here."""
    yield (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{CSS}</style></head>\n<body>{PATTERNS}<main>\n"
        f'<header><div><h1>{escape(title)}</h1><p class="lede">{_lede(runs)}</p></div>'
        f'<button id="theme" type="button" hidden>Light / dark</button></header>\n'
    )
    if conditions:
        pairs = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in conditions.items())
        few = " few" if len(conditions) in (2, 4, 7, 8) else ""
        yield f'<dl class="card conditions{few}">{pairs}</dl>\n'
    counted = [run for run in runs if run.phase.layer_visits]
    shared = len({run.phase.expert_counts for run in counted}) == 1
    sections = (section(i, run, runs, not shared) for i, run in enumerate(runs))
    if len(runs) == 1:
        yield "<h2>The run</h2>"
        yield from sections
        yield f"<h2>Times and traffic</h2>{_table(runs, baseline)}"
    else:
        yield f'<h2>In short</h2><div class="card short">{_list(comparison(runs, baseline))}</div>\n'
        yield f"<h2>The runs compared</h2>{_table(runs, baseline)}\n"
    yield f'<div class="grid">{"".join(overview(runs))}</div>\n'
    if shared:
        same = " (the same in all runs)" if len(runs) > 1 else ""
        yield f"<h2>Which experts were needed{same}</h2>{heat_map(counted[0].phase, counted[0].phase_name)}"
        yield f'<div class="grid">{coverage_chart(counted)}{coverage_table(counted)}</div>\n'
    if len(runs) > 1:
        yield f"<h2>Each run</h2>{_tabs(runs)}"
        yield from sections
    words = "".join(f"<div><dt>{escape(k)}</dt> <dd>– {escape(v)}</dd></div>" for k, v in _WORDS)
    yield f'<h2>Words</h2><dl class="card words">{words}</dl>\n</main><script>{SCRIPT}</script></body></html>\n'


def _lede(runs: Sequence[Run]) -> str:
    experts = sum(runs[0].stats.num_experts)
    size = sum(n * b for n, b in zip(runs[0].stats.num_experts, runs[0].stats.expert_bytes, strict=True))
    layers = len(runs[0].stats.num_experts)
    return f"{layers} MoE layers, {experts:,} experts, {format_memory(size)} of expert weights"


def _list(sentences: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def _table(runs: Sequence[Run], baseline: Run) -> str:
    columns = columns_for(runs)
    heads = "".join(
        f'<th scope="col" title="{escape(c.meaning)}">{escape(c.head)}<small>{escape(c.unit)}</small></th>'
        for c in columns
    )
    caching = [run for run in runs if run.stats.cache_rate < 1 and is_number(run.time_per_token_s)]
    best = min(caching, key=lambda run: run.time_per_token_s) if len(caching) > 1 else None
    body = []
    for run in runs:
        tag = '<span class="tag">baseline</span>' if run is baseline and len(runs) > 1 else ""
        tag += '<span class="tag">fastest with slots</span>' if run is best else ""
        cells = "".join(_cell(c, run, baseline) for c in columns)
        css = ' class="best"' if run is best else ""
        body.append(f'<tr{css}><th scope="row">{escape(run.name)}{tag}</th>{cells}</tr>')
    return (
        '<div class="card scroll"><table><thead><tr><th scope="col">run<small></small></th>'
        f"{heads}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _cell(column: Column, run: Run, baseline: Run) -> str:
    text = column.cell(run, baseline)
    main, _, interval = text.partition(" [")
    extra = f'<span class="interval-text">[{escape(interval)}</span>' if interval else ""
    impossible = column.head == "ratio" and is_number(run.bound_ratio) and run.bound_ratio < BOUND_TOLERANCE
    css = "alarm" if impossible else "lead" if column.head == "TPOT" else ""
    note = ' title="faster than possible: measuring error"' if impossible else ""
    return f'<td class="{css}"{note}>{escape(main)}{" !" if impossible else ""}{extra}</td>'


def _tabs(runs: Sequence[Run]) -> str:
    buttons = "".join(
        f'<button type="button" role="tab" aria-controls="run-{i}">{escape(run.name)}</button>'
        for i, run in enumerate(runs)
    )
    return f'<div class="tabs" role="tablist">{buttons}</div>'
