"""A comparison of systems that are all open in this process, whose memory is not limited."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from promoe.commands.bench.messages import Opening
from promoe.commands.bench.round import Round
from promoe.commands.bench.served import Served
from promoe.commands.bench.table import Table
from promoe.commands.bench.tasks import Reference


def compare(
    resident: Served | None, reference: Reference, openings: Sequence[Opening], timeline: Path | None = None
) -> Table:
    """Measure systems on the task of a reference.

    Args:
        resident: the unmodified model; None: it does not fit.
        reference: the answers that every system has to give.
        openings: this library's systems, all with the same cache.
        timeline: file for a timeline of the last system, which answers the first measured prompt once more.

    Raises:
        TokensDifferError: a system's tokens are not the reference's. Nothing is reported of such a comparison.
    """
    with ExitStack() as stack:
        opened = {} if resident is None else {resident.system.name: resident}
        for opening in openings:
            last = opened[opening.system.name] = Served(opening)
            stack.callback(last.close)
        systems = [served.system for served in opened.values()]
        comparison = Round(systems, [reference], last.sizes(), str(openings[0].cache))
        (table,) = comparison.measure(opened, last.bandwidth)
        if timeline is not None:
            with last.handle.trace(timeline):
                last.answer(reference.task.prompts[1])
        return table
