"""Prints what `promoe bench` found, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from promoe.commands.bench.beside_llama_cpp import llama_cpp_lines
from promoe.commands.bench.markdown import Column, markdown
from promoe.commands.bench.quantised import quantised_lines
from promoe.commands.bench.table import Report, Row, Table
from promoe.commands.contention import Contention
from promoe.commands.measure import Estimate
from promoe.stats.run_table import COLUMNS
from promoe.stats.run_table import Column as RunColumn
from promoe.stats.text_report import baseline_of
from promoe.stats.words import BOUND_TOLERANCE
from promoe.transfer.cpu_contention import Taken
from promoe.units import (
    DASH,
    format_megabytes,
    format_memory,
    format_ms,
    format_number,
    format_percent,
    format_seconds,
    format_times,
    is_number,
    ratio,
)

# Quantities that are known of every system; this library counts the others.
_TIMES = ("TTFT", "TPOT", "speed")


def _interval(value: Estimate, count: int) -> str:
    if not is_number(value.value):
        return DASH
    text = format_ms(value.value)
    return f"{text} [{format_ms(value.low)}, {format_ms(value.high)}]" if count > 1 else text


def _times(time_s: float, bound_s: float | None) -> str:
    return DASH if bound_s is None else format_times(ratio(time_s, bound_s)).removesuffix("x")


def _memory(nbytes: int | None) -> str:
    return DASH if nbytes is None else f"{nbytes / 2**20:,.0f}"


_SYSTEM = Column("system", lambda r: r.system.name)
_SHARED = Column("x shared", lambda r: _times(r.tpot.value, r.tpot_shared_s))
_MEMORY = (
    Column("limited, MiB", lambda r: _memory(r.peak_limited_bytes)),
    Column("RSS, MiB", lambda r: _memory(r.peak_rss_bytes)),
)
_READ = (
    _SYSTEM,
    Column("TTFT, ms", lambda r: _interval(r.ttft, len(r.answers))),
    Column("bound, ms", lambda r: format_ms(r.ttft_bound_s)),
    Column("ratio", lambda r: _times(r.ttft.value, r.ttft_bound_s)),
    Column("hit, %", lambda r: DASH if r.prefill is None else format_percent(r.prefill.hit_rate)),
    Column("stall, ms", lambda r: DASH if r.prefill is None else format_ms(r.prefill.stall_per_pass_s)),
    Column("moved, MB", lambda r: DASH if r.prefill is None else _megabytes_per_pass(r)),
    *_MEMORY,
)


def _megabytes_per_pass(row: Row) -> str:
    assert row.prefill is not None
    return format_megabytes(ratio(row.prefill.bytes_total, row.prefill.passes))


def columns_of(table: Table) -> list[Column]:
    """Return the columns of a table: those of all reports, then what only `promoe bench` measures."""
    if table.task.reads:
        return list(_READ)
    runs = {run.name: run for run in table.runs()}
    baseline = baseline_of(list(runs.values()), None)

    def cell(column: RunColumn, row: Row) -> str:
        if row.stats is None and column.head not in _TIMES:
            return DASH
        return column.cell(runs[row.system.name], baseline)

    shown = [
        Column(f"{column.head}, {column.unit}" if column.unit else column.head, partial(cell, column))
        for column in COLUMNS
    ]
    return [_SYSTEM, *shown, _SHARED, *_MEMORY]


def report_lines(report: Report) -> Iterator[str]:
    """Return the lines of the whole report."""
    sizes = report.sizes
    experts = sum(sizes.num_experts)
    yield f"# promoe bench: {report.model}"
    yield ""
    yield (
        f"{experts} routed experts in {len(sizes.num_experts)} layers, {format_memory(sizes.experts_bytes)}; a token needs "
        f"{format_memory(sizes.token_bytes)} of them. All else takes {format_memory(sizes.other_bytes)}. "
        f"{report.options.dtype}, {report.threads} threads, experts over {report.link}."
    )
    yield (
        f"{report.options.pairs} prompts, the systems taking turns at each; medians, in brackets 95% intervals (of TPOT: "
        "of the comparison prompt by prompt)."
    )
    yield _memory_words(report)
    yield ""
    seen = [system for table in report.tables[:1] for system in (row.system for row in table.rows)]
    yield from (f"- `{system.name}`: {system.meaning}" for system in seen)
    for table in report.tables:
        yield ""
        yield from table_lines(table)


def _memory_words(report: Report) -> str:
    if report.not_limited is not None:
        return (
            f"Memory was not limited ({report.not_limited}): compare this library's systems only with each other, since the "
            "kernel may keep the files of others in memory."
        )
    return (
        "A control group limits the memory of each system but the unmodified model, page cache included. It has room for the "
        "slots, the rest of the model, what the experts of the longest prompt compute in one layer, what oneDNN keeps of that, "
        f"and {report.options.workspace}. `limited` is the peak of what counted against the limit, `RSS` of what the process "
        "had mapped, libraries included."
    )


def table_lines(table: Table) -> Iterator[str]:
    """Return the lines on one cache size and task: conditions, the table, and the ratios that matter."""
    limit = "" if table.limit_bytes is None else f", {format_memory(table.limit_bytes)} of memory"
    link = f"link {format_number(table.bandwidth_bytes_per_s / 1e6)} MB/s"
    yield f"## cache {table.cache}, {table.task.name}{limit}, {link}"
    yield ""
    if rows := [row for row in table.rows if row.answers]:
        yield from markdown(columns_of(table), rows)
    yield ""
    yield from (f"- `{row.system.name}`: {row.error}" for row in table.rows if row.error is not None)
    if table.contention is not None and not table.task.reads:
        yield f"- {_contention_words(table.contention, table.bandwidth_bytes_per_s)}"
    if table.prompt_compute_s is not None and table.task.reads:
        yield (
            f"- Computing alone takes {format_seconds(table.prompt_compute_s)} with everything in RAM, in the unmodified "
            "model or as this library runs its experts, whichever takes less: `bound` counts that."
        )
    if any(row.tpot_unmodified_s is not None for row in table.rows) and not table.task.reads:
        yield f"- {_packed_words(table)}"
    if table.taken is not None:
        yield f"- {_taken_words(table.taken)}"
    yield from (f"- {sentence}" for sentence in ratios(table))
    yield from (f"- {sentence}" for sentence in impossible(table))
    yield from quantised_lines(table)
    yield from llama_cpp_lines(table)


def _packed_words(table: Table) -> str:
    times = ", ".join(
        f"{row.system.name} {_times(row.tpot.value, row.tpot_unmodified_s)}"
        for row in table.rows
        if row.answers and row.tpot_unmodified_s is not None
    )
    return (
        "Experts are packed, and `bound` counts the time that computing takes with packed ones. TPOT over max(C, B / W) with "
        f"the unmodified model's C: {times}."
    )


def _contention_words(found: Contention, bandwidth: float) -> str:
    return (
        f"At once, computing takes {format_number(found.slowdown)} times as long, and reads reach "
        f"{format_number(found.bandwidth_bytes_per_s / 1e6)} of {format_number(bandwidth / 1e6)} MB/s: they share this "
        "machine's cores and memory. `x shared` is the time over the least possible with that counted in."
    )


def _taken_words(taken: Taken) -> str:
    words = f"Meanwhile {taken.describe()}"
    return words + (": everything is slower then. Measure again without them." if taken.much_by_others else ".")


def ratios(table: Table) -> list[str]:
    """Say every system's time over that of the default, or of this library's last system if the default is not there."""
    rows = [row for row in table.rows if row.answers]
    ours = [row for row in rows if row.system.is_ours]
    best = next((row for row in ours if row.system.name == "gate"), ours[-1] if ours else None)
    if best is None:
        return []
    speeds = {row.system.name: table.speedup(row, best) for row in rows if row is not best}
    found = [
        f"{name} / {best.system.name}: {format_times(speed.value)} [{format_times(speed.low)}, {format_times(speed.high)}]"
        for name, speed in speeds.items()
        if is_number(speed.value)
    ]
    what = "TTFT" if table.task.reads else "TPOT"
    return [f"{what} of others over that of `{best.system.name}`, per prompt: " + "; ".join(found)] if found else []


def impossible(table: Table) -> list[str]:
    """Say which times are below their bounds: something was measured wrong."""
    found = []
    for row in table.rows:
        time_s, bound_s = (row.ttft.value, row.ttft_bound_s) if table.task.reads else (row.tpot.value, row.tpot_bound_s)
        if bound_s is not None and is_number(time_s) and time_s < BOUND_TOLERANCE * bound_s:
            found.append(
                f"**MEASURED WRONG**: `{row.system.name}` took {format_seconds(time_s)}, less than the least possible "
                f"{format_seconds(bound_s)}: the link or the machine changed its speed meanwhile. Measure again."
            )
    return found
