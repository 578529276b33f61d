"""The sizes that `promoe batch` takes: given ones, planned ones, and those of few lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import byte_tokenizer, write_checkpoint
from tiny_models import build

from commands.batch.test_command import answers, write_lines
from commands.plan.planned import link
from commands.plan.test_throughput import EXACT, FAST
from promoe import cli
from promoe.commands.batch import planned
from promoe.commands.batch.options import Options
from promoe.commands.batch.planned import UNPLANNED, may_be_planned, sizes_for
from promoe.commands.batch.prompts import PromptLengths
from promoe.commands.batch.reading import read_batch
from promoe.commands.plan import many_prompts
from promoe.commands.plan.batch_measuring import measure_steps
from promoe.commands.plan.many_prompts import memory_for
from promoe.commands.plan.throughput import StepCost
from promoe.errors import ConfigError
from promoe.model.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "WORTH_PLANNING", 10)
    monkeypatch.setattr(many_prompts, "measure_link", lambda stand_in, store, folder, mode, workers: link())
    monkeypatch.setattr(many_prompts, "measure_steps", lambda stand_in: StepCost(1e-3, 0.0, 1e-4, 1e-9))
    monkeypatch.setattr(
        many_prompts, "measure_experts", lambda stand_in, kernels: (EXACT if kernels == "exact" else FAST, 2**10)
    )


def sized(checkpoint: str, source: Path, answered: int = 0, **fields: Any) -> Any:
    options = Options(checkpoint, str(source), out="unused.jsonl", max_tokens=8, **fields)
    lengths = PromptLengths(load_tokenizer(checkpoint), 8) if may_be_planned(options) else None
    lines = list(read_batch(options.source, 0, 8))[answered:]
    for line in lines:
        if lengths is not None and line.request is not None:
            lengths.add(line.request)
    found = sizes_for(options, lengths, len(lines))
    return found.cache, found.of_batch, found.plan


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", [{"custom_id": f"r{idx}", "prompt": [1] * 10} for idx in range(40)])


def test_many_lines_are_planned(checkpoint: str, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache, sizes, plan = sized(checkpoint, source)
    assert plan.model.work.answers == 40
    assert cache == "100.000000000000%"
    assert sizes == {name: getattr(plan.chosen.setting, name) for name in UNPLANNED}
    assert sizes["at_once"] in (32, 40)
    text = " ".join(capsys.readouterr().err.split())
    assert f"planned: {sizes['at_once']} sequences at once" in text
    assert "--kernels fast would give" in text


def test_what_is_given_is_kept(checkpoint: str, source: Path) -> None:
    cache, sizes, plan = sized(checkpoint, source, cache="50%", at_once=3)
    assert plan is not None
    assert (cache, sizes["at_once"], plan.chosen.setting.rate) == ("50%", 3, 0.5)
    given = {"at_once": 3, "step_tokens": 32, "kv_tokens": 512}
    assert sized(checkpoint, source, cache="50%", **given) == ("50%", given, None)
    _, _, plan = sized(checkpoint, source, kernels="fast")
    assert plan.chosen.setting.kernels == "fast"
    assert not plan.fast_pays


def test_few_lines_are_not_planned(checkpoint: str, source: Path) -> None:
    assert sized(checkpoint, source, 35) == ("auto", UNPLANNED, None)


def test_what_cannot_be_planned_is_answered_all_the_same(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = byte_tokenizer()
    build("deepseek_v3", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "padded")
    tokenizer.save_pretrained(tmp_path / "padded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(many_prompts, "measure_steps", measure_steps)
        assert sized(str(tmp_path / "padded"), source) == ("auto", UNPLANNED, None)
    assert "not planned: Transformers' continuous batching cannot serve this model" in capsys.readouterr().err


def test_too_little_memory(checkpoint: str, source: Path) -> None:
    with pytest.raises(ConfigError, match=r"fits into 1.0 MiB: .* Give more --memory"):
        sized(checkpoint, source, memory="1MiB")
    assert memory_for("3GiB") == 3 * 2**30
    with pytest.raises(ConfigError, match="A size such as"):
        memory_for("50%")


def test_a_planned_batch_is_answered(checkpoint: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert cli.main(["batch", checkpoint, str(source), "--out", str(out), "--max-tokens", "3", "--memory", "1GiB"]) == 0
    assert len(answers(out)) == 40
