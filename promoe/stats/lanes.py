"""Where the time of one forward pass goes: computing, waiting, transfers, read from a timeline.

Knows spans and seconds; drawing is `lanes_figure`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from promoe.errors import ConfigError
from promoe.stats.tracing import COMPUTE, PASS, PREDICTOR, STALL, Span


class Work(NamedTuple):
    """Something of one MoE layer, in seconds since the pass began."""

    layer: int | None
    """None: of no layer."""
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Seconds."""
        return self.end_s - self.start_s


class Transfer(NamedTuple):
    """One chunk of an expert on its way, from when its reader took the order until it was there."""

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
        num_tokens: of all its sequences, without padding.
        duration_s: seconds.
        visits: the experts' forwards, one per MoE layer, waiting included.
        waits: when computing stood still for missing experts.
        predictions: when a predictor computed; beside the pass, or in it.
        transfers: chunks under way during the pass, also those of prefetch for later.
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
        """Seconds of all else: attention, gates, norms, head."""
        return self.duration_s - self.experts_s - self.stall_s

    @property
    def readers(self) -> list[str]:
        """Who fetched, in order."""
        # A longer name has a higher number.
        return sorted({transfer.reader for transfer in self.transfers}, key=lambda reader: (len(reader), reader))

    def fetching_s(self, cause: str) -> float:
        """Seconds in which at least one transfer of that cause was under way."""
        total_s, until_s = 0.0, 0.0
        for one in sorted((t for t in self.transfers if t.cause == cause), key=lambda t: t.start_s):
            total_s += max(0.0, one.end_s - max(one.start_s, until_s))
            until_s = max(until_s, one.end_s)
        return total_s


def lanes_of(spans: Iterable[Span]) -> list[Lanes]:
    """The passes of a timeline (`Tracer.spans()`), in order.

    Of a model that one thread at a time uses: passes that overlap are each given all that happened meanwhile.
    """
    spans = list(spans)
    passes = sorted((span for span in spans if span.lane == PASS), key=lambda span: span.start_s)
    return [_during(one, spans) for one in passes]


def median_pass(passes: Iterable[Lanes], phase: str = "decode") -> Lanes:
    """The pass of that phase that took the median time, of an even number the longer one: an ordinary one to look at.

    Raises:
        ConfigError: there is none.
    """
    found = sorted((one for one in passes if one.phase == phase), key=lambda one: one.duration_s)
    if not found:
        raise ConfigError(f"The timeline has no {phase} pass. Generate with the model while it is recorded.")
    return found[len(found) // 2]


def median_token(spans: Iterable[Span]) -> Lanes | None:
    """The decode pass of a timeline that took the median time; None without any.

    The same as `median_pass(lanes_of(spans))`, without looking at all that belongs to the other passes. The first one is left
    out if there are others: of a timeline that keeps the latest events, its beginning may be lost.
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
