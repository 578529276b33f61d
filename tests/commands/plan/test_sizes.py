from __future__ import annotations

from dataclasses import replace

import pytest

from commands.plan.planned import MIB, sizes
from promoe.commands.plan.sizes import WORKSPACE_BYTES, CacheLayer, KvCache, Room, Slots, cache_argument, rate_name
from promoe.errors import ConfigError
from promoe.runtime.sizes import AUTO_RESERVE_BYTES

GIB = 2**30


def test_a_cache_layer_keeps_what_its_kind_keeps() -> None:
    assert CacheLayer("full attention", 0, 10).nbytes(100) == 1000
    assert CacheLayer("sliding window", 0, 10, 15).nbytes(100) == 150
    assert CacheLayer("sliding window", 0, 10, 15).nbytes(5) == 50
    assert CacheLayer("state", 64, 0).nbytes(100) == 64


def test_layers_of_one_kind_are_counted_together() -> None:
    full, window = (
        CacheLayer("full attention", 0, 10, None, "2 heads x (4 + 4)"),
        CacheLayer("sliding window", 0, 10, 127),
    )
    kv = KvCache((full, window, full), "")
    assert kv.nbytes(1000) == 20_000 + 1270
    assert kv.kinds() == ["2 x full attention, 2 heads x (4 + 4)", "1 x sliding window of 127 tokens"]
    assert KvCache((), "unknown").nbytes(1000) is None


def test_sums() -> None:
    model = sizes(layers=3, experts=8, top_k=2, expert_mib=4)
    assert model.num_experts == 24
    assert model.expert_bytes == model.stored_bytes == model.slots_bytes == 24 * 4 * MIB
    assert model.token_bytes == 3 * 2 * 4 * MIB
    assert model.least_rate == 0.04167
    quantised = replace(model, layers=tuple(replace(layer, stored_bytes=MIB) for layer in model.layers))
    assert quantised.stored_share == 0.25
    assert quantised.expert_bytes == model.expert_bytes


@pytest.mark.parametrize("experts", [1, 3, 8, 16, 32, 61, 100, 1000])
@pytest.mark.parametrize("layers", [1, 12, 61])
def test_the_smallest_cache_can_be_typed_as_it_is_printed(layers: int, experts: int) -> None:
    model = sizes(layers=layers, experts=experts, top_k=1)
    typed = float(rate_name(model.least_rate).rstrip("%")) / 100
    assert int(typed * model.num_experts) == 1


def room(free_bytes: int | None, other_bytes: int = 0, kv_bytes: int | None = 0) -> Room:
    return Room("RAM", free_bytes, other_bytes, kv_bytes)


def test_what_is_kept_free_grows_with_the_kv_cache() -> None:
    assert room(None).reserve_bytes == AUTO_RESERVE_BYTES
    assert room(None, kv_bytes=None).reserve_bytes == AUTO_RESERVE_BYTES
    assert room(None, kv_bytes=8 * GIB).reserve_bytes == 8 * GIB + WORKSPACE_BYTES


def test_slots_get_what_is_left() -> None:
    model = sizes(layers=2, experts=8, expert_mib=4)  # 64 MiB of experts
    assert room(None).largest_rate(model) == 1.0
    assert room(AUTO_RESERVE_BYTES + 100 * MIB).largest_rate(model) == 1.0
    assert room(AUTO_RESERVE_BYTES + 48 * MIB, other_bytes=16 * MIB).largest_rate(model) == 0.5
    assert room(AUTO_RESERVE_BYTES + 5 * MIB).largest_rate(model) == 0.07, "in whole per cent"
    assert room(AUTO_RESERVE_BYTES + 3 * MIB).largest_rate(model) == 0.0, "less than one expert"
    assert room(AUTO_RESERVE_BYTES // 2).largest_rate(model) == 0.0
    assert room(AUTO_RESERVE_BYTES + MIB).fits(Slots(1, MIB))
    assert not room(AUTO_RESERVE_BYTES + MIB).fits(Slots(1, MIB + 1))
    assert room(None).fits(Slots(1, 2**50))


def test_the_largest_that_fits_fits() -> None:
    model = sizes(layers=3, experts=7, expert_mib=5)
    for mib in range(5, 110, 3):
        here = room(AUTO_RESERVE_BYTES + mib * MIB)
        assert here.fits(model.slots(here.largest_rate(model)))


@pytest.mark.parametrize(
    ("cache", "slots"), [("25%", 4), ("32MiB", 8), (str(5 * 2**20), 1), ("7GiB", 16), ("100%", 16)]
)
def test_a_cache_as_the_user_names_it(cache: str, slots: int) -> None:
    model = sizes(layers=2, experts=8, expert_mib=4)
    rate = room(None).rate_of(cache, model)
    assert rate * 16 == slots
    assert model.slots(rate).num_slots == slots


def test_a_cache_by_what_is_free() -> None:
    model = sizes(layers=2, experts=8, expert_mib=4)
    assert room(AUTO_RESERVE_BYTES + 48 * MIB, other_bytes=16 * MIB).rate_of("auto", model) == 0.5
    for free_bytes, message in ((None, "this system does not report"), (MIB, "only 0 B are free")):
        with pytest.raises(ConfigError, match=message):
            room(free_bytes, other_bytes=16 * MIB).rate_of("auto", model)


def test_slots_per_layer_are_not_planned() -> None:
    with pytest.raises(ConfigError, match=r"slots are shared by all layers: .*Got '2 per layer'.*promoe bench"):
        room(None).rate_of("2 per layer", sizes())


def test_no_slot_is_lost_on_the_way_through_per_cent() -> None:
    model = sizes(layers=9, experts=333, top_k=1)
    for slots in range(1, model.num_experts, 101):
        assert model.slots(slots / model.num_experts).num_slots == slots
    assert cache_argument(0.125) == "12.500000000000%"


def test_too_little_for_one_expert() -> None:
    with pytest.raises(ConfigError, match="one expert of each shape"):
        room(None).rate_of("1MiB", sizes())


def test_rates_as_on_the_command_line() -> None:
    assert [rate_name(rate) for rate in (0.125, 0.5, 1.0, 1 / 3)] == ["12.5%", "50%", "100%", "33.34%"]


@pytest.mark.parametrize("experts", [3, 7, 24, 61, 128])
def test_a_cache_that_is_typed_as_it_is_printed_has_as_many_slots(experts: int) -> None:
    model = sizes(layers=2, experts=experts, top_k=1)
    for slots in range(1, model.num_experts + 1):
        assert room(None).rate_of(rate_name(slots / model.num_experts), model) * model.num_experts == pytest.approx(
            slots
        )
