"""Experts in the forms that systems ask for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import write_checkpoint

import promoe
from promoe.commands.bench.forms import cache_of, prepare_forms
from promoe.commands.bench.messages import Sizes
from promoe.commands.bench.systems import System, find_systems
from promoe.errors import ConfigError, UnsupportedModelError
from promoe.runtime.sizes import plan_pools
from promoe.stores.layout import ExpertLayout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("forms") / "checkpoint", hidden=64, intermediate=64)


def of_nobody(system: System) -> Path:
    raise AssertionError(system.name)


def test_a_form_is_written_once_where_it_is_looked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    systems = find_systems(["lru", "lru:int8", "gate:int2"])
    found = prepare_forms(systems, folder, torch.bfloat16, of_nobody)
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
        assert prepare_forms(systems, folder, torch.bfloat16, of_nobody) == found
        assert index.stat().st_mtime_ns == written
    assert methods == {"int8": "rtn", "int2": "rtn"}
    assert not capsys.readouterr().err.strip()


def test_a_gguf_file_is_written_once_for_the_systems_that_read_it(folder: Path, tmp_path: Path) -> None:
    systems = find_systems(["lru", "lru:q4_0", "gate:q8_0", "gate:q8_0-int8"])
    found = prepare_forms(systems, folder, torch.bfloat16, lambda system: tmp_path / str(system.gguf_type))
    assert set(found) == {"auto", "q8_0", "q8_0-int8", "q4_0"}
    assert found["auto"][0] == found["q8_0"][0] > found["q8_0-int8"][0] > found["q4_0"][0], (
        "8 bits, if asked for, and 4"
    )
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.gguf")}
    assert sorted(path.parent.name for path in files) == ["q4_0", "q8_0"]
    prepare_forms(systems, folder, torch.bfloat16, lambda system: tmp_path / str(system.gguf_type))
    assert {path: path.stat().st_mtime_ns for path in files} == files


def test_a_model_that_cannot_be_quantised_is_refused_before_anything_runs(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")  # experts of 16 neurons
    with pytest.raises(UnsupportedModelError, match="can be kept in int4"):
        prepare_forms(find_systems(["gate:int4"]), checkpoint, torch.bfloat16, of_nobody)


def sizes(slot_bytes: int = 1024) -> Sizes:
    """Of three layers of 8 experts, of which a token uses 2."""
    return Sizes((8,) * 3, (slot_bytes,) * 3, (2,) * 3, 0, 64)


def test_quantised_systems_get_as_many_bytes_as_the_others(folder: Path) -> None:
    _, quantised = find_systems(["lru:int8"])
    budget_bytes = 6 * 3 * 64 * 64 * 2
    slot_bytes = prepare_forms([quantised], folder, torch.bfloat16, of_nobody)["int8"]
    cache = cache_of(quantised, "25%", budget_bytes, slot_bytes, sizes())
    model = promoe.from_pretrained(folder, experts="int8", cache=cache, dtype=torch.bfloat16)
    try:
        stats = model.promoe.stats()  # type: ignore[attr-defined]
        assert stats.cache_slots == budget_bytes // slot_bytes[0] > 6
        assert stats.cache_bytes <= budget_bytes
    finally:
        model.promoe.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "cache", "expected"),
    [  # of slots of 1000 bytes; the budget is for 12 of them
        ("lru", "50%", "50%"),
        ("lru", "2 per layer", "2 per layer"),
        ("lru:int8", "50%", 12_000),
        ("lru:int8", "2 per layer", "2 per layer"),
        ("eliseev", "50%", "4 per layer"),
        ("eliseev:int2", "50%", "4 per layer"),
        ("eliseev", "2 per layer", "2 per layer"),
        ("eliseev-no-lru", "50%", 2_000),
        ("eliseev-no-lru:int2", "2 per layer", 2_000),
        ("eliseev-naive", "50%", 8_000),
    ],
)
def test_what_becomes_of_the_memory_for_slots(name: str, cache: str, expected: int | str) -> None:
    assert cache_of(find_systems([name])[-1], cache, 12_000, [1000] * 3, sizes()) == expected


def test_no_system_gets_more_than_the_others() -> None:
    for name in ("eliseev-no-lru", "eliseev-naive"):
        assert cache_of(find_systems([name])[0], "4%", 1000, [1000] * 3, sizes()) == 1000
    with pytest.raises(
        ConfigError, match=r"'eliseev' needs a slot for each layer, 2.9 KiB, and a cache of 8% has 2.0 KiB"
    ):
        cache_of(find_systems(["eliseev"])[0], "8%", 2000, [1000] * 3, sizes())


def test_layers_of_different_sizes_all_have_slots_for_a_token() -> None:
    system = find_systems(["eliseev-no-lru"])[0]
    layouts = [ExpertLayout.of({"w": ((nbytes,), torch.uint8)}) for nbytes in (1024, 64, 1024)]
    cache = cache_of(system, "100%", 10**6, [layout.slot_bytes for layout in layouts], sizes())
    assert [plan.spec.num_slots for plan in plan_pools(cache, layouts, (8, 8, 8))] == [4, 2]
