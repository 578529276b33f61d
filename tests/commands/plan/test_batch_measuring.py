"""What is measured of steps with many sequences: their tokens are counted, and experts are left out or run."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from tiny_checkpoint import write_checkpoint

from commands.plan.test_stand_in import read
from promoe.commands.plan import batch_measuring
from promoe.commands.plan.batch_measuring import measure_experts, measure_steps
from promoe.commands.plan.reading import read_model
from promoe.commands.plan.stand_in import StandIn
from promoe.commands.plan.throughput import Step
from promoe.errors import UnsupportedModelError
from promoe.experts.kernels.formats import formats_in


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_measuring, "STEPS", ((2, 8, 32), (4, 16, 32)))
    monkeypatch.setattr(batch_measuring, "TOKENS", (1, 4, 16))


def test_steps_are_counted_and_experts_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(tmp_path)
    seen: list[list[tuple[Step, float]]] = []
    measured = batch_measuring._steps

    def noted(*args: object) -> list[tuple[Step, float]]:
        seen.append(measured(*args))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(batch_measuring, "_steps", noted)
    with closing(StandIn(found.model, found.layers, 2**16)) as stand_in:
        cost = measure_steps(stand_in)
        assert stand_in.with_experts
        assert stand_in._timed.experts_used == 0
    # Four prompts of 16 tokens, and seven more tokens of each.
    steps = [step for step, _ in seen[-1]]
    assert sum(step.tokens for step in steps) == 4 * 16 + 4 * (batch_measuring.NEW_TOKENS - 1)
    assert max(step.tokens for step in steps) <= 32
    assert max(step.sequences for step in steps) == 4, "all sequences are computed together"
    assert steps[0].kept == 0
    assert steps[-1].kept % (16 + batch_measuring.NEW_TOKENS - 2) == 0, "the last token of one sequence or more"
    assert all(seconds > 0 for _, seconds in seen[-1])
    assert cost(Step(8, 8, 100)) > 0


@pytest.mark.parametrize("kernels", ["exact", "fast"])
def test_experts_take_longer_with_more_rows(tmp_path: Path, kernels: str) -> None:
    found = read(tmp_path)
    with closing(StandIn(found.model, found.layers, 2**16)) as stand_in:
        curve, nbytes = measure_experts(stand_in, kernels)
        assert stand_in.fast is None
    assert nbytes == found.layers[0].layout.payload_bytes
    rows = [point[0] for point in curve.points]
    assert rows == sorted(rows)
    assert rows[0] == 1.0
    assert rows[-1] > 2.0


def test_quantised_experts_have_the_bytes_of_their_slots(tmp_path: Path) -> None:
    found = read_model(str(write_checkpoint(tmp_path / "checkpoint", hidden=64, intermediate=64)), experts="int8")
    layout = found.sizes.layers[0].layout
    with closing(StandIn(found.model, found.layers, 2**16, formats_in([layout]))) as stand_in:
        nbytes = measure_experts(stand_in, "exact")[1]
    assert nbytes == layout.payload_bytes < found.layers[0].layout.payload_bytes


def test_a_model_of_padded_batches_is_not_measured(tmp_path: Path) -> None:
    found = read(tmp_path, "deepseek_v3")
    with (
        closing(StandIn(found.model, found.layers, 2**16)) as stand_in,
        pytest.raises(UnsupportedModelError, match="padded batches"),
    ):
        measure_steps(stand_in)
