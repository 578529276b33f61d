"""The steps between the arguments and the model: what is found, and how many slots it gets, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_device import FakeDevice
from served import checkpoint
from tiny_models import build
from transformers import PreTrainedModel
from untouched import leaving_untouched

import promoe
from promoe import EmulatedLink, PromoeConfig
from promoe.model.opening import OpenedModel, open_without_experts
from promoe.runtime.checking import Arguments, Checked
from promoe.runtime.finding import Found, FoundForDisk, FoundInFiles, find_in_ram
from promoe.runtime.slot_plan import plan_slots

LINK = EmulatedLink(bandwidth_bytes_per_s=1e12)
EXPERTS = 24


@pytest.fixture
def model() -> PreTrainedModel:
    return build("qwen2_moe")


@pytest.fixture
def opened() -> Iterator[OpenedModel]:
    opened = open_without_experts(checkpoint("qwen2_moe"))
    yield opened
    opened.store.close()


def checked(cache: str, link: Any = "auto", device: Any = None, **fields: Any) -> Checked:
    config = PromoeConfig(**fields)
    return Checked(Arguments(cache, None, link, "cpu", config), device, config)


def slots(found: Found, asked: Checked) -> int:
    """In all; 0: the experts need none."""
    return sum(plan.spec.num_slots for plan in plan_slots(found, asked).pools)


def test_experts_in_ram_need_no_slots_unless_a_slow_link_is_asked_for(model: PreTrainedModel) -> None:
    with leaving_untouched(model):
        found = find_in_ram(model, on_disk=False)
        assert type(found) is Found
        assert found.freed_bytes == 0
        assert slots(found, checked("50%")) == 0
        assert slots(found, checked("50%", LINK)) == EXPERTS // 2
        assert slots(found, checked("100%", LINK)) == 0
        assert slots(found, checked("100%", LINK, bypass=False)) == EXPERTS
        assert slots(found, checked("50%", device=FakeDevice())) == EXPERTS // 2
        assert slots(found, checked("100%", device=FakeDevice())) == 0


def test_experts_that_are_to_leave_ram_stay_where_all_have_room(model: PreTrainedModel) -> None:
    with leaving_untouched(model):
        found = find_in_ram(model, on_disk=True)
        assert type(found) is FoundForDisk
        assert slots(found, checked("50%")) == EXPERTS // 2
        assert slots(found, checked("100%")) == 0
        assert slots(found, checked("100%", device=FakeDevice())) == EXPERTS, "on the device, from files"


def test_experts_in_files_are_loaded_where_all_have_room(opened: OpenedModel) -> None:
    found = FoundInFiles(opened, "checkpoint", None, PromoeConfig())
    assert slots(found, checked("25%")) == EXPERTS // 4
    assert slots(found, checked("100%")) == 0
    assert slots(found, checked("100%", bypass=False)) == EXPERTS


@pytest.mark.parametrize("spoil", [lambda model: model.train(), lambda model: promoe.patch(model, link=LINK)])
def test_what_cannot_be_served_is_not_found(spoil: Callable[[Any], Any], model: PreTrainedModel) -> None:
    spoil(model)
    with pytest.raises(promoe.PromoeError, match=r"training mode|patched already"):
        find_in_ram(model, on_disk=False)
    if hasattr(model, "promoe"):
        promoe.unpatch(model)
