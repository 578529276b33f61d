"""The report on runs as one HTML file that holds everything it needs, and fetches nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from promoe.commands.charts.comparison_table import difference_table, runs_table
from promoe.commands.charts.curves import coverage_cards, coverage_chart
from promoe.commands.charts.needs_maps import DIGITS, maps
from promoe.commands.charts.overview import overview
from promoe.commands.charts.section import section
from promoe.commands.charts.side_by_side import chart_pairs
from promoe.commands.charts.style import CSS, LEVELS, PATTERNS, own_file
from promoe.files import PathLike, write_atomically
from promoe.stats.run import Run
from promoe.stats.text_report import baseline_of
from promoe.stats.words import comparison
from promoe.units import format_memory

# Hover texts, the layer of a map over time, tabs, light or dark. Without it the page is whole: all runs below each other, and
# the browser's own hover titles.
_SCRIPT = own_file("report.js").replace("%DIGITS%", DIGITS).replace("%LEVELS%", str(LEVELS))
# The page may run its own script and style, and load nothing from anywhere.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_WORDS = (
    ("Expert cache, slot", "a fixed pool of expert-sized buffers in fast memory; cache rate = slots / all experts."),
    ("Hit", "a needed expert was in its slot when the gate chose it."),
    ("Ready", "it was there when its layer came to compute it: a hit, or it arrived in time."),
    ("Stall", "time in which compute waits for weights."),
    ("Demand, prefetch", "moved because a gate had chosen the expert, or because a prediction said that one would."),
    ("Bound", "no run can be faster: the larger of compute alone and missed bytes / bandwidth of the link."),
    ("TTFT, TPOT", "time to the first token; time per output token after it."),
    ("Named", "among a forecast's most probable experts, as many as the layer then needed."),
)


def html_report(
    runs: Sequence[Run],
    path: PathLike,
    title: str = "promoe report",
    conditions: Mapping[str, str] | None = None,
    *,
    baseline: str | None = None,
) -> Path:
    """Write a report on `runs` as one HTML file: tables, charts per run, layer and token, heat maps, words, advice.

    Two runs are set side by side; of more, one is shown at a time. It needs no network and no other file, follows the
    reader's light or dark mode, and prints.

    Args:
        runs: one or more, with different names; for comparisons all of the same model.
        path: where to write; replaced if it exists.
        title: heading of the page.
        conditions: what the numbers hold for (model, link, prompts, threads, ...), shown at the top.
        baseline: name of the run that others are compared with; None: the first whose experts do not all fit its cache.

    Returns:
        The path written.

    Raises:
        ConfigError: no runs, a name twice, no run of that name, or the file cannot be written
            (call `promoe.files.check_writable(path)` before a long measurement).
    """
    return write_atomically(path, _page(runs, baseline_of(runs, baseline), title, conditions or {}))


def _page(runs: Sequence[Run], baseline: Run, title: str, conditions: Mapping[str, str]) -> Iterator[str]:
    """Yield the HTML in pieces. `baseline` is one of `runs`; every string is escaped here."""
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
    if len(runs) == 1:
        yield f"<h2>The run</h2>{section(0, runs[0], runs, not shared)}<h2>Times, traffic and needs</h2>\n"
    else:
        table = difference_table(runs, baseline) if len(runs) == 2 else runs_table(runs, baseline)
        yield f'<h2>In short</h2><div class="card short">{_list(comparison(runs, baseline))}</div>\n'
        yield f"<h2>The runs compared</h2>{table}\n"
    concentration = coverage_cards(counted) if shared else ""
    yield f'<div class="grid">{"".join(overview(runs))}{concentration}</div>\n'
    if shared:
        same = " (the same in all runs)" if len(runs) > 1 else ""
        yield f"<h2>Which experts were needed{same}</h2>{maps(counted[:1])}\n"
    if len(runs) == 2:
        in_order = _from_baseline(runs, baseline)
        yield f"<h2>Side by side</h2>{chart_pairs(in_order)}\n"
        if counted and not shared:
            needed = [run for run in in_order if run in counted]
            curves = "".join(coverage_chart([run], run.name) for run in needed)
            yield f'<h2>Which experts were needed</h2>{maps(needed)}<div class="pair">{curves}</div>\n'
    elif len(runs) > 2:
        yield f"<h2>Each run</h2>{_tabs(runs)}"
        yield from (section(i, run, runs, not shared) for i, run in enumerate(runs))
    words = "".join(f"<div><dt>{escape(k)}</dt> <dd>– {escape(v)}</dd></div>" for k, v in _WORDS)
    yield f'<h2>Words</h2><dl class="card words">{words}</dl>\n</main><script>{_SCRIPT}</script></body></html>\n'


def _from_baseline(runs: Sequence[Run], baseline: Run) -> list[Run]:
    return [baseline, *(run for run in runs if run is not baseline)]


def _lede(runs: Sequence[Run]) -> str:
    experts = sum(runs[0].stats.num_experts)
    size = sum(n * b for n, b in zip(runs[0].stats.num_experts, runs[0].stats.expert_bytes, strict=True))
    layers = len(runs[0].stats.num_experts)
    return f"{layers} MoE layers, {experts:,} experts, {format_memory(size)} of expert weights"


def _list(sentences: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def _tabs(runs: Sequence[Run]) -> str:
    buttons = "".join(
        f'<button type="button" role="tab" aria-controls="run-{i}">{escape(run.name)}</button>'
        for i, run in enumerate(runs)
    )
    return f'<div class="tabs" role="tablist">{buttons}</div>'
