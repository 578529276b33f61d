"""Which tokens of a trace share a pass: those of a prompt, and one of each sequence that is being generated."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from promoe.training.routing_traces import RoutingTrace


class Pass(NamedTuple):
    """Rows of the trace that go through the model together."""

    phase: Literal["prefill", "decode"]
    rows: list[int]


def passes(trace: RoutingTrace, batch: int) -> Iterator[Pass]:
    """All passes of a trace, as with continuous batching: a sequence that ends makes room for the next one.

    A prompt is a pass of its own, before its sequence takes its place. Tokens that the trace does not know to be a prompt's are
    generated. Towards the end there may be fewer than `batch` sequences left.

    Args:
        trace: its prompts come in their order.
        batch: sequences that are generated at a time.
    """
    waiting = deque(zip(trace.prompt_starts.tolist(), trace.prompt_lengths.tolist(), strict=True))
    places: list[deque[int]] = []
    while waiting or places:
        while waiting and len(places) < batch:
            start, length = waiting.popleft()
            prompt = 0 if trace.generated is None else int(np.count_nonzero(~trace.generated[start : start + length]))
            if prompt:
                yield Pass("prefill", list(range(start, start + prompt)))
            if prompt < length:
                places.append(deque(range(start + prompt, start + length)))
        if places:
            yield Pass("decode", [place.popleft() for place in places])
            places = [place for place in places if place]
