"""Slots and their states: one expert per slot, and no slot is assigned again while something is in flight to it."""

from __future__ import annotations

import pytest

from promoe.scheduler.cache import ABSENT, DRAINING, LOADING, RESIDENT, ExpertCache, Load


def send(load: Load, count: int = 1) -> None:
    for _ in range(count):
        load.pending.add(load.issued)
        load.issued += 1


def land(load: Load, chunk_idx: int) -> None:
    load.pending.remove(chunk_idx)
    load.done_bytes += 10


def bring(cache: ExpertCache, code: int) -> int:
    load = cache.start_load(code, 1)
    send(load)
    land(load, 0)
    cache.finish_load(code)
    return load.slot


def test_an_expert_loads_becomes_resident_and_is_evicted() -> None:
    cache = ExpertCache(num_slots=2, num_codes=5)
    load = cache.start_load(3, num_chunks=2)
    send(load, 2)
    assert (cache.state[3], load.in_flight, cache.num_free) == (LOADING, 2, 1)
    cache.check_integrity()
    land(load, 1)
    land(load, 0)
    cache.finish_load(3)
    assert cache.state[3] == RESIDENT
    assert cache.slot_of == {3: load.slot}
    assert cache.owner[load.slot] == 3
    cache.check_integrity()
    cache.evict(3)
    assert cache.state[3] == ABSENT
    assert (cache.num_free, cache.slot_of) == (2, {})
    cache.check_integrity()


def test_every_letting_of_a_slot_has_its_own_generation() -> None:
    cache = ExpertCache(num_slots=1, num_codes=3)
    generations = []
    for code in (0, 1, 0):
        load = cache.start_load(code, 1)
        generations.append(load.generation)
        send(load)
        land(load, 0)
        cache.finish_load(code)
        cache.evict(code)
    assert len(set(generations)) == 3


def test_an_abandoned_slot_is_free_only_when_nothing_is_in_flight() -> None:
    cache = ExpertCache(num_slots=1, num_codes=2)
    load = cache.start_load(0, num_chunks=3)
    send(load, 2)
    cache.abandon_load(0)
    assert (cache.state[0], cache.num_free) == (DRAINING, 0)
    cache.check_integrity()
    land(load, 1)
    assert not cache.settle(0)
    assert cache.num_free == 0
    land(load, 0)
    assert cache.settle(0)
    assert (cache.state[0], cache.num_free) == (ABSENT, 1)
    cache.check_integrity()


def test_a_paused_load_is_abandoned_at_once() -> None:
    cache = ExpertCache(num_slots=1, num_codes=2)
    load = cache.start_load(0, num_chunks=2)
    send(load)
    land(load, 0)
    cache.check_integrity()
    cache.abandon_load(0)
    assert (cache.state[0], cache.num_free) == (ABSENT, 1)


def test_pins_count_experts_once() -> None:
    cache = ExpertCache(num_slots=2, num_codes=4)
    for code in (0, 0, 1):
        cache.pin(code)
    assert cache.num_pinned == 2
    with pytest.raises(AssertionError, match="2 experts pinned, 2 slots"):
        cache.pin(2)
    cache.unpin(0)
    assert cache.num_pinned == 2
    cache.unpin(0)
    assert cache.num_pinned == 1
    with pytest.raises(AssertionError, match="expert code 0 is not pinned"):
        cache.unpin(0)
    cache.check_integrity()


def test_one_expert_may_be_in_many_visits_at_once() -> None:
    cache = ExpertCache(1, 2)
    for _ in range(1000):
        cache.pin(1)
    assert cache.pin_counts.tolist() == [0, 1000]
    for _ in range(1000):
        cache.unpin(1)
    assert cache.num_pinned == 0


def test_states_move_one_way() -> None:
    cache = ExpertCache(num_slots=3, num_codes=4)
    bring(cache, 0)
    with pytest.raises(AssertionError, match="expert code 0 is in state 2"):
        cache.start_load(0, 1)
    with pytest.raises(AssertionError, match="expert code 1 is in state 0"):
        cache.evict(1)
    load = cache.start_load(2, 2)
    send(load)
    with pytest.raises(AssertionError, match="expert code 2 is in state 1"):
        cache.start_load(2, 2)
    cache.abandon_load(2)
    with pytest.raises(AssertionError, match="expert code 2 is in state 3"):
        cache.abandon_load(2)


def test_a_pinned_expert_is_not_evicted() -> None:
    cache = ExpertCache(num_slots=1, num_codes=1)
    bring(cache, 0)
    cache.pin(0)
    with pytest.raises(AssertionError, match="expert code 0 has 1 pins"):
        cache.evict(0)


def test_an_expert_is_not_resident_before_its_last_chunk() -> None:
    for num_sent, num_landed in ((1, 1), (2, 1)):
        cache = ExpertCache(num_slots=1, num_codes=1)
        load = cache.start_load(0, 2)
        send(load, num_sent)
        for chunk_idx in range(num_landed):
            land(load, chunk_idx)
        with pytest.raises(AssertionError):
            cache.finish_load(0)


def test_the_views_share_memory_with_the_arrays() -> None:
    cache = ExpertCache(num_slots=2, num_codes=4)
    bring(cache, 2)
    cache.pin(2)
    assert cache.states.tolist() == [ABSENT, ABSENT, RESIDENT, ABSENT]
    assert cache.pin_counts.tolist() == [0, 0, 1, 0]


def lose_a_slot(cache: ExpertCache) -> None:
    cache._free.pop()


def give_a_slot_twice(cache: ExpertCache) -> None:
    cache.slot_of[0] = cache._free[-1]


def forget_an_owner(cache: ExpertCache) -> None:
    cache.owner[cache.slot_of[0]] = None


def forget_a_state(cache: ExpertCache) -> None:
    cache.state[0] = ABSENT


def miscount_pins(cache: ExpertCache) -> None:
    cache.num_pinned += 1


def stick(cache: ExpertCache) -> None:
    cache.start_load(1, 2)


def stay_loading(cache: ExpertCache) -> None:
    load = cache.start_load(1, 1)
    send(load)
    land(load, 0)


@pytest.mark.parametrize(
    "damage",
    [lose_a_slot, give_a_slot_twice, forget_an_owner, forget_a_state, miscount_pins, stick, stay_loading],
)
def test_integrity_finds(damage: object) -> None:
    cache = ExpertCache(num_slots=3, num_codes=4)
    bring(cache, 0)
    cache.check_integrity()
    damage(cache)  # type: ignore[operator]
    with pytest.raises(AssertionError):
        cache.check_integrity()
