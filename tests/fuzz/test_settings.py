"""Small files that commands go by: evaluations, runs, lists of prompts, marks of what is ready."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from predictors.trained_predictors import make
from training.traces import random_trace

from promoe.commands.bench.example import Example, read_prompts
from promoe.errors import ConfigError
from promoe.training.export import accuracy_table, export, read_object
from promoe.training.fit import _checked, _claim
from promoe.training.kinds import PREDICTOR_FOLDER, SETTINGS_FILE, note_on_training
from promoe.training.options import Export

from .inputs import fuzzed, outcome
from .mutations import DEEP, damaged, json_bytes

EVALUATION: dict[str, Any] = {
    "residual": {"1": {"accuracy": 0.87, "exact": 0.5, "layers": [0.5, None]}, "4": {"accuracy": None}},
    "gate": {"1": {"accuracy": 0.77}},
}
SETTINGS: dict[str, Any] = {
    "kind": "residual",
    "num_tokens": 120,
    "trainer": {"max_epochs": 3},
    "seed": 0,
    "learning_rate": 0.002,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of `promoe-train fit`."""
    folder = tmp_path_factory.mktemp("fuzz") / "run"
    make(num_layers=2, hidden_size=4, num_experts=4, lookahead=1, width=3).save_pretrained(folder / PREDICTOR_FOLDER)
    (folder / SETTINGS_FILE).write_text(json.dumps(SETTINGS))
    return folder


@fuzzed(100)
@given(content=json_bytes(EVALUATION))
@example(content=b"[" * DEEP)
@example(content=json.dumps({"gate": {"1": {"accuracy": 10**400}}}).encode())
@example(content=json.dumps({"gate": {"1": {"accuracy": "x"}}}).encode())
@example(content=b'{"\\ud800": {"1": {"accuracy": 0.5}}}')
@example(content=json.dumps({"a|b\n# c": {"1": {"accuracy": 0.5}}}).encode())
def test_evaluations(run: Path, content: bytes) -> None:
    path = run / "evaluation.json"
    path.write_bytes(content)
    table = outcome("evaluation", lambda: accuracy_table(read_object(path)))
    if table:
        table.encode()
        assert len({line.count("|") - line.count("\\|") for line in table.splitlines() if line.startswith("|")}) <= 1
        assert all(line.startswith("|") for line in table.splitlines()) or table.startswith("Not evaluated")


@fuzzed(15)
@given(content=json_bytes(EVALUATION), settings=json_bytes(SETTINGS))
@example(content=b'{"{{ 7 * 7 }}": {"1": {"accuracy": 0.5}}}', settings=b'{"kind": "{{ 7 * 7 }}"}')
@example(content=b"{}", settings=b'{"kind": "\\ud800"}')
def test_exports(run: Path, content: bytes, settings: bytes) -> None:
    path, out = run / "evaluation.json", run.parent / "exported"
    path.write_bytes(content)
    (run / SETTINGS_FILE).write_bytes(settings)
    shutil.rmtree(out, ignore_errors=True)
    outcome("export", lambda: export(Export(run=str(run), out=str(out), evaluation=str(path))))
    if (out / "README.md").exists():
        assert "| 49" not in (out / "README.md").read_text()


@fuzzed(100)
@given(content=json_bytes(SETTINGS))
@example(content=b"[" * DEEP)
@example(content=b'{"num_tokens": "many"}')
@example(content=b'{"num_tokens": []}')
def test_settings_of_a_run(run: Path, content: bytes) -> None:
    (run / SETTINGS_FILE).write_bytes(content)
    outcome("settings of a run, noted", lambda: note_on_training(str(run), random_trace()))
    outcome("settings of a run, gone on with", lambda: _claim(run, SETTINGS))


@fuzzed(60)
@given(content=json_bytes(["Why?", "How?"]))
@example(content=b"[" * DEEP)
def test_lists_of_prompts(run: Path, content: bytes) -> None:
    path = run / "prompts.json"
    path.write_bytes(content)
    found = outcome("lists of prompts", lambda: read_prompts(path, 1, "Give more."))
    assert found is None or all(isinstance(text, str) and text.strip() for text in found)


def test_a_run_is_not_gone_on_with_from_a_pickle(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return (open, (str(tmp_path / "ran"), "w"))

    for content in (pickle.dumps(Hostile()), b"", b"PK\3\4", pickle.dumps({"state_dict": {}})[:9]):
        (tmp_path / "last.ckpt").write_bytes(content)
        with pytest.raises(ConfigError, match="Delete it to begin again"):
            _checked(tmp_path / "last.ckpt")
    torch.save({"state_dict": {}, "x": Hostile()}, tmp_path / "last.ckpt")
    (tmp_path / "ran").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="Delete it to begin again"):
        _checked(tmp_path / "last.ckpt")
    assert not (tmp_path / "ran").exists()


CARD = b"- Held-out loss **3.870** nats per token\n"


@fuzzed(40)
@given(content=damaged(CARD))
@example(content=b"\xff" + CARD)
@example(content=b"held-out loss " * 5000)
def test_model_cards(run: Path, content: bytes) -> None:
    (run / "README.md").write_bytes(content)
    loss = outcome("model cards", Example(run, run).heldout_loss)
    assert loss is None or isinstance(loss, float)
