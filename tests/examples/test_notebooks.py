"""The notebooks run, on settings of seconds, and are what their sources say."""

from __future__ import annotations

import json
from pathlib import Path

import jupytext
import nbclient
import pytest
from tiny_checkpoint import write_checkpoint

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SOURCES = sorted(EXAMPLES.glob("[0-9]*.py"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_executed_notebook_is_that_of_its_source(source: Path) -> None:
    executed = jupytext.read(source.with_suffix(".ipynb"))
    wanted = [(cell.cell_type, cell.source) for cell in jupytext.read(source).cells]
    assert [(cell.cell_type, cell.source) for cell in executed.cells] == wanted
    code = [cell for cell in executed.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    outputs = [output for cell in code for output in cell.outputs]
    assert not any(output.output_type == "error" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)


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
    printed = "".join(
        output.text for cell in notebook.cells for output in cell.get("outputs", []) if output.output_type == "stream"
    )
    assert "residual of" in printed
    assert printed.count("there in time") == 3
