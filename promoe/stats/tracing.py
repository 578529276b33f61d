"""A timeline of a run as Chrome-trace JSON, which https://ui.perfetto.dev and chrome://tracing open.

The engine holds `tracer: Tracer | None`; without one, tracing costs a comparison with None. Times are seconds of one
monotonic clock (`time.perf_counter()`); the file begins at the earliest span.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from promoe.files import PathLike, write_atomically

PASS = "pass"
COMPUTE = "compute"
STALL = "wait (stall)"
PREDICTOR = "predictor"
_LINK_WORKER = "link worker "
_PID = 1

LINK_IN_FORWARD = f"{_LINK_WORKER}(in the forward)"
"""The lane of short copies, which the forward that needs them does itself."""

logger = logging.getLogger(__name__)


def link_worker(worker_idx: int) -> str:
    """Return the lane of a transfer worker."""
    return f"{_LINK_WORKER}{worker_idx}"


def latest_passes(title: str) -> Tracer:
    """Return a tracer that keeps the spans of the latest few dozen passes, in a few megabytes."""
    return Tracer(title, max_spans=20_000, latest=True)


class Span(NamedTuple):
    """Something that took from `start_s` to `end_s`."""

    lane: str
    name: str
    start_s: float
    end_s: float
    args: Mapping[str, Any]


class Tracer:
    """Collects spans from any thread, and writes them as one JSON file.

    Lanes are rows of the timeline: PASS, COMPUTE, STALL, `link_worker(n)`, PREDICTOR, or any other name. Spans of one
    lane may lie inside each other; where they overlap otherwise (several threads computing at once), the file gets a
    second row "compute (2)".

    Args:
        title: name of the process row, for example the model's.
        max_spans: limit on memory (about 300 bytes per span). Further ones are counted in `dropped`, not kept.
        latest: keep the latest spans instead of the first.
    """

    def __init__(self, title: str = "promoe", *, max_spans: int = 500_000, latest: bool = False) -> None:
        self.title = title
        self.max_spans = max_spans
        self.dropped = 0
        self._latest = latest
        self._spans: deque[Span] = deque(maxlen=max_spans if latest else None)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._spans)

    def span(self, lane: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """Record something that took from `start_s` to `end_s`; viewers show `args` (layer, expert, nbytes, ...)."""
        assert end_s >= start_s, f"span {name!r} in lane {lane!r} ends {start_s - end_s:.9f} s before it starts"
        with self._lock:
            full = len(self._spans) >= self.max_spans
            if not full or self._latest:
                self._spans.append(Span(lane, name, start_s, end_s, args))
            if full:
                self.dropped += 1

    def spans(self) -> list[Span]:
        """Return all spans so far, in the order in which they ended."""
        with self._lock:
            return list(self._spans)

    def write(self, path: PathLike) -> Path:
        """Write everything collected so far to `path` (whole or not at all) and return it. Tracing may go on.

        Raises:
            ConfigError: the file cannot be written; call `check_writable(path)` before a long run.
        """
        with self._lock:
            spans, dropped = list(self._spans), self.dropped
        if dropped:
            kept, lost = ("latest", "earlier") if self._latest else ("first", "later")
            logger.warning(
                "The timeline holds the %s %d events; %d %s ones were dropped.", kept, len(spans), dropped, lost
            )
        return write_atomically(path, self._pieces(spans, dropped))

    def _pieces(self, spans: list[Span], dropped: int) -> Iterator[str]:
        notes = {"events": str(len(spans)), "events_dropped": str(dropped)}
        yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(notes)},"traceEvents":[\n'
        for number, event in enumerate(_chrome_events(self.title, spans)):
            yield ",\n" * bool(number) + json.dumps(event, separators=(",", ":"), default=str)
        yield "\n]}\n"


def _chrome_events(title: str, spans: list[Span]) -> Iterator[dict[str, Any]]:
    # Ends are rounded to whole ns of the clock before subtracting: rounded differences could make neighbours overlap.
    origin_ns = _ns(min((span.start_s for span in spans), default=0.0))
    rows = _rows(spans)
    order = sorted({(span.lane, row) for span, row in rows}, key=_lane_order)
    tids = {lane_row: tid for tid, lane_row in enumerate(order, start=1)}

    yield {"ph": "M", "name": "process_name", "pid": _PID, "tid": 0, "ts": 0, "args": {"name": title}}
    for (lane, row), tid in tids.items():
        name = f"{lane} ({row + 1})" if row else lane
        yield {"ph": "M", "name": "thread_name", "pid": _PID, "tid": tid, "ts": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": _PID, "tid": tid, "ts": 0, "args": {"sort_index": tid}}
    for span, row in rows:
        start_ns, end_ns = _ns(span.start_s) - origin_ns, _ns(span.end_s) - origin_ns
        place = {"pid": _PID, "tid": tids[span.lane, row], "ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3}
        yield {"ph": "X", "name": span.name, "cat": _category(span.lane), **place, "args": dict(span.args)}


def _rows(spans: list[Span]) -> list[tuple[Span, int]]:
    """Sort spans by start, and give each the first row of its lane in which it nests or follows the others."""
    open_ends: dict[str, list[list[int]]] = {}
    result = []
    for span in sorted(spans, key=lambda s: (s.start_s, -s.end_s)):
        start_ns, end_ns = _ns(span.start_s), _ns(span.end_s)
        rows = open_ends.setdefault(span.lane, [])
        for row, ends in enumerate(rows):  # noqa: B007  (used after the loop)
            while ends and ends[-1] <= start_ns:
                ends.pop()
            if not ends or end_ns <= ends[-1]:
                break
        else:
            row = len(rows)
            rows.append([])
        rows[row].append(end_ns)
        result.append((span, row))
    return result


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _category(lane: str) -> str:
    return "link" if lane.startswith(_LINK_WORKER) else lane


def _lane_order(lane_row: tuple[str, int]) -> tuple[int, int, str, int]:
    lane, row = lane_row
    if lane.startswith(_LINK_WORKER) and lane.removeprefix(_LINK_WORKER).isdigit():
        return 3, int(lane.removeprefix(_LINK_WORKER)), lane, row
    fixed = {PASS: 0, COMPUTE: 1, STALL: 2, LINK_IN_FORWARD: 4, PREDICTOR: 5}
    return fixed.get(lane, 6), 0, lane, row
