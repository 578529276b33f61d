from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from promoe.errors import ConfigError
from promoe.runtime.sizes import AUTO_RESERVE_BYTES, check_cache, fixed_bytes, plan_pools, slots_per_layer
from promoe.scheduler import ExpertKey, PoolSpec
from promoe.stores import HotLayouts
from promoe.stores.layout import ExpertLayout


def layout_of(slot_bytes: int) -> ExpertLayout:
    assert slot_bytes % 64 == 0
    layout = ExpertLayout.of({"w": ((slot_bytes,), torch.uint8)})
    assert layout.slot_bytes == slot_bytes
    return layout


SMALL, LARGE = layout_of(1024), layout_of(8192)


def slots(cache: Any, layouts: list[ExpertLayout], num_experts: list[int], free_bytes: int | None = None) -> list[int]:
    return [plan.spec.num_slots for plan in plan_pools(cache, layouts, num_experts, free_bytes)]


def one_pool(cache: Any, num_experts: int = 8, layers: int = 4, free_bytes: int | None = None) -> int:
    """Slots for experts of 1 KiB."""
    (num_slots,) = slots(cache, [SMALL] * layers, [num_experts] * layers, free_bytes)
    return num_slots


def refusal(cache: Any, layouts: list[ExpertLayout], num_experts: list[int]) -> str | None:
    """What is said against a cache of that size; None: it can be had."""
    try:
        plan_pools(cache, layouts, num_experts)
    except ConfigError as error:
        return str(error)
    return None


def test_experts_of_two_kinds_have_pools_of_their_own() -> None:
    """Each pool has slots for the same share of its experts, also where the size is in bytes."""
    hot = HotLayouts(frozenset(ExpertKey(layer, 0) for layer in range(4)), [LARGE] * 3 + [SMALL])
    plans = plan_pools("100%", [SMALL] * 4, [8] * 4, hot=hot)
    assert [(plan.layout, plan.spec) for plan in plans] == [
        (SMALL, PoolSpec(28, (0, 1, 2, 3))),
        (LARGE, PoolSpec(3, (0, 1, 2), hot=True)),
        (SMALL, PoolSpec(1, (3,), hot=True)),
    ]
    hot = HotLayouts(frozenset(ExpertKey(layer, idx) for layer in range(4) for idx in (0, 5)), [LARGE] * 4)
    for cache in ("50%", 4 * (6 * 1024 + 2 * 8192) // 2):
        plans = plan_pools(cache, [SMALL] * 4, [8] * 4, hot=hot)
        assert [plan.spec.num_slots for plan in plans] == [12, 4]


# -- how much ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cache", "num_slots"),
    [  # of 32 experts, 1024 bytes each
        ("50%", 16),
        ("25%", 8),
        ("100%", 32),
        ("100.0 %", 32),
        (" 12.5% ", 4),
        ("49.9%", 15),
        ("3.125%", 1),
        (1024, 1),
        (2047, 1),
        (2048, 2),
        (31 * 1024 + 1023, 31),
        (32 * 1024, 32),
        (10**15, 32),
        ("10KiB", 10),
        ("10 KiB", 10),
        ("10kib", 10),
        ("10.9KIB", 10),
        ("10KB", 9),
        ("10240B", 10),
        ("0.015625MiB", 16),
        ("0.02MB", 19),
        ("6GiB", 32),
        ("6gb", 32),
        ("1TiB", 32),
        ("1TB", 32),
        ("9" * 400 + "GiB", 32),
    ],
)
def test_slots_of_one_pool(cache: Any, num_slots: int) -> None:
    assert one_pool(cache) == num_slots


@pytest.mark.parametrize("num_experts", [1, 3, 49, 98, 100, 6144])
def test_a_budget_of_so_many_slots_gives_so_many(num_experts: int) -> None:
    """Whatever floating point makes of the share: 1 / 49 * 49 is less than 1."""
    for num_slots in range(1, num_experts + 1, -(-num_experts // 100)):
        assert slots(num_slots * 1024, [SMALL], [num_experts]) == [num_slots]
        if num_slots > 1:
            assert slots(num_slots * 1024 - 1, [SMALL], [num_experts]) == [num_slots - 1]


def test_a_share_of_a_hundred_experts_is_that_many() -> None:
    """0.29 * 100 is less than 29."""
    assert [slots(f"{percent}%", [SMALL], [100]) for percent in range(1, 101)] == [[n] for n in range(1, 101)]


def test_one_layer() -> None:
    (plan,) = plan_pools("50%", [SMALL], [8])
    assert plan.spec.layers == (0,)
    assert plan.spec.num_slots == 4
    assert plan.nbytes == 4096
    assert plan.layout is SMALL


def test_layers_of_equal_layout_share_a_pool() -> None:
    (plan,) = plan_pools("50%", [SMALL, layout_of(1024), SMALL], [8, 4, 4])
    assert plan.spec.layers == (0, 1, 2)
    assert plan.spec.num_slots == 8


def test_the_budget_is_split_by_bytes_over_layouts_in_order_of_appearance() -> None:
    layouts, num_experts = [LARGE, SMALL, SMALL, LARGE], [8, 16, 16, 8]
    plans = plan_pools("25%", layouts, num_experts)
    assert [(plan.layout, plan.spec.layers, plan.spec.num_slots, plan.nbytes) for plan in plans] == [
        (LARGE, (0, 3), 4, 4 * 8192),
        (SMALL, (1, 2), 8, 8 * 1024),
    ]
    # The same in bytes: a quarter of 16 x 8192 + 32 x 1024.
    assert slots((16 * 8192 + 32 * 1024) // 4, layouts, num_experts) == [4, 8]


@given(
    st.lists(st.tuples(st.sampled_from([SMALL, LARGE, layout_of(64)]), st.integers(1, 130)), min_size=1, max_size=6),
    st.integers(1, 2_000_000),
)
def test_slots_fit_the_budget_and_the_remedy_of_an_error_works(
    layers: list[tuple[ExpertLayout, int]], budget_bytes: int
) -> None:
    layouts, num_experts = [layout for layout, _ in layers], [count for _, count in layers]
    message = refusal(budget_bytes, layouts, num_experts)
    if message is not None:
        found = re.search(r'must be at least .* = (\d+) bytes .* Try cache="(\d+%)"', message)
        assert found, message
        assert budget_bytes < int(found[1])
        assert refusal(int(found[1]), layouts, num_experts) is None
        assert refusal(found[2], layouts, num_experts) is None
        return
    plans = plan_pools(budget_bytes, layouts, num_experts)
    assert sum(plan.nbytes for plan in plans) <= budget_bytes
    assert sorted(layer for plan in plans for layer in plan.spec.layers) == list(range(len(layers)))
    for plan in plans:
        assert {layouts[layer] for layer in plan.spec.layers} == {plan.layout}
        assert 1 <= plan.spec.num_slots <= sum(num_experts[layer] for layer in plan.spec.layers)


# -- slots that belong to one layer each ------------------------------------------------------------------------


def test_slots_per_layer_are_a_pool_for_each_layer_and_no_more_than_its_experts() -> None:
    plans = plan_pools(" 6 per  layer", [SMALL, LARGE, SMALL], [8, 8, 4])
    assert [(plan.layout, plan.spec.layers, plan.spec.num_slots) for plan in plans] == [
        (SMALL, (0,), 6),
        (LARGE, (1,), 6),
        (SMALL, (2,), 4),
    ]
    assert slots("1 per layer", [SMALL] * 4, [8] * 4) == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("cache", "found"), [("3 per layer", 3), ("12 per layer", 12), ("50%", None), ("6GiB", None), (3, None)]
)
def test_which_sizes_are_slots_per_layer(cache: Any, found: int | None) -> None:
    assert slots_per_layer(cache) == found


def test_slots_per_layer_are_for_experts_of_one_size() -> None:
    hot = HotLayouts(frozenset(ExpertKey(layer, 0) for layer in range(2)), [LARGE] * 2)
    with pytest.raises(
        ConfigError, match=r"for experts of one size, .* in more bits .*Got '2 per layer'\. Give a size or a"
    ):
        plan_pools("2 per layer", [SMALL] * 2, [8] * 2, hot=hot)


def test_slots_per_layer_are_no_fixed_number_of_bytes() -> None:
    with pytest.raises(ConfigError, match=r"""A size such as "128MiB" is needed\. Got '2 per layer'"""):
        fixed_bytes("2 per layer")


# -- what is free -----------------------------------------------------------------------------------------------


def test_auto_takes_what_is_free_less_the_reserve() -> None:
    assert AUTO_RESERVE_BYTES == 2 * 2**30
    assert one_pool("auto", free_bytes=2 * 2**30 + 10 * 1024) == 10
    assert one_pool("auto", free_bytes=64 * 2**30) == 32


def test_auto_where_nothing_is_left() -> None:
    for free_bytes in (0, 2**30, 2 * 2**30):
        with pytest.raises(
            ConfigError, match=r'^cache="auto" leaves 2\.00 GiB free for the KV cache, but only .* free'
        ):
            one_pool("auto", free_bytes=free_bytes)
    with pytest.raises(ConfigError, match=r"only 1\.00 GiB are free\. Free some memory, or give a size\.$"):
        one_pool("auto", free_bytes=2**30)


def test_auto_where_the_system_does_not_say() -> None:
    with pytest.raises(ConfigError, match=r'^cache="auto" needs to know how much memory is free.*Give a size\.$'):
        one_pool("auto")


def test_auto_that_leaves_less_than_an_expert_names_what_was_asked() -> None:
    with pytest.raises(ConfigError, match=r"at least 1\.0 KiB .* Got 'auto' = 512 B instead"):
        one_pool("auto", free_bytes=2 * 2**30 + 512)


# -- errors -----------------------------------------------------------------------------------------------------


def test_too_small_says_least_found_and_remedy() -> None:
    with pytest.raises(ConfigError) as caught:
        one_pool("1000 B")
    assert str(caught.value) == (
        "The 'cache' argument must be at least 1.0 KiB = 1024 bytes (one expert of each shape). "
        "Got '1000 B' = 1000 B instead. Try cache=\"4%\" (1.3 KiB) or more."
    )


def test_too_small_for_the_rarer_of_two_layouts() -> None:
    """One slot of two large experts is half of everything: 2 x 8 KiB + 16 x 1 KiB = 32 KiB."""
    layouts, num_experts = [SMALL, LARGE], [16, 2]
    assert slots("50%", layouts, num_experts) == [8, 1]
    with pytest.raises(ConfigError, match=r"at least 16\.0 KiB = 16384 bytes .* Got '49%' = 15\.7 KiB .*\"50%\""):
        slots("49%", layouts, num_experts)


MALFORMED: list[Any] = [
    "",
    "half",
    "50",
    "%",
    "GiB",
    "-1GiB",
    "-50%",
    "0%",
    "0.0%",
    "0GiB",
    "100.1%",
    "1e3MB",
    "6 Gi B",
    "6GiB6",
    "6,5GiB",
    ".5GiB",
    "5.GiB",
    "6PiB",
    "6G",
    "6 bits",
    "50%%",
    "inf",
    "nan%",
    "Auto",
    "0 per layer",
    "-1 per layer",
    "1.5 per layer",
    "per layer",
    "2 per expert",
    "2perlayer",
    0,
    -1,
    0.5,
    4096.0,
    True,
    False,
    None,
    b"50%",
    ["50%"],
    6 + 0j,
]


@pytest.mark.parametrize("cache", MALFORMED, ids=repr)
def test_what_is_no_size_is_refused_with_and_without_a_model(cache: Any) -> None:
    for ask in (lambda: one_pool(cache, free_bytes=2**40), lambda: check_cache(cache)):
        with pytest.raises(ConfigError) as caught:
            ask()
        assert str(caught.value) == (
            'The \'cache\' argument must be a size such as "6GiB", a share of the routed experts such as "50%" '
            f'(more than 0, at most 100%), slots for each layer such as "2 per layer", or a positive number of bytes. Got '
            f"{cache!r} instead."
        )


@pytest.mark.parametrize("cache", ["auto", "50%", "100%", "1B", "6GiB", " 1.5 tb", 1, 10**18, "2 per layer"])
def test_a_size_is_a_size_whatever_the_model(cache: Any) -> None:
    check_cache(cache)
