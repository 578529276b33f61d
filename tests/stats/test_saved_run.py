from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic_runs import make_run, make_stats, make_token, resident_stats

from promoe.errors import ConfigError
from promoe.stats.run import Run
from promoe.stats.saved_run import load_run, save_run

RUNS = [
    make_run("plain"),
    make_run("resident", stats=resident_stats(), tpot_s=0.01),
    make_run(
        "full",
        stats=make_stats(predictor="gate", lookahead=2, wasted_every=3),
        tpot_s=0.02,
        tpot_interval_s=(0.01, 0.03),
        ttft_s=0.1,
        bound_s=0.015,
        note="a note",
        token=make_token(),
    ),
    make_run("nothing measured", tpot_s=float("nan")),
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_what_is_saved_comes_back(run: Run, tmp_path: Path) -> None:
    saved = load_run(save_run(run, tmp_path / "r.json", {"model": "tiny"}))
    assert saved.conditions == {"model": "tiny"}
    assert saved.run.stats == run.stats
    assert saved.run.token == run.token
    times = ("name", "note", "tpot_interval_s", "ttft_s", "bound_s")
    assert [getattr(saved.run, name) for name in times] == [getattr(run, name) for name in times]
    assert saved.run.tpot_s == (None if run.name == "nothing measured" else run.tpot_s)


def written(tmp_path: Path, change: Callable[[dict[str, Any]], object] = lambda values: None) -> Path:
    path = save_run(RUNS[2], tmp_path / "r.json")
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    return path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "Cannot read"),
        (b"[]", "is not a saved run"),
        (b'{"format": "something else"}', "is not a saved run"),
        (b'{"format": "promoe run", "version": 2}', "of version 2, and this promoe reads version 1"),
        (b'{"format": "promoe run", "version": 1}', "is damaged"),
    ],
)
def test_other_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_run(path)


def test_missing_files_and_folders_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_run(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="Not a plain file"):
        load_run(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v["stats"].pop("decode"), "stats has no 'decode'"),
        (lambda v: v["stats"]["decode"].update(passes=-1), r"stats.decode.passes is -1"),
        (lambda v: v["stats"]["decode"].update(passes=True), r"stats.decode.passes is True"),
        (lambda v: v["stats"]["decode"].update(duration_s=10**400), r"duration_s is 1000"),
        (lambda v: v["stats"]["decode"].update(stall_s="x"), r"stall_s is 'x'"),
        (lambda v: v["stats"]["decode"]["layers"].pop(), "decode counts experts"),
        (lambda v: v["stats"]["over_time"][0]["expert_counts"].pop(), "a stretch of 1 passes counts 31 experts"),
        (lambda v: v["stats"]["over_time"][0].update(passes=0), "a stretch of 0 passes"),
        (lambda v: v["stats"]["expert_bytes"].pop(), "3 sizes of experts for 4 layers"),
        (lambda v: v.update(tpot_interval_s=[1.0]), "tpot_interval_s has 1 values"),
        (lambda v: v.update(conditions=[]), "conditions are"),
        (lambda v: v.update(name="x" * 5000), "name is 'xxx"),
        (lambda v: v["stats"].update(policy="\x1b[2J"), r"policy is '\\x1b"),
        (lambda v: v.update(conditions={"a": "b\x9bc"}), r"a condition is 'b\\x9bc'"),
        (lambda v: v["token"].update(visits=[[0, 0.0, 1.0]]), r"token.visits\[0\] is"),
        (lambda v: v["token"]["visits"][0].update(start_s=9.0), "the pass ends at"),
    ],
)
def test_damage_is_named(change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run(written(tmp_path, change))


def test_what_is_derived_is_not_believed(tmp_path: Path) -> None:
    path = written(tmp_path, lambda values: values["stats"]["decode"].update(hit_rate=0.99))
    assert load_run(path).run.stats.decode.hit_rate == 0.5


def test_a_run_of_a_large_model_is_small_enough_to_keep(tmp_path: Path) -> None:
    run = make_run(stats=make_stats(layers=48, experts=128, top_k=8, decode_passes=200))
    assert save_run(run, tmp_path / "r.json").stat().st_size < 2_000_000
    assert copy.copy(load_run(tmp_path / "r.json").run.stats) == run.stats
