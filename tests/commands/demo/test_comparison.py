from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import write_checkpoint

from promoe.commands.demo.comparison import (
    Reference,
    Result,
    Task,
    TokensDifferError,
    compare,
    record,
    resident_stats,
    verify,
)
from promoe.commands.demo.show import words
from promoe.commands.demo.systems import RESIDENT, SYSTEMS, BehindLink, load_stock
from promoe.commands.measure import Generation
from promoe.experts.moe_layers import find_moe_layers
from promoe.scheduler import governor
from promoe.transfer.links import EmulatedLink
from promoe.transfer.memory import SLOT_ALIGNMENT_BYTES


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(scope="module")
def task() -> Task:
    def inputs(*ids: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}

    return Task(inputs(5, 6, 7), [inputs(8, 9, 10, 11), inputs(12, 13)], new_tokens=5, pad_token_id=0)


@pytest.fixture(scope="module")
def measured(checkpoint: Path, task: Task, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Reference, Path]:
    timeline = tmp_path_factory.mktemp("out") / "timeline.json"
    source = BehindLink(checkpoint, torch.bfloat16)
    source.link = EmulatedLink(200e6)
    resident = source.resident()
    reference = record(resident, task)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(governor, "TRIAL_PASSES", 1000)  # prefetch stays on
        return compare(source, resident, reference, task, "40%", timeline), reference, timeline


def test_every_system_has_a_row_with_times_and_all_that_fetch_a_bound(
    measured: tuple[Result, Reference, Path],
) -> None:
    result, reference, _ = measured
    assert [run.name for run in result.runs] == [RESIDENT, *(system.name for system in SYSTEMS)]
    for run in result.runs:
        assert run.tpot_s is not None
        assert run.tpot_s > 0
        assert run.ttft_s is not None
        assert run.tpot_interval_s is not None
        assert run.tpot_interval_s[0] <= run.tpot_interval_s[1]
    for run in result.runs[1:]:
        assert run.bound_s is not None
        assert result.compute_s is not None
        assert run.bound_s >= result.compute_s > 0
        assert run.stats.cache_slots == 9
        assert run.stats.decode.passes == len(reference.answers[1:]) * 4, "warm-up is not counted"
    assert result.runs[0].stats.cache_rate == 1
    assert result.bandwidth_bytes_per_s == 200e6
    assert result.link == "emulated 0.2 GB/s, 0 ms latency"


def test_settings_differ_as_the_rows_say(measured: tuple[Result, Reference, Path]) -> None:
    stats = [run.stats for run in measured[0].runs[1:]]
    assert [s.policy for s in stats] == ["lru", "lru", "next_use", "next_use"]
    assert [s.predictor for s in stats] == [None, None, None, "gate"]
    configs = [system.config for system in SYSTEMS]
    assert [(c.early_preemption, c.reorder) for c in configs] == [
        (False, False),
        (True, True),
        (True, True),
        (True, True),
    ]


def test_the_same_policy_has_the_same_bound_whatever_else_is_on(measured: tuple[Result, Reference, Path]) -> None:
    bounds = [run.bound_s for run in measured[0].runs[1:]]
    assert bounds[0] == bounds[1]
    assert bounds[3] <= bounds[2], "forecasts also keep experts from being evicted"


def test_the_timeline_is_of_the_full_system(measured: tuple[Result, Reference, Path]) -> None:
    events = json.loads(measured[2].read_text())["traceEvents"]
    assert any(event["name"].startswith("experts L2") for event in events)
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert "predictor" in lanes


def test_the_reference_has_answers_and_routing_of_warm_up_and_prompts(
    measured: tuple[Result, Reference, Path],
) -> None:
    _, reference, _ = measured
    assert len(reference.answers) == len(reference.routing) == 3
    assert all(len(answer.tokens) == 5 for answer in reference.answers)
    assert all([p.phase for p in passes] == ["prefill", *["decode"] * 4] for passes in reference.routing)
    assert reference.token_bytes == 3 * 2 * (3 * 64 * 16 * 2)  # layers, top-k, three matrices of bf16


def test_a_system_with_wrong_logits_is_caught(checkpoint: Path, task: Task, tmp_path: Path) -> None:
    class Broken(BehindLink):
        def patched(self, system: Any, cache: str) -> Any:
            model = super().patched(system, cache)
            if system.predictor is not None:
                model.lm_head.register_forward_hook(lambda module, args, output: -output)
            return model

    source = Broken(checkpoint, torch.bfloat16)
    source.link = EmulatedLink(1e9)
    resident = source.resident()
    with pytest.raises(TokensDifferError, match=r"“\+ gate prefetch” generated other tokens"):
        compare(source, resident, record(resident, task), task, "40%", tmp_path / "t.json")
    # Every engine is closed all the same: the fixture of conftest.py looks for threads.


def test_without_a_resident_model_bounds_are_the_links(checkpoint: Path, task: Task, tmp_path: Path) -> None:
    source = BehindLink(checkpoint, torch.bfloat16)
    source.link = EmulatedLink(1e6)
    reference = record(source.resident(), task)
    result = compare(source, None, reference, task, "40%", tmp_path / "t.json", SYSTEMS[1:3])
    assert [run.name for run in result.runs] == [system.name for system in SYSTEMS[1:3]]
    assert result.compute_s is None
    assert all(run.bound_s is not None and 0 <= run.bound_ratio > 0.97 for run in result.runs)


def test_verify_names_the_first_difference() -> None:
    expected = Generation((1, 2, 3, 4), 0.0, ())
    verify("same", 0, dataclasses.replace(expected, ttft_s=9.0), expected)
    with pytest.raises(TokensDifferError, match=r"prompt 3, from token 2 on: \[9, 4\] instead of \[3, 4\]"):
        verify("other", 3, Generation((1, 2, 9, 4), 0.0, ()), expected)
    with pytest.raises(TokensDifferError, match="from token 2 on"):
        verify("shorter", 3, Generation((1, 2), 0.0, ()), expected)


def test_stock_tensors_are_aligned_and_unchanged(checkpoint: Path) -> None:
    model = load_stock(checkpoint, torch.float32)
    assert all(parameter.data_ptr() % SLOT_ALIGNMENT_BYTES == 0 for parameter in model.parameters())
    assert not model.training
    stats = resident_stats(find_moe_layers(model))
    assert stats.cache_slots == 24
    assert stats.layer_visits == 0


def test_of_one_prompt_there_is_no_interval(measured: tuple[Result, Reference, Path]) -> None:
    result, _, _ = measured
    assert "] as fast as" in words(result)[0]
    assert "(median and 95% interval)" in words(result)[0]
    alone = result._replace(answers={name: answers[:1] for name, answers in result.answers.items()})
    assert "[" not in words(alone)[0]
    assert "(one prompt, which says little)" in words(alone)[0]


def test_tokens_beside_which_something_else_ran_do_not_set_the_pace() -> None:
    quick, slow = 0.010, 0.050
    answers = [Generation((1, 2), 1.0, (9.0,))]  # the warm-up does not count
    answers += [
        Generation((1, 2, 3, 4, 5), 1.0, gaps_s) for gaps_s in ((quick, slow, slow, quick), (slow, quick, slow, slow))
    ]
    assert Reference(answers, [], []).compute_s == pytest.approx(quick)
