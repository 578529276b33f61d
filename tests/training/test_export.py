from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from promoe.predictors.trained import TrainedPredictor
from promoe.training import cli
from promoe.training.export import accuracy_table
from promoe.training.fit import fit
from training.learnable import make_fit, write_trace

EVALUATION = {
    "gate": {"1": {"accuracy": 0.775}, "8": {"accuracy": 0.4461}},
    "residual": {"1": {"accuracy": 0.871}, "8": {"accuracy": None}},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    fit(make_fit(write_trace(tmp_path_factory.mktemp("trace")), folder, max_epochs=1))
    return folder


def test_a_folder_with_weights_config_and_card(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "evaluation.json").write_text(json.dumps(EVALUATION))
    arguments = ["export", "--run", str(run), "--out", str(tmp_path / "out")]
    assert cli.main([*arguments, "--evaluation", str(tmp_path / "evaluation.json")]) == 0
    assert f'promoe.from_pretrained(MODEL, predictor="{tmp_path / "out"}")' in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    exported, kept = (TrainedPredictor.load(str(folder)) for folder in (tmp_path / "out", run / "predictor"))
    assert all(
        torch.equal(a, b) for a, b in zip(exported.state_dict().values(), kept.state_dict().values(), strict=True)
    )
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| predictor | k = 1 | k = 8 |" in card
    assert "| gate | 77.5 | 44.6 |" in card
    assert "| residual | 87.1 | – |" in card
    assert "- loss: ce_kl" in card
    assert "3 MoE layers, 6 experts, top 2" in card


def test_a_later_export_replaces_the_card(run: Path, tmp_path: Path) -> None:
    arguments = ["export", "--run", str(run), "--out", str(tmp_path / "out")]
    assert cli.main(arguments) == 0
    assert "Not evaluated yet" in (tmp_path / "out" / "README.md").read_text()
    (tmp_path / "evaluation.json").write_text(json.dumps(EVALUATION))
    assert cli.main([*arguments, "--evaluation", str(tmp_path / "evaluation.json")]) == 0
    assert "| gate | 77.5 | 44.6 |" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.json", None, "Check the path"),
        ("broken.json", "{", "Check the path"),
        ("list.json", "[]", "must hold a JSON object. Found list"),
        ("other.json", '{"gate": 3}', "not what `promoe-train evaluate --json` writes"),
    ],
)
def test_evaluations_that_cannot_be_read(
    name: str, content: str | None, message: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    arguments = ["export", "--run", str(run), "--out", str(tmp_path / "out"), "--evaluation", str(tmp_path / name)]
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_runs_and_folders_that_cannot_be_used(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", "--run", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "holds no finished run" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("words")
    assert cli.main(["export", "--run", str(run), "--out", str(tmp_path / "mine")]) == 2
    assert "holds something other than a predictor" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    (tmp_path / "file").write_text("")
    assert cli.main(["export", "--run", str(run), "--out", str(tmp_path / "file")]) == 2
    assert "file" in capsys.readouterr().err


def test_the_table_of_nothing() -> None:
    assert accuracy_table({}).startswith("Not evaluated yet")
