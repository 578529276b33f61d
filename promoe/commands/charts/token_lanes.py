"""The lanes of one pass: computing, waiting, what each reader of the link fetched, when the predictor ran."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from promoe.stats.lanes import Lanes, Transfer, Work
from promoe.stats.tracing import LINK_IN_FORWARD
from promoe.units import format_seconds


class Bar(NamedTuple):
    """One bar: its css class, its hover text, and its begin and end in seconds since the pass began."""

    css: str
    tip: str
    start_s: float
    end_s: float


class Lane(NamedTuple):
    """A row: its name, what a screen reader says about it, and its bars. Later bars cover earlier ones."""

    name: str
    spoken: str
    bars: Sequence[Bar]


CSS_OF_CAUSE = {"demand": "demand", "prefetch": "arrived"}


def lanes_of(token: Lanes) -> Iterator[Lane]:
    """Yield the lanes of a pass, from top to bottom."""
    computing = [Bar("rest", f"all else: {format_seconds(token.rest_s)} in all", 0.0, token.duration_s)]
    computing += [_bar("compute", f"layer {v.layer}: experts, waiting included", v) for v in token.visits]
    # Waiting happens inside visits: computing stands still there.
    computing += [_bar("gap", f"layer {w.layer}: waiting", w) for w in token.waits]
    yield Lane(
        "computing", f"experts {format_seconds(token.experts_s)}, all else {format_seconds(token.rest_s)}", computing
    )
    waits = [_bar("waited", f"layer {w.layer}: waiting for experts", w) for w in token.waits]
    yield Lane("waiting", f"{len(waits)} times, {format_seconds(token.stall_s)}", waits)
    for number, reader in enumerate(token.readers, start=1):
        name = "link, in forward" if reader == LINK_IN_FORWARD else f"link, reader {number}"
        bars = [_transfer_bar(chunks) for chunks in _experts(t for t in token.transfers if t.reader == reader)]
        yield Lane(name, f"{len(bars)} experts or parts of them", bars)
    if token.predictions:
        bars = [_bar("predict", f"predictor, from layer {p.layer}" if p.layer is not None else "predictor", p)
                for p in token.predictions]  # fmt: skip
        yield Lane(
            "predictor", f"{len(bars)} times, {format_seconds(sum(p.duration_s for p in token.predictions))}", bars
        )


def _bar(css: str, what: str, work: Work) -> Bar:
    return Bar(css, f"{what}\n{format_seconds(work.duration_s)}", work.start_s, work.end_s)


def _experts(transfers: Iterable[Transfer]) -> Iterable[list[Transfer]]:
    """Join the chunks of one expert that followed each other."""
    chunks: list[Transfer] = []
    for one in transfers:
        if chunks and (one.cause, one.layer, one.expert) != (chunks[0].cause, chunks[0].layer, chunks[0].expert):
            yield chunks
            chunks = []
        chunks.append(one)
    if chunks:
        yield chunks


def _transfer_bar(chunks: Sequence[Transfer]) -> Bar:
    first, last = chunks[0], chunks[-1]
    parts = f", {len(chunks)} chunks" if len(chunks) > 1 else ""
    tip = f"layer {first.layer}, expert {first.expert}: {first.cause}{parts}\n{format_seconds(last.end_s - first.start_s)}"
    return Bar(CSS_OF_CAUSE.get(first.cause, "pending"), tip, first.start_s, last.end_s)
