"""The sizes that a scheduler accepts, and the names of experts."""

from __future__ import annotations

import pytest

from promoe.scheduler import ExpertKey, PoolSpec, SchedulerConfig
from promoe.scheduler.config import NullObserver


def test_sizes_follow_from_the_chunks() -> None:
    config = SchedulerConfig([4, 8], [(10, 20), (5,)], [PoolSpec(2, (1,)), PoolSpec(3, (0,))])
    assert config.num_layers == 2
    assert config.expert_bytes == (30, 5)


def test_defaults_are_the_best_known_switches() -> None:
    config = SchedulerConfig([4], [(10,)], [PoolSpec(2, (0,))])
    assert config.eviction == "next_use"
    assert config.reorder
    assert config.hints
    assert config.prefetch
    assert config.calibrate
    assert config.first_chunks == (0,)
    assert not config.strict


@pytest.mark.parametrize(
    ("num_experts", "chunk_bytes", "pools"),
    [
        ([4], [(10,), (10,)], [PoolSpec(1, (0,))]),
        ([], [], []),
        ([4], [()], [PoolSpec(1, (0,))]),
        ([4], [(10, 0)], [PoolSpec(1, (0,))]),
        ([4, 4], [(10,)] * 2, [PoolSpec(1, (0,))]),
        ([4, 4], [(10,)] * 2, [PoolSpec(1, (0, 1)), PoolSpec(1, (1,))]),
        ([4], [(10,)], [PoolSpec(1, (1,))]),
    ],
    ids=["lengths differ", "no layers", "no chunks", "empty chunk", "layer left out", "layer twice", "no such layer"],
)
def test_sizes_that_do_not_fit_are_refused(
    num_experts: list[int], chunk_bytes: list[tuple[int, ...]], pools: list[PoolSpec]
) -> None:
    with pytest.raises(AssertionError):
        SchedulerConfig(num_experts, chunk_bytes, pools)


@pytest.mark.parametrize(("num_slots", "layers"), [(0, (0,)), (1, ())])
def test_a_pool_has_a_slot_and_a_layer(num_slots: int, layers: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        PoolSpec(num_slots, layers)


def test_the_null_observer_takes_every_event() -> None:
    observer = NullObserver()
    observer.transferred(0, "demand", 1)
    observer.prefetch_used(0, 1)
    observer.wasted(0, 1, "prefetch")
    observer.evicted(0)
    observer.failed("demand")
    observer.stale_completion()


@pytest.mark.parametrize("first_chunks", [(2, 1), (1, -1), (0,), (0, 0, 0)])
def test_an_expert_is_begun_with_some_of_its_chunks(first_chunks: tuple[int, ...]) -> None:
    SchedulerConfig([4, 4], [(10, 10), (5, 5)], [PoolSpec(2, (0, 1))], first_chunks=(1, 0))
    with pytest.raises((AssertionError, ValueError)):
        SchedulerConfig([4, 4], [(10, 10), (5, 5)], [PoolSpec(2, (0, 1))], first_chunks=first_chunks)


def test_keys_sort_by_layer_then_expert_and_unpack() -> None:
    assert sorted([ExpertKey(1, 0), ExpertKey(0, 7), ExpertKey(0, 2)]) == [(0, 2), (0, 7), (1, 0)]
    layer_idx, expert_idx = ExpertKey(layer_idx=3, expert_idx=5)
    assert (layer_idx, expert_idx) == (3, 5)
