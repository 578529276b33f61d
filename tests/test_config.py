from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from promoe import Ablation, ConfigError, PromoeConfig, PromoeError
from promoe.errors import shown

BOOLEANS = ("bypass", "strict")
SWITCHES = ("early_preemption", "reorder", "begin_early", "stream", "governor")
WHOLE_NUMBERS = ("lookahead", "min_group_bytes", "workers")
NUMBERS = ("min_probability", "waste_share", "stall_timeout_s")


def config(**fields: Any) -> PromoeConfig:
    return PromoeConfig(**fields)


def test_defaults() -> None:
    """What the documentation promises; a change is a change of behaviour for everybody."""
    assert dataclasses.asdict(PromoeConfig()) == {
        "eviction": "next_use",
        "kernels": "exact",
        "lookahead": 1,
        "min_probability": 0.5,
        "waste_share": 0.025,
        "bypass": True,
        "chunk_bytes": None,
        "min_group_bytes": 4 * 2**20,
        "workers": 2,
        "pinned_bytes": None,
        "read_mode": "auto",
        "spool_folder": None,
        "stall_timeout_s": 60.0,
        "verify": None,
        "strict": False,
        "ablation": dict.fromkeys(SWITCHES, True),
    }


def test_chunks_are_as_long_as_it_says_or_else_as_its_copies_are_worth() -> None:
    assert PromoeConfig().longest_chunk() == 4 * 2**20
    assert PromoeConfig().longest_chunk(onto_device=True) == 32 * 2**20
    for onto_device in (True, False):
        assert PromoeConfig(chunk_bytes=8192).longest_chunk(onto_device) == 8192


@pytest.mark.parametrize("record", [PromoeConfig, Ablation])
def test_every_field_is_explained(record: type[Any]) -> None:
    assert record.__doc__ is not None
    for field in dataclasses.fields(record):
        assert f"\n        {field.name}: " in record.__doc__, field.name


def test_every_field_is_covered_by_these_tests() -> None:
    names = {field.name for field in dataclasses.fields(PromoeConfig)}
    others = {"ablation", "chunk_bytes", "eviction", "kernels", "pinned_bytes", "read_mode", "spool_folder", "verify"}
    assert names == {*BOOLEANS, *WHOLE_NUMBERS, *NUMBERS, *others}


def test_settings_cannot_be_changed_after_patching() -> None:
    settings = PromoeConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.lookahead = 5  # type: ignore[misc]
    assert dataclasses.replace(settings, lookahead=5).lookahead == 5
    with pytest.raises(ConfigError):
        dataclasses.replace(settings, lookahead=0)


def test_equal_settings_are_equal() -> None:
    assert PromoeConfig(lookahead=2) == PromoeConfig(lookahead=2) != PromoeConfig()
    assert hash(PromoeConfig(lookahead=2)) == hash(PromoeConfig(lookahead=2))


@pytest.mark.parametrize(
    "fields",
    [
        {"eviction": "lru"},
        {"kernels": "fast"},
        {"eviction": "lfru"},
        {"eviction": "static"},
        {"read_mode": "page_cache"},
        {"read_mode": "direct"},
        {"spool_folder": "/some/where"},
        {"spool_folder": Path("some/where")},
        {"verify": "first"},
        {"verify": "always"},
        {"lookahead": 1},
        {"min_probability": 1.0},
        {"min_probability": 1},
        {"min_probability": 1e-9},
        {"waste_share": 0.0},
        {"waste_share": 1},
        {"workers": 1},
        {"pinned_bytes": 0},
        {"pinned_bytes": 10**12},
        {"stall_timeout_s": 1},
        {"stall_timeout_s": 1e-3},
        {"chunk_bytes": 4096},
        {"min_group_bytes": 0},
        {"chunk_bytes": 3 * 4096},
    ],
    ids=str,
)
def test_values_at_the_edge_are_accepted(fields: dict[str, Any]) -> None:
    settings = config(**fields)
    for name, value in fields.items():
        assert getattr(settings, name) == value


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("eviction", "fifo", r"one of \('lru', 'lfru', 'static', 'next_use'\)"),
        ("eviction", "LRU", "one of"),
        ("kernels", "fastest", r"one of \('exact', 'fast'\)"),
        ("eviction", None, "one of"),
        ("eviction", ["lru"], "one of"),
        ("read_mode", "mmap", r"one of \('auto', 'page_cache', 'direct'\)"),
        ("spool_folder", "", "None or a folder"),
        ("spool_folder", 7, "None or a folder"),
        ("spool_folder", b"bytes", "None or a folder"),
        ("verify", "sometimes", r"None or one of \('first', 'always'\)"),
        ("verify", True, "None or one of"),
        ("ablation", None, "a promoe.Ablation"),
        ("ablation", {"reorder": False}, "a promoe.Ablation"),
        ("lookahead", 0, "at least 1 layer"),
        ("lookahead", -2, "at least 1 layer"),
        ("min_probability", 0.0, r"in \(0, 1\]"),
        ("min_probability", 1.0000001, r"in \(0, 1\]"),
        ("min_probability", -0.1, r"in \(0, 1\]"),
        ("min_probability", 50, r"in \(0, 1\]"),
        ("min_probability", math.nan, r"in \(0, 1\]"),
        ("waste_share", -0.01, "from 0 to 1"),
        ("waste_share", 1.5, "from 0 to 1"),
        ("waste_share", math.nan, "from 0 to 1"),
        ("pinned_bytes", -1, "None or bytes"),
        ("pinned_bytes", 1.5, "None or bytes"),
        ("pinned_bytes", True, "None or bytes"),
        ("workers", 0, "1 to 256 threads"),
        ("stall_timeout_s", 0.0, "more than 0 seconds"),
        ("stall_timeout_s", -1, "more than 0 seconds"),
        ("stall_timeout_s", math.nan, "more than 0 seconds"),
        ("min_group_bytes", -1, "at least 0 bytes"),
        ("chunk_bytes", 0, "None or a positive multiple of 4096 bytes"),
        ("chunk_bytes", -4096, "None or a positive multiple of 4096 bytes"),
        ("chunk_bytes", 4095, "None or a positive multiple of 4096 bytes"),
        ("chunk_bytes", 4097, "None or a positive multiple of 4096 bytes"),
        ("chunk_bytes", 4096.0, "None or a positive multiple of 4096 bytes"),
        ("chunk_bytes", True, "None or a positive multiple of 4096 bytes"),
    ],
)
def test_a_value_that_cannot_work_is_refused(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}' field of PromoeConfig must be {allowed}"):
        config(**{name: value})


@pytest.mark.parametrize(
    ("names", "values", "allowed"),
    [
        (BOOLEANS, (1, 0, None, "yes", 1.0), "True or False"),
        (WHOLE_NUMBERS, (4096.0, "4096", None, True, 1.5), "a whole number"),
        (NUMBERS, ("0.5", None, True, [0.5], 0.5j), "a number"),
    ],
    ids=["booleans", "whole numbers", "numbers"],
)
def test_a_value_of_another_type_is_refused(names: tuple[str, ...], values: tuple[Any, ...], allowed: str) -> None:
    """Also what Python would take for it: `lookahead=True` is no number of layers."""
    for name in names:
        for value in values:
            with pytest.raises(ConfigError, match=f"'{name}' field of PromoeConfig must be {allowed}"):
                config(**{name: value})


def test_the_error_says_field_allowed_and_found() -> None:
    with pytest.raises(ConfigError) as caught:
        config(chunk_bytes=5000)
    assert str(caught.value) == (
        "The 'chunk_bytes' field of PromoeConfig must be None or a positive multiple of 4096 bytes, at most 1 GiB. "
        "Got 5000 instead."
    )
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, PromoeError)


def test_an_unknown_field_is_an_error() -> None:
    with pytest.raises(TypeError, match="look_ahead"):
        config(look_ahead=3)


@pytest.mark.parametrize("value", [None, 0, 1, "yes"])
@pytest.mark.parametrize("name", SWITCHES)
def test_a_part_is_on_or_off(name: str, value: object) -> None:
    assert getattr(Ablation(**{name: False}), name) is False
    with pytest.raises(
        ConfigError, match=f"The '{name}' field of Ablation must be True or False. Got {shown(value)} instead"
    ):
        Ablation(**{name: value})  # type: ignore[arg-type]
