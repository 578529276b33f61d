from __future__ import annotations

import random

import pytest

from promoe.stats.over_time import MAX_STRETCHES, OverTime, Stretch
from promoe.stats.recorder import Recorder


def counted(passes: int, experts: int = 2) -> list[Stretch]:
    """Return the stretches of passes of which the i-th needs i experts, all of them expert 0."""
    needed = 0
    over_time = OverTime(lambda begun: Stretch(begun, needed, 0, 0, (needed, *[0] * (experts - 1))))
    for i in range(passes):
        over_time.pass_begins()
        needed += i
    return list(over_time.stretches())


def test_a_short_run_has_a_stretch_per_pass() -> None:
    assert counted(0) == []
    assert [(s.passes, s.needed, s.expert_counts) for s in counted(3)] == [
        (1, 0, (0, 0)),
        (1, 1, (1, 0)),
        (1, 2, (2, 0)),
    ]


def test_a_longer_run_has_longer_stretches_and_loses_nothing() -> None:
    for passes in range(MAX_STRETCHES - 1, 5 * MAX_STRETCHES):
        stretches = counted(passes)
        assert len(stretches) <= MAX_STRETCHES
        assert sum(s.passes for s in stretches) == passes
        assert sum(s.needed for s in stretches) == sum(range(passes)) == sum(s.expert_counts[0] for s in stretches)
        *whole, last = (s.passes for s in stretches)
        assert len(set(whole)) == 1
        assert last <= whole[0]
        assert len(stretches) >= MAX_STRETCHES // 2


def test_memory_is_bounded_whatever_the_length() -> None:
    over_time = OverTime(lambda begun: Stretch(begun, 0, 0, 0, (begun,)))
    for _ in range(20_000):
        over_time.pass_begins()
        assert len(over_time._closed) <= MAX_STRETCHES
    assert len(over_time.stretches()) <= MAX_STRETCHES


def test_asking_changes_nothing() -> None:
    over_time = OverTime(lambda begun: Stretch(begun, 2 * begun, 0, 0, ()))
    for _ in range(5):
        over_time.pass_begins()
        assert over_time.stretches() == over_time.stretches()
    assert [s.passes for s in over_time.stretches()] == [1] * 5


def test_the_recorder_counts_what_each_stretch_of_decode_needed() -> None:
    rng = random.Random(0)
    recorder = Recorder([4, 3], [1, 1])
    recorder.begin_pass("prefill", 7, 1)
    recorder.visit(0, range(4), 0, 0, 0.0)
    recorder.end_pass(1.0)
    truth = []
    for _ in range(10):
        recorder.begin_pass("decode", 1, 1)
        needed = [sorted(rng.sample(range(4), 2)), sorted(rng.sample(range(3), 2))]
        for layer, ids in enumerate(needed):
            recorder.visit(layer, ids, 1, 2, 0.0)
        recorder.end_pass(1.0)
        truth.append(tuple(int(e in needed[0]) for e in range(4)) + tuple(int(e in needed[1]) for e in range(3)))
    stretches = recorder.over_time()
    assert [s.expert_counts for s in stretches] == truth
    assert {(s.passes, s.needed, s.hits, s.ready) for s in stretches} == {(1, 4, 2, 4)}
    recorder.reset()
    assert recorder.over_time() == ()


def test_who_looks_often_joins_each_pair_once(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[int] = []
    plus = Stretch.plus
    monkeypatch.setattr(Stretch, "plus", lambda self, other: joined.append(self.passes) or plus(self, other))
    over_time = OverTime(lambda begun: Stretch(begun, begun, 0, 0, (begun,)))
    for _ in range(MAX_STRETCHES + 1):
        over_time.pass_begins()
    for _ in range(10):
        assert [s.passes for s in over_time.stretches()] == [2] * (MAX_STRETCHES // 2) + [1]
    assert len(joined) == MAX_STRETCHES // 2


def test_looking_changes_nothing_that_comes_later() -> None:
    alone, watched = (OverTime(lambda begun: Stretch(begun, begun, 0, 0, (begun,))) for _ in range(2))
    for _ in range(4 * MAX_STRETCHES):
        alone.pass_begins()
        watched.pass_begins()
        watched.stretches()
    assert watched.stretches() == alone.stretches()
