from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import write_checkpoint

from promoe.commands.bench import served
from promoe.commands.bench.messages import Opening, Prompt
from promoe.commands.bench.served import Served
from promoe.commands.bench.stock import load_stock
from promoe.commands.bench.table import Table
from promoe.commands.bench.tasks import Reference, Task, TokensDifferError, refer
from promoe.commands.demo.comparison import compare
from promoe.commands.demo.show import words
from promoe.commands.demo.systems import RESIDENT, SYSTEMS
from promoe.scheduler import governor
from promoe.transfer.links import EmulatedLink
from promoe.transfer.memory import SLOT_ALIGNMENT_BYTES


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(scope="module")
def task() -> Task:
    return Task("generate", [Prompt(ids, 5, 0) for ids in ([5, 6, 7], [8, 9, 10, 11], [12, 13])])


def opening(checkpoint: Path, link: EmulatedLink) -> Opening:
    return Opening(RESIDENT, checkpoint, "bfloat16", "40%", link, "page_cache")


def openings(checkpoint: Path, link: EmulatedLink) -> list[Opening]:
    return [replace(opening(checkpoint, link), system=system) for system in SYSTEMS]


@pytest.fixture(scope="module")
def measured(checkpoint: Path, task: Task, tmp_path_factory: pytest.TempPathFactory) -> tuple[Table, Reference, Path]:
    timeline = tmp_path_factory.mktemp("out") / "timeline.json"
    link = EmulatedLink(200e6)
    resident = Served(opening(checkpoint, link))
    reference = refer(resident, task)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(governor, "TRIAL_PASSES", 1000)  # prefetch stays on
        return compare(resident, reference, openings(checkpoint, link), timeline), reference, timeline


def test_every_system_has_a_row_with_times_and_all_that_fetch_a_bound(
    measured: tuple[Table, Reference, Path],
) -> None:
    table, reference, _ = measured
    runs = table.runs()
    assert [run.name for run in runs] == [RESIDENT.name, *(system.name for system in SYSTEMS)]
    for run in runs:
        assert run.tpot_s is not None
        assert run.tpot_s > 0
        assert run.ttft_s is not None
        assert run.tpot_interval_s is not None
        assert run.tpot_interval_s[0] <= run.tpot_interval_s[1]
    for run in runs[1:]:
        assert run.bound_s is not None
        assert table.token_compute_s is not None
        assert run.bound_s >= table.token_compute_s > 0
        assert run.stats.cache_slots == 9
        assert run.stats.decode.passes == len(reference.measured) * 4, "warm-up is not counted"
    assert runs[0].stats.cache_rate == 1
    assert table.bandwidth_bytes_per_s == 200e6
    assert runs[-1].stats.link == "emulated 0.2 GB/s, 0 ms latency"


def test_settings_differ_as_the_rows_say(measured: tuple[Table, Reference, Path]) -> None:
    stats = [run.stats for run in measured[0].runs()[1:]]
    assert [s.policy for s in stats] == ["lru", "lru", "next_use", "next_use"]
    assert [s.predictor for s in stats] == [None, None, None, "gate"]
    configs = [system.config for system in SYSTEMS]
    assert [(c.ablation.early_preemption, c.ablation.reorder) for c in configs] == [
        (False, False),
        (True, True),
        (True, True),
        (True, True),
    ]


def test_the_same_policy_has_the_same_bound_whatever_else_is_on(measured: tuple[Table, Reference, Path]) -> None:
    bounds = [run.bound_s or 0.0 for run in measured[0].runs()[1:]]
    assert bounds[0] == bounds[1]
    assert bounds[3] <= bounds[2], "forecasts also keep experts from being evicted"


def test_the_timeline_is_of_the_full_system(measured: tuple[Table, Reference, Path]) -> None:
    events = json.loads(measured[2].read_text())["traceEvents"]
    assert any(event["name"].startswith("experts L2") for event in events)
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert "predictor" in lanes


def test_the_reference_has_answers_and_routing_of_warm_up_and_prompts(
    checkpoint: Path,
    measured: tuple[Table, Reference, Path],
) -> None:
    _, reference, _ = measured
    assert len(reference.answers) == 3
    assert all(len(answer.generation.tokens) == 5 for answer in reference.answers)
    phases = [[p.phase for p in answer.routing] for answer in reference.answers]
    assert all(found == ["prefill", *["decode"] * 4] for found in phases)
    assert measured[0].sizes.token_bytes == 3 * 2 * (3 * 64 * 16 * 2)  # layers, top-k, three matrices of bf16


def test_a_system_with_wrong_logits_is_caught(checkpoint: Path, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    really = served._open

    def broken(opening: Opening) -> Any:
        model = really(opening)
        if opening.system.predictor is not None:
            model.lm_head.register_forward_hook(lambda module, args, output: -output)
        return model

    monkeypatch.setattr(served, "_open", broken)
    link = EmulatedLink(1e9)
    resident = Served(opening(checkpoint, link))
    with pytest.raises(TokensDifferError, match=r"“\+ gate prefetch” generated other tokens"):
        compare(resident, refer(resident, task), openings(checkpoint, link))
    # Every engine is closed all the same: the fixture of conftest.py looks for threads.


def test_without_a_resident_model_bounds_are_the_links(checkpoint: Path, task: Task) -> None:
    link = EmulatedLink(1e6)
    reference = replace(refer(Served(opening(checkpoint, link)), task), unmodified=False)
    table = compare(None, reference, openings(checkpoint, link)[1:3])
    assert [run.name for run in table.runs()] == [system.name for system in SYSTEMS[1:3]]
    assert table.token_compute_s is None
    assert all(run.bound_s is not None and 0 <= run.bound_ratio > 0.97 for run in table.runs())


def test_stock_tensors_are_aligned_and_unchanged(checkpoint: Path, measured: tuple[Table, Reference, Path]) -> None:
    model = load_stock(checkpoint, torch.float32)
    assert all(parameter.data_ptr() % SLOT_ALIGNMENT_BYTES == 0 for parameter in model.parameters())
    assert not model.training
    stats = measured[0].runs()[0].stats
    assert stats.cache_slots == 24
    assert stats.layer_visits == 0


def test_of_one_prompt_there_is_no_interval(measured: tuple[Table, Reference, Path]) -> None:
    table, _, _ = measured
    assert "] as fast as" in words(table)[0]
    assert "(median and 95% interval)" in words(table)[0]
    alone = replace(table, rows=[replace(row, answers=row.answers[:1]) for row in table.rows])
    assert "[" not in words(alone)[0]
    assert "(one prompt, which says little)" in words(alone)[0]
