"""Finds in a timeline where the time of one forward pass went: computing, waiting, transfers.

It knows spans and seconds; `lanes_figure` draws them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from promoe.errors import ConfigError
from promoe.stats.tracing import COMPUTE, PASS, PREDICTOR, STALL, Span


class Work(NamedTuple):
    """Computing or waiting, in seconds since the pass began."""

    layer: int | None
    """The MoE layer; None: it belongs to none."""
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """How long it took, in seconds."""
        return self.end_s - self.start_s


class Transfer(NamedTuple):
    """The transfer of one chunk of an expert, from when its reader took the order until it had arrived."""

    reader: str
    """The lane of the thread that fetched it."""
    cause: str
    """"demand": a gate had chosen the expert. "prefetch": a forecast said that one would."""
    layer: int
    expert: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Lanes:
    """One forward pass. Times are in seconds since it began, and end with it.

    Attributes:
        phase: "prefill" or "decode".
        num_tokens: tokens of all its sequences, without padding.
        duration_s: how long it took, in seconds.
        visits: the experts' forwards, one per MoE layer, waiting included.
        waits: when computing waited for missing experts.
        predictions: when a predictor computed, beside the pass or in it.
        transfers: chunks that were transferred during the pass, including those prefetched for later.
    """

    phase: str
    num_tokens: int
    duration_s: float
    visits: Sequence[Work]
    waits: Sequence[Work]
    predictions: Sequence[Work]
    transfers: Sequence[Transfer]

    @property
    def stall_s(self) -> float:
        """Seconds of waiting."""
        return sum(wait.duration_s for wait in self.waits)

    @property
    def experts_s(self) -> float:
        """Seconds of computing experts, and of deciding what to fetch for them."""
        return sum(visit.duration_s for visit in self.visits) - self.stall_s

    @property
    def rest_s(self) -> float:
        """Seconds of everything else: attention, gates, norms, head."""
        return self.duration_s - self.experts_s - self.stall_s

    @property
    def readers(self) -> list[str]:
        """The lanes that fetched, in order."""
        # A longer name has a higher number.
        return sorted({transfer.reader for transfer in self.transfers}, key=lambda reader: (len(reader), reader))

    def fetching_s(self, cause: str) -> float:
        """Return the seconds in which at least one transfer of that cause was in progress."""
        total_s, until_s = 0.0, 0.0
        for one in sorted((t for t in self.transfers if t.cause == cause), key=lambda t: t.start_s):
            total_s += max(0.0, one.end_s - max(one.start_s, until_s))
            until_s = max(until_s, one.end_s)
        return total_s


def lanes_of(spans: Iterable[Span]) -> list[Lanes]:
    """Return the passes of a timeline (`Tracer.spans()`), in order.

    One thread at a time should use the model: if passes overlap, each gets all that happened meanwhile.
    """
    spans = list(spans)
    passes = sorted((span for span in spans if span.lane == PASS), key=lambda span: span.start_s)
    return [_during(one, spans) for one in passes]


def median_pass(passes: Iterable[Lanes], phase: str = "decode") -> Lanes:
    """Return the pass of a phase that took the median time (of an even number, the longer one): an ordinary pass.

    Raises:
        ConfigError: there is no pass of that phase.
    """
    found = sorted((one for one in passes if one.phase == phase), key=lambda one: one.duration_s)
    if not found:
        raise ConfigError(f"The timeline has no {phase} pass. Generate with the model while it is recorded.")
    return found[len(found) // 2]


def median_token(spans: Iterable[Span]) -> Lanes | None:
    """Return the decode pass of a timeline that took the median time; None without any.

    This is faster than `median_pass(lanes_of(spans))`, which looks at the spans of all passes. The first pass is left
    out if there are others: a timeline that keeps the latest spans may have lost the beginning of it.
    """
    spans = list(spans)
    passes = [span for span in spans if span.lane == PASS and span.args["phase"] == "decode"]
    ordered = sorted(passes[1:] or passes, key=lambda span: span.end_s - span.start_s)
    return _during(ordered[len(ordered) // 2], spans) if ordered else None


def _during(whole: Span, spans: Sequence[Span]) -> Lanes:
    def work(lane: str) -> list[Work]:
        return [Work(span.args.get("layer"), *_clipped(span, whole)) for span in inside if span.lane == lane]

    inside = sorted(
        (span for span in spans if span.start_s < whole.end_s and span.end_s > whole.start_s),
        key=lambda span: span.start_s,
    )
    transfers = [
        Transfer(span.lane, span.args["cause"], span.args["layer"], span.args["expert"], *_clipped(span, whole))
        for span in inside
        if "cause" in span.args
    ]
    return Lanes(
        phase=whole.args["phase"],
        num_tokens=whole.args["tokens"],
        duration_s=whole.end_s - whole.start_s,
        visits=work(COMPUTE),
        waits=work(STALL),
        predictions=work(PREDICTOR),
        transfers=transfers,
    )


def _clipped(span: Span, whole: Span) -> tuple[float, float]:
    return max(span.start_s, whole.start_s) - whole.start_s, min(span.end_s, whole.end_s) - whole.start_s
