"""One run's section of the report: main numbers, words, charts per layer, a table of both phases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from promoe.counts import PhaseStats
from promoe.units import format_megabytes, format_memory, format_seconds, format_share, is_number, ratio
from promoe.viz.charts import Series, stacked_columns
from promoe.viz.heatmap import coverage_chart, coverage_table, heat_map
from promoe.viz.parts import BYTES_BY_CAUSE, NEEDS
from promoe.viz.run import Run
from promoe.viz.words import advice, meaning


def section(number: int, run: Run, runs: Sequence[Run], with_needs: bool) -> str:
    """The section of `run`, the `number`th of `runs` (which give its charts a common scale).

    `with_needs`: draw the heat map here, because the runs differ in it.
    """
    note = f'<p class="lede">{escape(run.note)}</p>' if run.note else ""
    charts = ""
    if run.phase.layer_visits:
        charts = f'<div class="grid">{"".join(_layer_charts(run, runs))}</div>'
        if with_needs:
            charts += heat_map(run.phase, run.phase_name)
            charts += f'<div class="grid">{coverage_chart([run])}{coverage_table([run])}</div>'
    return (
        f'<section class="run" id="run-{number}"><h3>{escape(run.name)}</h3>{note}'
        f'<p class="lede">{escape(_setup(run))}</p>{_tiles(run)}'
        f'<div class="grid">{_words(run)}{_numbers(run)}</div>{charts}</section>\n'
    )


def _setup(run: Run) -> str:
    stats = run.stats
    words = [
        f"{stats.cache_slots:,} slots for {sum(stats.num_experts):,} experts, {format_memory(stats.cache_bytes)}",
        f"policy {stats.policy}",
        f"predictor {stats.predictor or 'none'}",
        f"link {stats.link}",
    ]
    return " · ".join([*words, f"store {stats.store}"] if stats.store else words)


def _tiles(run: Run) -> str:
    phase = run.phase
    tiles = [
        (format_seconds(run.time_per_token_s), "per output token"),
        (format_seconds(run.time_to_first_s), "to the first token"),
        (format_share(phase.stall_share), f"of {run.phase_name} stalled"),
        (format_share(phase.hit_rate), "hit rate"),
        (format_share(phase.ready_rate), "ready rate"),
        (f"{format_megabytes(phase.bytes_per_token)} MB", "moved per token"),
    ]
    if run.stats.predictor is not None:
        tiles.append((format_share(phase.wasted_share), "prefetched in vain"))
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile"><b>{b}</b><span>{s}</span></div>' for b, s in tiles)
        + "</div>"
    )


def _words(run: Run) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in meaning(run))
    found = advice(run)
    todo = "".join(f'<li>{escape(a.text)} <span class="rule">(rule: {escape(a.rule)})</span></li>' for a in found)
    return f'<div class="card words-card"><h3>What it means</h3><ul>{items}</ul><h3>What to do</h3>' + (
        f"<ul>{todo}</ul></div>" if todo else '<p class="rule">No rule applies.</p></div>'
    )


def _layer_charts(run: Run, runs: Sequence[Run]) -> Iterator[str]:
    phase, name = run.phase, run.phase_name
    common = "; same scale for all runs" if len(runs) > 1 else ""
    yield stacked_columns(
        "Where needed experts were, by layer",
        f"Share of the experts needed in {name}; hatched: compute waited.",
        [
            Series(part.css, part.label, [100 * ratio(part.of(layer), layer.needed) for layer in phase.layers])
            for part in NEEDS
        ],
        "needed experts (%)",
        lambda value: f"{value:.1f}% of needed experts",
        top=100,
    )
    most_bytes = [ratio(layer.bytes_total, r.phase.tokens) / 1e6 for r in runs for layer in r.phase.layers]
    yield stacked_columns(
        "Bytes moved by layer and cause",
        f"Per {name} token{common}.",
        [
            Series(part.css, part.label, [ratio(part.of(layer), phase.tokens) / 1e6 for layer in phase.layers])
            for part in BYTES_BY_CAUSE
        ],
        "traffic (MB per token)",
        lambda value: f"{format_megabytes(value * 1e6)} MB per token",
        top=_most(most_bytes),
    )
    for phase_name in dict.fromkeys((name, "prefill")):
        if any(r.of_phase(phase_name).passes for r in runs):
            yield stacked_columns(
                f"Stall by layer, {phase_name}",
                f"Time that compute waited, per {phase_name} pass{common}.",
                [Series("stall", "stall", _stalls_ms(run.of_phase(phase_name)))],
                "stall (ms per pass)",
                lambda value: format_seconds(value / 1e3),
                top=_most([value for r in runs for value in _stalls_ms(r.of_phase(phase_name))]),
            )


def _stalls_ms(phase: PhaseStats) -> list[float]:
    return [1e3 * ratio(layer.stall_s, phase.passes) for layer in phase.layers]


def _most(values: Iterable[float]) -> float:
    return max((value for value in values if is_number(value)), default=0.0)


def _numbers(run: Run) -> str:
    rows = "".join(
        f'<tr><th scope="row"{" class=sub" if label.startswith(" ") else ""}>{escape(label.strip())}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for label, *cells in run.stats.rows()
    )
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("", "prefill", "decode", "total"))
    return (
        f'<div class="card scroll numbers"><h3>Prefill and decode</h3><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
