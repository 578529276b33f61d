"""The notebooks run with small settings, and hold what their sources say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import nbclient
import pytest
import torch
from tiny_checkpoint import write_checkpoint

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SOURCES = sorted(EXAMPLES.glob("[0-9]*.py"))
MAX_BYTES = 400_000
# Absolute paths, which would describe the machine. URLs do not match, because a slash precedes theirs.
PATH = re.compile(r"(?<![\w/.])/(?:tmp|home|root|usr|opt|mnt|var|Users|private)/")


def outputs_of(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_executed_notebook_is_that_of_its_source(source: Path) -> None:
    executed = jupytext.read(source.with_suffix(".ipynb"))
    wanted = [(cell.cell_type, cell.source) for cell in jupytext.read(source).cells]
    assert [(cell.cell_type, cell.source) for cell in executed.cells] == wanted
    code = [cell for cell in executed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_what_it_shows_is_of_the_project_alone(source: Path) -> None:
    notebook = source.with_suffix(".ipynb")
    text = notebook.read_text(encoding="utf-8")
    assert len(text.encode()) < MAX_BYTES
    outputs = outputs_of(jupytext.read(notebook))
    kinds = {(output.output_type, output.get("name")) for output in outputs}
    assert kinds <= {("stream", "stdout"), ("display_data", None), ("execute_result", None)}
    drawn = [output for output in outputs if "image/png" in output.get("data", {})]
    assert bool(drawn) == ("%matplotlib inline" in text or "plt.show()" in text)
    shown = re.sub(r'"image/png": "[^"]*"', "", text)
    assert not PATH.search(shown)
    assert str(EXAMPLES.parent) not in shown


@pytest.fixture
def own_threads() -> Iterator[None]:
    """Restore the number of threads, which notebooks set."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Set what every notebook reads: a tiny model, few prompts, few tokens."""
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([f"Question {number}: what is {'very ' * number}good?" for number in range(6)]))
    model = write_checkpoint(tmp_path / "model", hidden=64, intermediate=64)
    values = {"MODEL": str(model), "PROMPTS": str(prompts), "NEW_TOKENS": "6"}
    for name, value in values.items():
        monkeypatch.setenv(f"PROMOE_{name}", value)
    monkeypatch.chdir(tmp_path)
    return values


def run(name: str) -> dict[str, Any]:
    """Run a notebook's code cell by cell in this process, where libraries are already loaded and warnings are errors.

    Returns:
        The notebook's variables.
    """
    (source,) = (path for path in SOURCES if path.stem == name)
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(jupytext.read(source).cells):
        if cell.cell_type == "code":
            code = re.sub(r"^%.*$", "", cell.source, flags=re.MULTILINE)
            exec(compile(code, f"{source.name}, cell {number}", "exec"), names)
    return names


@pytest.mark.usefixtures("settings", "own_threads")
def test_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    names = run("01_quickstart")
    assert "same tokens, same logits" in capsys.readouterr().out
    assert list(names["decode"]) == ["12.5%", "25%", "50%", "75%"]


def test_training_a_predictor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [{"prompt": f"Question {number}: what is {'very ' * (number % 7)}good?"} for number in range(40)]
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = {
        "MODEL": str(write_checkpoint(tmp_path / "model")),
        "DATA": str(data),
        "TOKENS": "1500",
        "EPOCHS": "1",
        "LOOKAHEAD": "2",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"PROMOE_{name}", value)
    notebook = jupytext.read(EXAMPLES / "02_train_a_predictor.py")
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output.text for output in outputs_of(notebook) if output.output_type == "stream")
    assert "residual of" in printed
    assert printed.count("there in time") == 3


@pytest.mark.usefixtures("settings", "own_threads")
def test_reading_a_timeline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"PROMPT_TOKENS": "64", "TURNS": "1"}.items():
        monkeypatch.setenv(f"PROMOE_{name}", value)
    names = run("03_read_a_timeline")
    assert {name: len(passes) for name, passes in names["decode"].items()} == {
        "without prefetch": 5,
        "with prefetch": 5,
    }
    text = capsys.readouterr().out
    assert "there when the layer began" in text


@pytest.mark.usefixtures("settings", "own_threads")
def test_choosing_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMOE_TOKENS", "60")
    names = run("04_choose_a_cache")
    assert {policy: len(results) for policy, results in names["swept"].items()} == dict.fromkeys(
        ("lru", "default", "belady"), 15
    )
    assert len(names["counted"]) == 6


@pytest.mark.usefixtures("own_threads")
def test_bringing_ones_own_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run("05_bring_your_own_model")
    printed = capsys.readouterr().out
    assert "has no MoE layers" in printed
    assert "ModuleList" in printed
    assert printed.count("supported\n") >= 1


@pytest.mark.usefixtures("settings", "own_threads")
def test_fewer_bits(capsys: pytest.CaptureFixture[str]) -> None:
    names = run("06_fewer_bits")
    assert names["kl"]["checkpoint"] == 0 < names["kl"]["int8"] < names["kl"]["int4"] < names["kl"]["int2"]
    slots = [stats.cache_slots for _, stats in names["found"].values()]
    assert slots == sorted(slots)
    assert "the same bits with all experts in memory and with a fifth of them" in capsys.readouterr().out


@pytest.mark.usefixtures("settings", "own_threads")
def test_many_prompts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PROMOE_GROUPS", "1 4")
    names = run("07_many_prompts")
    assert (names["again"].kept, names["again"].answers + names["again"].errors) == (2, 3)
    assert len(names["out"].read_text().splitlines()) == 5
    assert min(names["speeds"] + names["planned"]) > 0
    assert "The model's context is" in capsys.readouterr().out
