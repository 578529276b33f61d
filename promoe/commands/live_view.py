"""The panel of `promoe run --live`: the figures of an answer now, and so far."""

from __future__ import annotations

import io
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from promoe.runtime.slot_handle import SlotHandle
from promoe.stats.counts import Counts
from promoe.stats.totals import Stats
from promoe.transfer.links.metered import MeteredLink
from promoe.units import format_megabytes, format_number, format_share, is_number, ratio

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

WINDOW = 20  # readings that "now" looks back: about two seconds, as a status is drawn ten times per second
PANEL_LINES = 6
PANEL_COLUMNS = 72
SHARES = (("hit rate", "hit_rate"), ("link use", "link_use"), ("ready rate", "ready_rate"), ("stall", "stall_share"))


class Reading(NamedTuple):
    """The counters at one moment."""

    at_s: float
    tokens: int
    busy_s: float
    counts: Counts


class Figures(NamedTuple):
    """What happened between two readings; nan if there was nothing to count."""

    tokens_per_s: float
    hit_rate: float
    """Share (0..1) of needed experts that were resident at gate time."""
    ready_rate: float
    """Share of needed experts that had arrived when the layer computed them."""
    link_use: float
    """Share of the time in which the link moved something."""
    stall_share: float
    """Share of the time in which compute waited for weights."""
    bytes_per_token: float
    demand_share: float
    """Share of the bytes moved that a gate had asked for."""

    @classmethod
    def between(cls, before: Reading, after: Reading) -> Figures:
        """Return the figures of the time between two readings of one run."""
        seconds, tokens = after.at_s - before.at_s, after.tokens - before.tokens
        then, now = before.counts, after.counts
        needed, moved = now.needed - then.needed, now.bytes_total - then.bytes_total
        return cls(
            tokens_per_s=ratio(tokens, seconds),
            hit_rate=ratio(now.hits - then.hits, needed),
            ready_rate=ratio(now.ready - then.ready, needed),
            link_use=ratio(after.busy_s - before.busy_s, seconds),
            stall_share=ratio(now.stall_s - then.stall_s, seconds),
            bytes_per_token=ratio(moved, tokens),
            demand_share=ratio(now.bytes_demand - then.bytes_demand, moved),
        )


class Panel:
    """The status of one answer. `begin` is called at its first token; after that `text` may be called at any time.

    Args:
        stats: returns what was counted up to now.
        busy_s: returns the seconds in which the link has moved something; nan without a link.
        clock: returns seconds; for tests.
    """

    def __init__(
        self, stats: Callable[[], Stats], busy_s: Callable[[], float], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._stats = stats
        self._busy_s = busy_s
        self._clock = clock
        self._window: deque[Reading] = deque(maxlen=WINDOW)

    def begin(self) -> None:
        """Begin to count: the first token has come. Only the total of bytes includes what was before."""
        self._first = self._read(1)
        self._window.append(self._first)

    def text(self, tokens: int, room: tuple[int, int]) -> str:
        """Return the panel after `tokens` tokens; a single line where `room` (columns, lines) is small."""
        reading = self._read(tokens)
        self._window.append(reading)
        now, so_far = Figures.between(self._window[0], reading), Figures.between(self._first, reading)
        columns, lines = room
        if lines < PANEL_LINES or columns < PANEL_COLUMNS:
            return one_line(tokens, now, columns)
        return drawn(tokens, now, so_far, reading.counts, min(columns, 100)) or plain(
            tokens, now, so_far, reading.counts
        )

    def _read(self, tokens: int) -> Reading:
        return Reading(self._clock(), tokens, self._busy_s(), self._stats().total)


@contextmanager
def metered(handle: Any) -> Iterator[Callable[[], float]]:
    """Yield what returns the seconds in which the link of a model has moved something; nan without a link."""
    if not isinstance(handle, SlotHandle):
        yield no_link
        return
    engine = handle.runtime.engine
    link = engine.link
    engine.link = meter = MeteredLink(link)
    try:
        yield meter.busy_s
    finally:
        engine.link = link


def no_link() -> float:
    """Return nan: nothing is moved."""
    return math.nan


def one_line(tokens: int, now: Figures, columns: int) -> str:
    """Return the figures of now that are known and fit: `12 tokens, 8.31 tokens/s, hit rate 46.8%, ...`."""
    line = _speed(tokens, now)
    for label, name in SHARES:
        more = f"{line}, {label} {_share(now, name)}"
        if is_number(getattr(now, name)) and len(more) <= columns:
            line = more
    return line


def plain(tokens: int, now: Figures, so_far: Figures, counts: Counts) -> str:
    """Return the panel without rich."""
    heads = f"{'':<10}{'now':>8}{'so far':>8}"
    lines = [_speed(tokens, now), f"  {heads}      {heads}"]
    for pair in (SHARES[:2], SHARES[2:]):
        cells = [f"{label:<10}{_share(now, name):>8}{_share(so_far, name):>8}" for label, name in pair]
        lines.append("  " + "      ".join(cells))
    return "\n".join([*lines, f"  {_moved(now, so_far, counts)}"])


def drawn(tokens: int, now: Figures, so_far: Figures, counts: Counts, columns: int) -> str | None:
    """Return the panel drawn by rich; None if that is not installed."""
    try:
        from rich.console import Console, Group
        from rich.panel import Panel as Frame
        from rich.text import Text
    except ImportError:
        return None
    sent = io.StringIO()
    console = Console(file=sent, force_terminal=True, width=columns, height=PANEL_LINES, highlight=False)
    body = Group(_table(now, so_far), Text(_moved(now, so_far, counts), overflow="ellipsis", no_wrap=True))
    console.print(
        Frame(body, title=_speed(tokens, now), title_align="left", border_style="dim", padding=(0, 1)), end=""
    )
    return sent.getvalue()


def _table(now: Figures, so_far: Figures) -> Table:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table.grid(padding=(0, 1), expand=True)
    for _ in range(2):
        table.add_column(no_wrap=True)
        table.add_column(ratio=1, min_width=4)
        table.add_column(justify="right", width=6)
        table.add_column(justify="right", width=8, style="dim")
        table.add_column(width=1)
    heads = ["", "", "now", "so far", ""]
    table.add_row(*heads, *heads, style="dim")
    for pair in (SHARES[:2], SHARES[2:]):
        row: list[RenderableType] = []
        for label, name in pair:
            share = getattr(now, name)
            done = min(1.0, share) if is_number(share) else 0.0
            color = "red" if name == "stall_share" else "cyan"
            bar = ProgressBar(1.0, done, style="bright_black", complete_style=color, finished_style=color)
            row += [label, bar, _share(now, name), _share(so_far, name), ""]
        table.add_row(*row)
    return table


def _speed(tokens: int, now: Figures) -> str:
    return f"{tokens} tokens, {format_number(now.tokens_per_s)} tokens/s"


def _share(figures: Figures, name: str) -> str:
    return format_share(getattr(figures, name))


def _moved(now: Figures, so_far: Figures, counts: Counts) -> str:
    return (
        f"moved {format_megabytes(now.bytes_per_token)} MB per token now, {format_megabytes(so_far.bytes_per_token)} so far "
        f"({format_share(1 - so_far.demand_share)} prefetched), {format_megabytes(counts.bytes_total)} in all"
    )
