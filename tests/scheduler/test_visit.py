"""A visit's grants: what may run, in which order, and that several visits cannot block each other."""

from __future__ import annotations

import pytest

from promoe.scheduler import PoolSpec, SchedulerConfig

from .driven import Driven


def driven(num_slots: int, num_chunks: int = 1, **switches: object) -> Driven:
    return Driven(
        SchedulerConfig(
            num_experts=[6, 6],
            chunk_bytes=[(10,) * num_chunks] * 2,
            pools=[PoolSpec(num_slots, (0, 1))],
            strict=True,
            **switches,  # type: ignore[arg-type]
        )
    )


def deliver(run: Driven) -> None:
    for lease in run.issue(99):
        run.complete(lease)


def test_of_each_kind_those_of_most_tokens_are_first() -> None:
    run = driven(5)
    run.begin(0, [4, 1]).visit.admit()
    deliver(run)
    run.begin(0, [4, 1]).visit.close()
    visit = run.begin(0, [5, 4, 3, 1]).visit
    visit.admit()
    assert visit.ready() == [4, 1]
    assert [lease.key.expert_idx for lease in run.issue(99)] == [5, 3]
    visit.close()


def test_needed_granted_ready_released() -> None:
    run = driven(4)
    opened = run.begin(0, [1, 2])
    visit = opened.visit
    assert not visit.finished
    assert not visit.holds_grants
    assert visit.ready() == []
    assert visit.admit() == 2
    assert visit.holds_grants
    assert visit.ready() == []
    deliver(run)
    assert visit.ready() == [1, 2]
    assert visit.slot(1) != visit.slot(2)
    run.run_group(opened, 1)
    assert visit.ready() == [2]
    assert not visit.finished
    run.run_group(opened)
    assert visit.finished
    assert not visit.holds_grants
    assert visit.admit() == 0


def test_experts_of_a_visit_are_distinct() -> None:
    with pytest.raises(AssertionError, match="distinct"):
        driven(4).scheduler.begin_visit(0, [1, 1])


def test_a_visit_that_needs_nothing_is_finished() -> None:
    run = driven(1)
    opened = run.begin(0, [])
    assert opened.visit.admit() == 0
    assert opened.visit.finished


def test_a_slot_is_told_only_to_the_visit_that_holds_it() -> None:
    run = driven(4)
    first, second = run.begin(0, [1]), run.begin(0, [1])
    run.admit(first)
    deliver(run)
    assert first.visit.slot(1) in range(4)
    with pytest.raises(AssertionError, match="expert 1 of layer 0 is not granted"):
        second.visit.slot(1)


def test_grants_stop_at_the_slots_and_go_on_after_a_release() -> None:
    run = driven(3)
    opened = run.begin(0, [0, 1, 2, 3, 4])
    assert run.admit(opened) == 3
    assert run.admit(opened) == 0
    deliver(run)
    run.run_group(opened, 2)
    assert run.admit(opened) == 2


def test_the_resident_are_granted_first() -> None:
    run = driven(2)
    before = run.begin(0, [4])
    run.admit(before)
    deliver(run)
    run.close(before)
    opened = run.begin(0, [0, 1, 4])
    run.admit(opened)
    assert opened.visit.ready() == [4]


def test_the_resident_are_granted_before_those_on_their_way() -> None:
    run = driven(3, num_chunks=2)
    run.hint(0, [4])
    deliver(run)
    run.hint(0, [5])
    run.complete(run.issue(1)[0])
    run.admit(run.begin(1, [1, 2]))
    opened = run.begin(0, [0, 5, 4])
    assert run.admit(opened) == 1  # the last pin of three
    assert opened.visit.ready() == [4]


def test_of_those_on_their_way_the_one_with_most_sent_is_finished_first() -> None:
    run = driven(6, num_chunks=3)
    for expert_idx, num_sent in ((1, 1), (2, 2), (3, 1)):
        run.hint(0, [expert_idx])
        run.issue(num_sent)
    run.admit(run.begin(0, [0, 1, 2, 3]))
    assert [lease.key.expert_idx for lease in run.issue(99)] == [2, 1, 1, 3, 3, 0, 0, 0]


def test_a_pin_of_another_visit_is_shared() -> None:
    run = driven(1)
    first, second = run.begin(0, [1]), run.begin(0, [1, 2])
    run.admit(first)
    assert run.admit(second) == 1  # expert 1: it takes no further slot
    deliver(run)
    assert first.visit.ready() == second.visit.ready() == [1]
    run.close(first)
    assert second.visit.ready() == [1]
    assert run.admit(second) == 0
    run.run_group(second)
    assert run.admit(second) == 1


def test_a_visit_without_a_grant_waits_and_is_served_in_the_end() -> None:
    run = driven(1)
    first, second = run.begin(0, [1]), run.begin(1, [2])
    run.admit(first)
    assert run.admit(second) == 0
    deliver(run)
    run.run_group(first)
    assert run.admit(second) == 1
    deliver(run)
    assert second.visit.ready() == [2]


def test_closing_gives_everything_back() -> None:
    run = driven(2)
    opened = run.begin(0, [1, 2, 3])
    run.admit(opened)
    opened.visit.close()
    opened.visit.close()
    assert opened.visit.finished
    assert run.issue(99) == []
    assert run.scheduler.caches[0].num_pinned == 0
    run.admit(run.begin(1, [1, 2]))
    assert len(run.issue(99)) == 2


def test_closing_with_transfers_in_flight_leaves_them_to_land() -> None:
    run = driven(2)
    opened = run.begin(0, [1])
    run.admit(opened)
    (lease,) = run.issue(99)
    run.close(opened)
    run.complete(lease)
    assert run.scheduler.is_resident(0, 1)


def test_a_failed_expert_is_told_and_never_ready() -> None:
    run = driven(2)
    opened = run.begin(0, [1, 2])
    run.admit(opened)
    run.fail(run.issue(1)[0])
    deliver(run)
    assert opened.visit.failed() == [1]
    assert opened.visit.ready() == [2]
    run.close(opened)
    assert opened.visit.failed() == []


def test_without_reordering_the_first_missing_ends_a_grant() -> None:
    run = driven(4, reorder=False)
    opened = run.begin(0, [3, 1, 2])
    grants = []
    while not opened.visit.finished:
        grants.append(run.admit(opened))
        assert run.admit(opened) == 0  # not while one is granted
        deliver(run)
        run.run_group(opened)
    assert grants == [1, 1, 1]


def begun_after(run: Driven, count: int) -> list[int]:
    """Return the experts of the first visit that can be begun once `count` more chunks have been sent and arrived."""
    for lease in run.issue(count):
        run.complete(lease)
    return run.visits[0].visit.begun()


def test_an_expert_can_be_begun_when_its_first_chunks_are_there() -> None:
    run = driven(4, num_chunks=3, first_chunks=(2, 2))
    run.admit(run.begin(0, [1, 2]))
    visit = run.visits[0].visit
    assert begun_after(run, 1) == []
    with pytest.raises(AssertionError, match="expert 1 of layer 0 is not there"):
        visit.slot(1)
    assert begun_after(run, 1) == [1]
    slot = visit.slot(1)
    assert begun_after(run, 1) == []
    assert visit.ready() == [1]
    assert visit.slot(1) == slot
    assert begun_after(run, 2) == [2]


def test_chunks_that_arrive_out_of_turn_do_not_pass_for_the_first() -> None:
    run = driven(4, num_chunks=3, first_chunks=(1, 1))
    opened = run.begin(0, [1])
    run.admit(opened)
    first, second, _ = run.issue(3)
    run.complete(second)
    assert opened.visit.begun() == []
    run.complete(first)
    assert opened.visit.begun() == [1]


def test_a_begun_expert_whose_last_chunk_fails_has_failed() -> None:
    run = driven(4, num_chunks=2, first_chunks=(1, 1))
    run.admit(run.begin(0, [1]))
    assert begun_after(run, 1) == [1]
    run.fail(run.issue(1)[0])
    assert run.visits[0].visit.begun() == []
    assert run.visits[0].visit.failed() == [1]


@pytest.mark.parametrize("first_chunks", [(), (0, 2)])
def test_where_only_whole_experts_are_of_use_none_is_begun(first_chunks: tuple[int, ...]) -> None:
    run = driven(4, num_chunks=3, first_chunks=first_chunks)
    run.admit(run.begin(0, [1]))
    assert [begun_after(run, 1) for _ in range(3)] == [[], [], []]


def test_what_was_speculation_can_be_begun_once_a_visit_needs_it() -> None:
    run = driven(4, num_chunks=3, first_chunks=(2, 2))
    run.hint(0, [1])
    for lease in run.issue(2):
        run.complete(lease)
    opened = run.begin(0, [1])
    assert opened.visit.begun() == []
    run.admit(opened)
    assert opened.visit.begun() == [1]
