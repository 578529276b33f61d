"""Prints llama.cpp's times over those of this library's systems with as many bits per weight."""

from __future__ import annotations

from promoe.commands.bench.markdown import Column, markdown
from promoe.commands.bench.quantised import agreement, shown_ratio
from promoe.commands.bench.systems import BESIDE_GGUF
from promoe.commands.bench.table import Row, Table
from promoe.units import DASH


def llama_cpp_lines(table: Table) -> list[str]:
    """Return a table for each of this library's systems, with what it means; nothing if llama.cpp gave no answers."""
    rows = [row for row in table.rows if row.answers and row.system.is_llama_cpp]
    if not rows:
        return []
    ours = [row for row in table.rows if row.answers and row.system.is_ours]
    what = "TTFT" if table.task.reads else "TPOT"
    columns = [
        Column("llama.cpp", lambda row: row.system.name),
        *(_beside(one, table, what) for one in ours),
        Column("first tokens as", _compared),
    ]
    return [
        "",
        f"llama.cpp's {what} over that of this library's systems with as many bits per weight: medians of the ratios, prompt "
        "by prompt, and 95% intervals. Its products round otherwise, so its tokens are not verified. The last column counts "
        "them before an answer first differs: from that of this library with the same file in RAM, if that was asked for, else "
        "from that of the unmodified model.",
        "",
        *markdown(columns, rows),
    ]


def _beside(ours: Row, table: Table, what: str) -> Column:
    def cell(row: Row) -> str:
        forms = BESIDE_GGUF.get(row.system.experts, (row.system.experts,))
        return shown_ratio(table.speedup(row, ours) if ours.system.experts in forms else None)

    return Column(f"{what} / {ours.system.name}", cell)


def _compared(row: Row) -> str:
    return DASH if row.same_as is None else f"{agreement(row)} as {row.same_as}"
