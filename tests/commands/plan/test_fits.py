from __future__ import annotations

import pytest

from commands.plan.planned import MIB, sizes
from promoe.commands.plan.fits import (
    WORKSPACE_BYTES,
    Room,
    cache_argument,
    largest_rate,
    pools,
    rate_name,
    rate_of,
    slots_bytes,
)
from promoe.errors import ConfigError
from promoe.runtime.sizes import AUTO_RESERVE_BYTES

GIB = 2**30


def room(free_bytes: int | None, other_bytes: int = 0, kv_bytes: int | None = 0) -> Room:
    return Room("RAM", free_bytes, other_bytes, kv_bytes)


def test_what_is_kept_free_grows_with_the_kv_cache() -> None:
    assert room(None).reserve_bytes == AUTO_RESERVE_BYTES
    assert room(None, kv_bytes=None).reserve_bytes == AUTO_RESERVE_BYTES
    assert room(None, kv_bytes=8 * GIB).reserve_bytes == 8 * GIB + WORKSPACE_BYTES


def test_slots_get_what_is_left() -> None:
    model = sizes(layers=2, experts=8, expert_mib=4)  # 64 MiB of experts
    assert largest_rate(model, room(None)) == 1.0
    assert largest_rate(model, room(AUTO_RESERVE_BYTES + 100 * MIB)) == 1.0
    assert largest_rate(model, room(AUTO_RESERVE_BYTES + 48 * MIB, other_bytes=16 * MIB)) == 0.5
    assert largest_rate(model, room(AUTO_RESERVE_BYTES + 5 * MIB)) == 0.07, "in whole per cent"
    assert largest_rate(model, room(AUTO_RESERVE_BYTES + 3 * MIB)) == 0.0, "less than one expert"
    assert largest_rate(model, room(AUTO_RESERVE_BYTES // 2)) == 0.0
    assert room(AUTO_RESERVE_BYTES + MIB).fits(MIB)
    assert not room(AUTO_RESERVE_BYTES + MIB).fits(MIB + 1)
    assert room(None).fits(2**50)


def test_the_largest_that_fits_fits() -> None:
    model = sizes(layers=3, experts=7, expert_mib=5)
    for mib in range(5, 110, 3):
        here = room(AUTO_RESERVE_BYTES + mib * MIB)
        assert here.fits(slots_bytes(pools(model, largest_rate(model, here))))


@pytest.mark.parametrize(
    ("cache", "slots"), [("25%", 4), ("32MiB", 8), (str(5 * 2**20), 1), ("7GiB", 16), ("100%", 16)]
)
def test_a_cache_as_the_user_names_it(cache: str, slots: int) -> None:
    model = sizes(layers=2, experts=8, expert_mib=4)
    rate = rate_of(cache, model, room(None))
    assert rate * 16 == slots
    assert sum(plan.spec.num_slots for plan in pools(model, rate)) == slots


def test_a_cache_by_what_is_free() -> None:
    model = sizes(layers=2, experts=8, expert_mib=4)
    assert rate_of("auto", model, room(AUTO_RESERVE_BYTES + 48 * MIB, other_bytes=16 * MIB)) == 0.5
    for free_bytes, message in ((None, "this system does not tell"), (MIB, "only 0 B are free")):
        with pytest.raises(ConfigError, match=message):
            rate_of("auto", model, room(free_bytes, other_bytes=16 * MIB))


def test_no_slot_is_lost_on_the_way_through_per_cent() -> None:
    model = sizes(layers=9, experts=333, top_k=1)
    for slots in range(1, model.num_experts, 101):
        assert sum(plan.spec.num_slots for plan in pools(model, slots / model.num_experts)) == slots
    assert cache_argument(0.125) == "12.500000000000%"


def test_too_little_for_one_expert() -> None:
    with pytest.raises(ConfigError, match="one expert of each shape"):
        rate_of("1MiB", sizes(), room(None))


def test_rates_as_on_the_command_line() -> None:
    assert [rate_name(rate) for rate in (0.125, 0.5, 1.0, 1 / 3)] == ["12.5%", "50%", "100%", "33.34%"]


@pytest.mark.parametrize("experts", [3, 7, 24, 61, 128])
def test_a_cache_that_is_typed_as_it_is_printed_has_as_many_slots(experts: int) -> None:
    model = sizes(layers=2, experts=experts, top_k=1)
    for slots in range(1, model.num_experts + 1):
        assert rate_of(rate_name(slots / model.num_experts), model, room(None)) * model.num_experts == pytest.approx(
            slots
        )
