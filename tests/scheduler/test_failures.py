"""Cases worked by hand: failed fetches, and leases that are no longer valid."""

from __future__ import annotations

import pytest

from promoe.scheduler import ExpertKey

from .by_hand import certain, driven, fetch, finish, names


def test_a_failed_chunk_fails_its_visit_and_the_next_visit_retries() -> None:
    run = driven(num_chunks=2)
    opened = run.begin(0, [1, 2])
    run.admit(opened)
    first, *others = run.issue(99)
    run.fail(first)
    assert opened.visit.failed() == [1]
    assert run.issue(99) == []  # not behind the visit's back
    finish(run, others)  # among them the failed expert's other chunk
    assert opened.visit.ready() == [2]
    run.close(opened)
    again = run.begin(0, [1])
    run.admit(again)
    assert again.visit.failed() == []
    leases = run.issue(99)
    assert names(leases) == [(0, 1, 0), (0, 1, 1)]
    finish(run, leases)
    assert again.visit.ready() == [1]
    assert run.tally.failures == {"demand": 1}


def test_a_failure_reaches_every_visit_that_pinned_the_expert() -> None:
    run = driven(num_chunks=1)
    first, second = run.begin(0, [1]), run.begin(0, [1, 2])
    run.admit(first)
    run.admit(second)
    (lease, _) = run.issue(99)
    run.fail(lease)
    assert (first.visit.failed(), second.visit.failed()) == ([1], [1])
    run.close(first)
    assert second.visit.failed() == [1]
    run.close(second)
    assert run.scheduler.failures == set()


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_neither_hint_nor_forecast_retries_what_a_visit_is_told_has_failed(num_chunks: int) -> None:
    run = driven(num_chunks=num_chunks)
    opened = run.begin(0, [1])
    run.admit(opened)
    run.hint(0, [1])  # another thread's gate
    (lease,) = run.issue(1)
    run.fail(lease)
    assert run.issue(99) == []
    run.begin(0, [2])
    run.forecast(2, 0, certain(1))
    assert run.issue(99) == []
    run.warm([ExpertKey(0, 1)])
    assert run.issue(99) == []
    assert opened.visit.failed() == [1]


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_a_failed_speculation_is_not_retried_before_demand(num_chunks: int) -> None:
    run = driven(num_chunks=num_chunks, eviction="lru")
    run.forecast(1, 0, certain(5))
    (lease,) = run.issue(1)
    run.fail(lease)
    assert run.issue(99) == []  # the same forecast
    run.forecast(1, 0, certain(5))
    assert run.issue(99) == []  # a new one
    run.hint(0, [5])
    assert run.issue(99) == []  # a hint, which no visit may follow
    opened = run.begin(0, [5])
    run.admit(opened)
    leases = run.issue(99)
    assert len(leases) == num_chunks
    finish(run, leases)
    assert opened.visit.ready() == [5]
    assert run.tally.failures == {"prefetch": 1}
    # From here on it is like any other.
    run.close(opened)
    fetch(run, (1, 0), (1, 1), (1, 2), (1, 3))
    run.forecast(1, 0, certain(5))
    assert names(run.issue(1)) == [(0, 5, 0)]


def test_a_failure_of_an_abandoned_load_does_not_fail_its_successor() -> None:
    run = driven(num_chunks=2)
    first = run.begin(0, [1])
    run.admit(first)
    one, two = run.issue(99)
    run.fail(one)
    run.close(first)
    second = run.begin(0, [1])
    run.admit(second)
    assert run.issue(99) == []  # the slot still awaits the first load's other chunk
    run.fail(two)
    assert second.visit.failed() == []
    finish(run, run.issue(99))
    assert second.visit.ready() == [1]


def test_a_stale_lease_is_ignored_and_counted() -> None:
    run = driven(num_slots=1, num_chunks=1, strict=False)
    fetch(run, (0, 1))
    (old,) = run.returned
    fetch(run, (0, 2), (0, 1))
    assert run.returned[-1].slot == old.slot
    run.report_again(old, failed=False)
    run.report_again(old, failed=True)
    assert run.tally.stale == 2
    opened = run.begin(0, [3])
    run.admit(opened)
    (new,) = run.issue(99)
    assert new.slot == old.slot
    run.report_again(old._replace(key=new.key, code=new.code), failed=False)  # another generation of the same slot
    assert opened.visit.ready() == []
    run.complete(new)
    assert opened.visit.ready() == [3]


def test_a_stale_lease_is_an_error_in_strict_mode() -> None:
    run = driven(num_chunks=1)
    fetch(run, (0, 1))
    with pytest.raises(AssertionError, match="outdated lease"):
        run.scheduler.chunk_done(run.returned[0])


def test_a_chunk_reported_twice_does_not_pass_for_another() -> None:
    run = driven(num_chunks=2, strict=False)
    opened = run.begin(0, [1])
    run.admit(opened)
    first, second = run.issue(99)
    run.complete(first)
    run.report_again(first, failed=False)
    assert opened.visit.ready() == []
    run.complete(second)
    assert opened.visit.ready() == [1]
