"""Prints how quantised systems compare with the same systems in 16 bits, at equal memory."""

from __future__ import annotations

from functools import partial

from promoe.commands.bench.markdown import Column, markdown
from promoe.commands.bench.systems import EXACT, FROM_GGUF, QUANTISED, RESIDENT
from promoe.commands.bench.table import Row, Table
from promoe.commands.measure import Estimate
from promoe.runtime.sizes import slots_per_layer
from promoe.units import DASH, format_number, format_times, is_number


def quantised_lines(table: Table) -> list[str]:
    """Return a table of the quantised systems with what it means; nothing if there are none."""
    rows = [row for row in table.rows if row.answers and row.system.is_quantised and not row.system.is_llama_cpp]
    if not rows:
        return []
    what = "TTFT" if table.task.reads else "TPOT"
    columns = (
        Column("quantised", lambda row: row.system.name),
        Column(f"{what} / in 16 bits", lambda row: shown_ratio(table.over_16_bits(row))),
        Column(f"{what} / {RESIDENT}", lambda row: shown_ratio(table.over_resident(row))),
        Column("tokens as", lambda row: row.system.reference),
        Column("first tokens as in 16 bits", agreement),
    )
    same = "as many slots per layer" if slots_per_layer(table.cache) is not None else "as many bytes of slots"
    return [
        "",
        f"Quantised systems have {same} as the others. Their times are set against the same system in 16 bits and against "
        "the unmodified model in RAM: medians of the ratios, prompt by prompt, and 95% intervals. Their tokens are those of "
        "`tokens as`, in which all experts are in slots in the same form: its time, or that of a quicker system of the form, "
        "is the C of their bounds. The last column counts the tokens before an answer first differs from that of the "
        "unmodified model, which all other systems are compared with.",
        "",
        *markdown(columns, rows),
        *_rates(table),
    ]


def _rates(table: Table) -> list[str]:
    """Return a table of tokens per second: a row for each system, a column for each form."""
    rows = [row for row in table.rows if row.answers and is_number(row.tpot.value) and not row.system.is_llama_cpp]
    by_system: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_system.setdefault(row.system.in_16_bits, {})[row.system.experts] = row
    if not by_system:
        return []

    def rate(form: str, row: Row) -> str:
        found = by_system[row.system.in_16_bits].get(form)
        return DASH if found is None else format_number(1 / found.tpot.value)

    columns = [Column("tokens/s", lambda row: row.system.in_16_bits)]
    columns += [
        Column("16 bits" if form == EXACT else form, partial(rate, form)) for form in (EXACT, *QUANTISED, *FROM_GGUF)
    ]
    return ["", *markdown(columns, [next(iter(forms.values())) for forms in by_system.values()])]


def shown_ratio(found: Estimate | None) -> str:
    """Show a ratio of times with its interval."""
    if found is None or not is_number(found.value):
        return DASH
    return f"{format_times(found.value)} [{format_times(found.low)}, {format_times(found.high)}]"


def agreement(row: Row) -> str:
    """Show how many tokens are those that they were compared with."""
    return DASH if row.num_same is None else f"{row.num_same} of {row.num_tokens}"
