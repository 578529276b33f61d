"""The first step of both front doors: arguments that can work, and those that cannot."""

from __future__ import annotations

from typing import Any

import pytest
from fake_device import FakeDevice

from promoe import EmulatedLink, PromoeConfig
from promoe.errors import ConfigError
from promoe.predictors import KINDS
from promoe.runtime import checking
from promoe.runtime.checking import Arguments, check, check_choices

LINK = EmulatedLink(bandwidth_bytes_per_s=1e12)


class OwnPredictor:
    def predict(self, visit: Any) -> list[Any]:
        return []


def arguments(**changes: Any) -> Arguments:
    return Arguments(
        **({"cache": "50%", "predictor": "gate", "link": "auto", "device": "cpu", "config": None} | changes)
    )


def test_what_is_left_out_is_filled_in() -> None:
    checked = check(arguments(), on_disk=True)
    asked = checked.asked
    assert (asked.cache, asked.predictor, asked.link, checked.device) == ("50%", "gate", "auto", None)
    assert checked.config == PromoeConfig()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache": "lots"}, "'cache' argument"),
        ({"predictor": "oracle"}, "'predictor' argument"),
        ({"link": "host"}, "are to be in files"),
        ({"device": "abacus"}, "'device' argument"),
        ({"config": {}}, "'config' argument"),
    ],
)
def test_each_argument_is_checked_without_a_model(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(arguments(**changes), on_disk=True)


def test_checksums_are_not_compared_of_what_a_device_copies_from_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "open_device", lambda device: FakeDevice())
    wanted = arguments(device="cuda", config=PromoeConfig(verify="always"))
    with pytest.raises(ConfigError, match="verify='always' compares experts that the CPU copies"):
        check(wanted, on_disk=False)
    assert check(wanted, on_disk=True).device is not None


@pytest.mark.parametrize("predictor", [None, *KINDS, pytest.param(OwnPredictor(), id="own")])
@pytest.mark.parametrize(
    ("link", "stores"), [("auto", [True, False]), ("file", [True]), ("host", [False]), (LINK, [True, False])]
)
def test_choices_that_can_work(predictor: Any, link: Any, stores: list[bool]) -> None:
    for on_disk in stores:
        check_choices(predictor, link, on_disk)


@pytest.mark.parametrize(
    "predictor", ["", "Gate", "oracle", OwnPredictor, pytest.param(object(), id="object"), 3, b"gate"]
)
def test_predictors_that_cannot_work(predictor: Any) -> None:
    with pytest.raises(ConfigError, match="'predictor' argument must be None"):
        check_choices(predictor, "auto", on_disk=True)


@pytest.mark.parametrize("link", ["", "cuda", "AUTO", None, 3, EmulatedLink], ids=repr)
def test_links_that_cannot_work(link: Any) -> None:
    for on_disk, name in ((True, "file"), (False, "host")):
        with pytest.raises(ConfigError, match=rf"'link' argument must be \"auto\", \"{name}\" or an EmulatedLink"):
            check_choices(None, link, on_disk=on_disk)


@pytest.mark.parametrize(
    ("link", "on_disk", "message"), [("file", False, "are in RAM"), ("host", True, "are to be in files")]
)
def test_links_that_cannot_reach_the_experts(link: Any, on_disk: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_choices(None, link, on_disk)


def test_an_emulated_link_does_not_reach_a_device() -> None:
    with pytest.raises(ConfigError, match="An EmulatedLink ends in RAM"):
        check_choices(None, LINK, on_disk=False, on_device=True)
