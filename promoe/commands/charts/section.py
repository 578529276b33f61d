"""What the report says of one run: main numbers, words, its time, charts by layer and over time, a table of both phases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from promoe.commands.charts.curves import coverage_cards, rates_chart
from promoe.commands.charts.frame import Numbers, table
from promoe.commands.charts.needs_maps import maps
from promoe.commands.charts.parts import NEEDS_AXIS, TRAFFIC_AXIS, needs, traffic, write_needs, write_traffic
from promoe.commands.charts.stacked_bars import Columns, Series, stacked_columns
from promoe.commands.charts.strip import strip
from promoe.stats.counts import PhaseStats
from promoe.stats.run import Run
from promoe.stats.words import advice, meaning
from promoe.units import (
    format_megabytes,
    format_memory,
    format_seconds,
    format_share,
    format_times,
    is_number,
    ratio,
)


class Chart(NamedTuple):
    """A chart, and what distinguishes it from the run's others, so that the charts of two runs can be paired."""

    kind: str
    html: str


def section(number: int, run: Run, runs: Sequence[Run], with_needs: bool) -> str:
    """Return the section of `run`, the `number`th of `runs` (which give its charts a common scale).

    `with_needs`: draw the heat map here, because the runs differ in it.
    """
    narrow = "".join(chart.html for chart in layer_charts(run, runs))
    wide = "".join(chart.html for chart in wide_charts(run, runs))
    charts = f'{wide}<div class="grid">{narrow}</div>'
    if with_needs and run.phase.layer_visits:
        charts += f'{maps([run])}<div class="grid">{coverage_cards([run])}</div>'
    return (
        f'<section class="run" id="run-{number}"><h3>{escape(run.name)}</h3>{introduction(run)}{tiles(run)}'
        f'<div class="grid two">{words_card(run)}{numbers_card(run) if run.phase.layer_visits else ""}</div>'
        f"{charts}</section>\n"
    )


def introduction(run: Run) -> str:
    """Say what the run is, and its set-up."""
    note = f'<p class="lede">{escape(run.note)}</p>' if run.note else ""
    return f'{note}<p class="lede">{escape(_setup(run))}</p>'


def _setup(run: Run) -> str:
    stats = run.stats
    words = [
        f"{stats.cache_slots:,} slots for {sum(stats.num_experts):,} experts, {format_memory(stats.cache_bytes)}",
        f"policy {stats.policy}",
        f"predictor {stats.predictor or 'none'}",
        f"link {stats.link}",
    ]
    return " · ".join([*words, f"store {stats.store}"] if stats.store else words)


def tiles(run: Run) -> str:
    """Return the main numbers, as far as they are known."""
    phase = run.phase
    found = [
        (format_seconds(run.time_per_token_s), "per output token"),
        (format_seconds(run.time_to_first_s), "to the first token"),
        (format_share(phase.stall_share), f"of {run.phase_name} stalled"),
        (format_share(phase.hit_rate), "hit rate"),
        (format_share(phase.ready_rate), "ready rate"),
        (f"{format_megabytes(phase.bytes_per_token)} MB", "moved per token"),
    ]
    if not phase.layer_visits:
        found = found[:2]
    elif run.stats.predictor is not None:
        found.append((format_share(phase.wasted_share), "prefetched in vain"))
    if is_number(run.bound_ratio):
        found.append((format_times(run.bound_ratio), "of the least time possible"))
    items = "".join(f'<div class="tile"><b>{escape(b)}</b><span>{escape(s)}</span></div>' for b, s in found)
    return f'<div class="tiles">{items}</div>'


def words_card(run: Run, of: str = "") -> str:
    """Say what the numbers mean, and what to do."""
    items = "".join(f"<li>{escape(text)}</li>" for text in meaning(run))
    found = advice(run)
    todo = "".join(f'<li>{escape(a.text)} <span class="rule">(rule: {escape(a.rule)})</span></li>' for a in found)
    return f'<div class="card words-card"><h3>What it means{_tag(of)}</h3><ul>{items}</ul><h3>What to do</h3>' + (
        f"<ul>{todo}</ul></div>" if todo else '<p class="rule">No rule applies.</p></div>'
    )


def numbers_card(run: Run, of: str = "") -> str:
    """Return a table of both phases and their total."""
    numbers = Numbers(["", "prefill", "decode", "total"], run.stats.rows())
    return f'<div class="card scroll numbers"><h3>Prefill and decode{_tag(of)}</h3>{table(numbers)}</div>'


def _tag(of: str) -> str:
    return f'<span class="tag">{escape(of)}</span>' if of else ""


def wide_charts(run: Run, runs: Sequence[Run], of: str = "") -> Iterator[Chart]:
    """Draw what needs the page's width: one token's time. `of`: the run's name, beside another's charts."""
    if run.token is not None:
        longest_s = max(r.token.duration_s for r in runs if r.token is not None)
        yield Chart("token", strip(run.token, of, longest_s if of else None))


def layer_charts(run: Run, runs: Sequence[Run], of: str = "") -> Iterator[Chart]:
    """Draw the charts of a column's width. `of`: the run's name, beside another's charts."""
    phase, name = run.phase, run.phase_name
    if not phase.layer_visits:
        return
    common = "; same scale for all runs" if len(runs) > 1 else ""
    layers = Columns.of_layers(len(phase.layers))
    yield Chart(
        "needs",
        stacked_columns(
            "Where needed experts were, by layer",
            f"Share of the experts needed in {name}; hatched: compute waited.",
            layers,
            needs(phase.layers),
            NEEDS_AXIS,
            write_needs,
            top=100,
            of=of,
        ),
    )
    most_bytes = [ratio(layer.bytes_total, r.phase.tokens) / 1e6 for r in runs for layer in r.phase.layers]
    yield Chart(
        "bytes",
        stacked_columns(
            "Bytes moved by layer and cause",
            f"Per {name} token{common}.",
            layers,
            traffic(phase.layers, [phase.tokens] * len(phase.layers)),
            TRAFFIC_AXIS,
            write_traffic,
            top=_most(most_bytes),
            of=of,
        ),
    )
    for phase_name in dict.fromkeys((name, "prefill")):
        if any(r.of_phase(phase_name).passes for r in runs):
            yield Chart(f"stall {phase_name}", _stall_chart(run, runs, phase_name, common, of))
    if run.stats.forecasts:
        yield Chart("accuracy", accuracy_chart(run, of))
    if len(run.stats.over_time) > 1 and run.stats.decode.needed:
        yield Chart("rates", rates_chart(run, of))


def accuracy_chart(run: Run, of: str = "") -> str:
    """Draw the share of the needed experts that forecasts had named, per distance k; `of`: the run's name."""
    found = run.stats.forecasts
    columns = Columns(
        "layers ahead, k (layer visits)",
        [str(f.steps_ahead) for f in found],
        marks=[100 * f.chance for f in found],
        mark_label="by chance",
        value_labels=len(found) <= 6,
    )
    return stacked_columns(
        "Predictor accuracy, live",
        f"Share of the needed experts that its forecasts had named. {_forecast_share(run)}",
        columns,
        [Series("named", "named k layers before", [100 * f.accuracy for f in found])],
        NEEDS_AXIS,
        lambda value: f"{value:.0f}%",
        top=100,
        of=of,
    )


def _forecast_share(run: Run) -> str:
    """Say how often there was a forecast at all."""
    visits = run.stats.decode.layer_visits
    most = max(run.stats.forecasts, key=lambda f: f.visits)
    if not visits:
        return ""
    share = format_share(min(1.0, most.visits / visits))
    return f"There were forecasts for {share} of the layer visits (k = {most.steps_ahead})."


def _stall_chart(run: Run, runs: Sequence[Run], phase_name: str, common: str, of: str) -> str:
    phase = run.of_phase(phase_name)
    return stacked_columns(
        f"Stall by layer, {phase_name}",
        f"Time that compute waited, per {phase_name} pass{common}.",
        Columns.of_layers(len(phase.layers)),
        [Series("stall", "stall", _stalls_ms(phase))],
        "stall (ms per pass)",
        lambda value: format_seconds(value / 1e3),
        top=_most(value for r in runs for value in _stalls_ms(r.of_phase(phase_name))),
        of=of,
    )


def _stalls_ms(phase: PhaseStats) -> list[float]:
    return [1e3 * ratio(layer.stall_s, phase.passes) for layer in phase.layers]


def _most(values: Iterable[float]) -> float:
    return max((value for value in values if is_number(value)), default=0.0)
