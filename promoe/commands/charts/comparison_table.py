"""The tables that compare runs, as HTML: for two runs a line per quantity, which fits a phone; for more, a line per run."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from promoe.stats.run import Run
from promoe.stats.run_table import Column, change, columns_for
from promoe.stats.words import BOUND_TOLERANCE
from promoe.units import is_number

_JUDGED = {True: ("good", "better"), False: ("bad", "worse"), None: ("", "")}


def difference_table(runs: Sequence[Run], baseline: Run) -> str:
    """Return a table with a line per quantity: the baseline's, the other run's, and what changed."""
    before, after = baseline, next(run for run in runs if run is not baseline)
    lines = []
    for column in columns_for(runs):
        if column.head == "speed":
            continue
        found = change(column, before, after)
        css, word = _JUDGED[found.better]
        note = f"<small>{word}</small>" if word else ""
        cells = "".join(_cell(column, run, baseline) for run in (before, after))
        lines.append(
            f'<tr><th scope="row" title="{escape(column.meaning)}">{escape(column.head)} <small>{escape(column.unit)}</small>'
            f'</th>{cells}<td class="{css}">{escape(found.text)}{note}</td></tr>'
        )
    heads = "".join(f'<th scope="col">{escape(text)}</th>' for text in (before.name, after.name, "change"))
    return (
        '<div class="card scroll difference" role="region" aria-label="The two runs, quantity by quantity" tabindex="0">'
        f'<table><thead><tr><th scope="col"></th>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )


def runs_table(runs: Sequence[Run], baseline: Run) -> str:
    """Return a table with a line per run and a column per quantity."""
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
        '<div class="card scroll many" role="region" aria-label="The runs, quantity by quantity" tabindex="0">'
        '<table><thead><tr><th scope="col">run<small></small></th>'
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
