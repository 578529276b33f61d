"""Experts in the forms that systems ask for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import write_checkpoint

import promoe
from promoe.commands.bench.forms import cache_of, prepare_forms
from promoe.commands.bench.systems import find_systems
from promoe.errors import UnsupportedModelError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("forms") / "checkpoint", hidden=64, intermediate=64)


def test_a_form_is_written_once_where_it_is_looked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    systems = find_systems(["lru", "lru:int8", "gate:int2"])
    found = prepare_forms(systems, folder, torch.bfloat16)
    assert set(found) == {"auto", "int8", "int2"}
    plain, int8, int2 = (found[form][0] for form in ("auto", "int8", "int2"))
    assert plain == 3 * 64 * 64 * 2
    assert plain > int8 > int2 > 0
    assert {len(found[form]) for form in found} == {3}
    said = capsys.readouterr().err
    methods = {}
    for form in ("int8", "int2"):
        index = folder / f"promoe-{form}" / "experts.json"
        methods[form] = json.loads(index.read_text())["method"]
        assert f"not there in {form}" in said
        written = index.stat().st_mtime_ns
        assert prepare_forms(systems, folder, torch.bfloat16) == found
        assert index.stat().st_mtime_ns == written
    assert methods == {"int8": "rtn", "int2": "hqq"}
    assert not capsys.readouterr().err.strip()


def test_a_model_that_cannot_be_quantised_is_refused_before_anything_runs(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")  # experts of 16 neurons
    with pytest.raises(UnsupportedModelError, match="can be kept in int4"):
        prepare_forms(find_systems(["gate:int4"]), checkpoint, torch.bfloat16)


def test_quantised_systems_get_as_many_bytes_as_the_others(folder: Path) -> None:
    _, quantised = find_systems(["lru:int8"])
    budget_bytes = 6 * 3 * 64 * 64 * 2
    cache = cache_of(quantised, "25%", budget_bytes)
    model = promoe.from_pretrained(folder, experts="int8", cache=cache, dtype=torch.bfloat16)
    try:
        stats = model.promoe.stats()  # type: ignore[attr-defined]
        slot_bytes = prepare_forms([quantised], folder, torch.bfloat16)["int8"][0]
        assert stats.cache_slots == budget_bytes // slot_bytes > 6
        assert stats.cache_bytes <= budget_bytes
    finally:
        model.promoe.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["lru", "lru:int8"])
def test_slots_per_layer_are_the_same_number_in_every_form(name: str) -> None:
    assert cache_of(find_systems([name])[-1], "2 per layer", 10**9) == "2 per layer"


def test_systems_in_16_bits_get_what_was_asked_for() -> None:
    assert cache_of(find_systems(["lru"])[0], "25%", 10**9) == "25%"
