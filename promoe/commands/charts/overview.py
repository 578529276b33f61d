"""Charts in which all runs of a report are beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from promoe.commands.charts.parts import NEEDS_AXIS, TRAFFIC_AXIS, needs, traffic, write_needs, write_traffic
from promoe.commands.charts.stacked_bars import Rows, Series, stacked_rows
from promoe.stats.run import Run
from promoe.units import format_megabytes, format_ms, format_seconds, format_share, is_number


def overview(runs: Sequence[Run]) -> Iterator[str]:
    """Draw time per token, time to the first token (if known), bytes by cause, and where needed experts were."""
    if any(is_number(run.time_per_token_s) for run in runs):
        yield _decode_time(runs)
    if any(is_number(run.time_to_first_s) for run in runs):
        yield _time_chart(runs, "prefill", "Time to the first token", _time_rows(runs, "prefill"), "TTFT (ms)")
    if runs := [run for run in runs if run.phase.layer_visits]:
        yield from _traffic_and_needs(runs)


def _traffic_and_needs(runs: Sequence[Run]) -> Iterator[str]:
    names, phases = [run.name for run in runs], [run.phase for run in runs]
    yield stacked_rows(
        "Bytes moved per token, by cause",
        "What the link carried; hatched: moved in vain.",
        Rows(names, [format_megabytes(phase.bytes_per_token) for phase in phases]),
        traffic(phases, [phase.tokens for phase in phases]),
        TRAFFIC_AXIS,
        write_traffic,
    )
    yield stacked_rows(
        "Where needed experts were",
        "Hit rate is the first part, ready rate (the number) the first two.",
        Rows(names, [format_share(phase.ready_rate) for phase in phases]),
        needs(phases),
        NEEDS_AXIS,
        write_needs,
        top=100,
    )


def _decode_time(runs: Sequence[Run]) -> str:
    rows = _time_rows(runs, "decode")._replace(
        marks=[run.bound_s * 1e3 if run.bound_s else None for run in runs],
        mark_label="bound",
        intervals=[(i[0] * 1e3, i[1] * 1e3) if (i := run.tpot_interval_s) else None for run in runs],
    )
    return _time_chart(runs, "decode", "Time per output token", rows, "TPOT (ms per token)")


def _time_rows(runs: Sequence[Run], phase: str) -> Rows:
    times_s = [run.time_per_token_s if phase == "decode" else run.time_to_first_s for run in runs]
    return Rows([run.name for run in runs], [format_ms(time_s) for time_s in times_s])


def _time_chart(runs: Sequence[Run], phase: str, title: str, rows: Rows, axis_label: str) -> str:
    parts = [run.split(phase) for run in runs]
    series = [
        Series("compute", "compute", [compute_s * 1e3 for compute_s, _ in parts]),
        Series("stall", "stall: compute waited for experts", [stall_s * 1e3 for _, stall_s in parts]),
    ]
    return stacked_rows(
        title, "Shorter is better.", rows, series, axis_label, lambda value: format_seconds(value / 1e3)
    )
