from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import write_checkout

import promoe
from promoe.commands.bench.example import MARKER, Example, find_example
from promoe.errors import ConfigError, PromoeError


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkout(tmp_path_factory.mktemp("checkout"), loss=3.72)


def test_the_current_folders_example_is_found(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout)
    example = find_example()
    assert example.checkpoint == checkout / "examples" / "sharegpt_moe" / "checkpoint"
    assert example.prompts(2) == ["Question 0: what is good?", "Question 1: what is very good?"]
    assert example.heldout_loss() == 3.72


def test_without_a_checkout_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(promoe, "__file__", str(tmp_path / "site-packages" / "promoe" / "__init__.py"))
    with pytest.raises(ConfigError, match="Clone the repository"):
        find_example()


def test_a_missing_model_names_the_option(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout)
    with pytest.raises(ConfigError, match="--model"):
        find_example(str(tmp_path))


def test_prompts_are_checked(checkout: Path, tmp_path: Path) -> None:
    example = Example(checkout / "examples" / "sharegpt_moe", tmp_path)
    with pytest.raises(ConfigError, match=r"holds 6 prompts; 7 are needed.*--prompts"):
        example.prompts(7)
    (tmp_path / "heldout_prompts.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(ConfigError, match="JSON list of texts"):
        Example(tmp_path, tmp_path).prompts(1)
    (tmp_path / "heldout_prompts.json").write_text("[")
    with pytest.raises(ConfigError, match="Cannot read"):
        Example(tmp_path, tmp_path).prompts(1)
    assert Example(tmp_path, tmp_path).heldout_loss() is None
    with pytest.raises(ConfigError, match=r"widen\.py"):
        Example(tmp_path, tmp_path).widen(tmp_path / "wide", 2, torch.bfloat16)


def test_widening_reuses_its_result_and_replaces_another_models(checkout: Path, tmp_path: Path) -> None:
    example = find_example_in(checkout)
    wide = tmp_path / "wide"
    assert example.widen(wide, 2, torch.bfloat16) == wide
    written = {path.name: path.stat().st_mtime_ns for path in wide.iterdir()}
    example.widen(wide, 2, torch.bfloat16)
    assert {path.name: path.stat().st_mtime_ns for path in wide.iterdir()} == written
    example.widen(wide, 4, torch.bfloat16)
    assert json.loads((wide / MARKER).read_text())["repeat"] == 4


def test_a_folder_that_is_not_ours_is_left_alone(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(PromoeError, match="exists"):
        find_example_in(checkout).widen(tmp_path, 2, torch.bfloat16)
    assert (tmp_path / "mine.txt").read_text() == "keep"


def find_example_in(checkout: Path) -> Example:
    folder = checkout / "examples" / "sharegpt_moe"
    return Example(folder, folder / "checkpoint")
