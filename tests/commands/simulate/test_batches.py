from __future__ import annotations

from dataclasses import replace

import numpy as np

from promoe.commands.simulate.batches import Pass, passes
from promoe.training.routing_traces import RoutingTrace


def trace(*lengths: int, prompts: int | None = None) -> RoutingTrace:
    """Sequences of these lengths, of which the first `prompts` tokens were the prompt; None: unknown."""
    count = sum(lengths)
    found = RoutingTrace(np.zeros((count, 1, 1), dtype=np.int16), np.zeros(count, dtype=np.int64), np.array(lengths), 4)
    if prompts is None:
        return found
    return replace(found, generated=np.concatenate([np.arange(length) >= prompts for length in lengths]))


def decode(*rows: int) -> Pass:
    return Pass("decode", list(rows))


def test_one_sequence_after_the_other() -> None:
    assert list(passes(trace(2, 1), 1)) == [decode(0), decode(1), decode(2)]


def test_a_prompt_is_one_pass() -> None:
    found = list(passes(trace(4, 3, prompts=2), 1))
    assert found == [Pass("prefill", [0, 1]), decode(2), decode(3), Pass("prefill", [4, 5]), decode(6)]


def test_a_sequence_that_ends_makes_room_for_the_next() -> None:
    found = list(passes(trace(3, 1, 2), 2))
    assert found == [decode(0, 3), decode(1, 4), decode(2, 5)]
    found = list(passes(trace(4, 3, 3, prompts=2), 2))
    assert found[:3] == [Pass("prefill", [0, 1]), Pass("prefill", [4, 5]), decode(2, 6)]
    assert found[3:] == [Pass("prefill", [7, 8]), decode(3, 9)]


def test_a_sequence_that_is_only_a_prompt_takes_no_place() -> None:
    found = list(passes(trace(2, 3, prompts=2), 1))
    assert found == [Pass("prefill", [0, 1]), Pass("prefill", [2, 3]), decode(4)]


def test_every_token_is_in_one_pass() -> None:
    for batch in (1, 3, 50):
        rows = [row for one in passes(trace(5, 1, 7, 2, 9, prompts=3), batch) for row in one.rows]
        assert sorted(rows) == list(range(24))
