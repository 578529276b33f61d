"""What `promoe-train evaluate` does with a recorded trace, from the folder to the table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from promoe.errors import ConfigError
from promoe.training.evaluate import evaluate, open_trace
from promoe.training.metrics import Transfer, transfer_of
from promoe.training.options import Evaluate

from . import traces
from .hidden_traces import random_trace, save_run


def options(trace: Path, **changes: Any) -> Evaluate:
    fields: dict[str, Any] = {"kinds": "token", "lookahead": "1,2", "policy": "lru", "cache": "50%"}
    return Evaluate(trace=str(trace), **fields | changes)


Capture = pytest.CaptureFixture[str]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    random_trace(tmp_path / "trace")
    return tmp_path / "trace"


def test_all_kinds_are_judged_on_a_recorded_trace(recorded: Path, tmp_path: Path, capsys: Capture) -> None:
    run = save_run(tmp_path / "run", num_tokens=80)
    names = ["gate", "linear", "sklearn-mlp", "token", "previous", "popularity", "correlation", str(run)]
    result = evaluate(options(recorded, kinds=",".join(names), json=str(tmp_path / "out.json")))
    assert list(result) == [*names[:-1], "residual"]
    assert json.loads((tmp_path / "out.json").read_text()) == result
    # Hidden states drift slowly after the second layer.
    assert result["gate"]["1"]["layers"][2] > result["popularity"]["1"]["layers"][2]
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].endswith(f"{recorded}: 3 MoE layers, 5 experts, top 2")
    assert lines[1].startswith("fitted on 8 prompts (64 tokens), judged on 2 (16), misses on the first 16 of them")
    assert lines[4].split() == ["kind", "k", "all", "prefill", "decode", "next", "exact", "cover", "Brier", "50%"]
    assert "note" not in out


def test_a_link_gives_a_table_of_its_own(recorded: Path, capsys: Capture) -> None:
    result = evaluate(options(recorded, bandwidth="24GB/s", expert_bytes="16MB", layer_seconds=0.0005))
    out = capsys.readouterr().out
    assert "link of 24.0 GB/s, experts of 16.0 MB, 500 µs from layer to layer" in out
    assert "GOODPRED/FETCHRATE in %" in out
    near, far = (result["token"][k] for k in ("1", "2"))
    predicted = near["misses"]["lru"]["50%"]["predicted_per_visit"]
    assert near["misses"]["lru"]["50%"]["fetch_rate"] == pytest.approx(min(1.0, 0.75 / predicted))
    assert far["misses"]["lru"]["50%"]["goodpred"] == pytest.approx(far["accuracy"] * min(1.0, 1.5 / predicted))


def test_the_recall_of_fetched_experts_is_a_table_of_its_own(recorded: Path, tmp_path: Path, capsys: Capture) -> None:
    arguments = {"kinds": "gate,popularity", "lookahead": "1,2,10", "cache": "", "fetched": "1,2,5"}
    result = evaluate(options(recorded, json=str(tmp_path / "out.json"), **arguments))
    lines = capsys.readouterr().out.splitlines()
    (head,) = (number for number, line in enumerate(lines) if line.split() == ["kind", "k", "1", "2", "5"])
    assert lines[head - 1].strip() == "recall of fetched, %"
    rows = [line.split() for line in lines[head + 1 : head + 7]]
    assert [row[0] for row in rows] == ["gate", "2", "10", "popularity", "2", "10"]
    gate = json.loads((tmp_path / "out.json").read_text())["gate"]
    assert rows[0][1:] == ["1", *(f"{100 * gate['1']['recall'][count]:.1f}" for count in ("1", "2", "5"))]
    assert rows[2] == ["10", "–", "–", "–"], "there is no layer so far away"
    # With all experts fetched nothing is missed; as many as are used are what accuracy counts, over the same layers.
    assert gate["1"]["recall"]["5"] == 1.0
    assert gate["1"]["recall"]["2"] == pytest.approx(gate["1"]["accuracy"])
    assert gate["2"]["recall"]["2"] == gate["2"]["layers"][2]
    assert 0 < gate["1"]["recall"]["1"] < gate["1"]["recall"]["2"] < 1
    assert gate["1"]["decode"]["recall_layers"]["2"][0] is None
    assert result["gate"] == gate


def test_a_predictor_that_saw_another_trace_is_noted(recorded: Path, tmp_path: Path, capsys: Capture) -> None:
    run = save_run(tmp_path / "run", num_tokens=1234)
    evaluate(options(recorded, kinds=str(run), cache=""))
    assert "was trained on a trace of 1,234 tokens, this one has 80" in capsys.readouterr().out


def test_plots_are_drawn(recorded: Path, tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("matplotlib")
    evaluate(options(recorded, kinds="gate", plots=str(tmp_path / "plots")))
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == [
        "accuracy.png",
        "accuracy_by_layer.png",
        "calibration.png",
    ]
    assert f"drawn to {tmp_path / 'plots' / 'accuracy.png'}" in capsys.readouterr().out


def test_a_trace_is_an_archive_or_a_folder(recorded: Path, tmp_path: Path) -> None:
    archive = traces.save(traces.random_trace(), tmp_path / "t.npz")
    assert open_trace(str(archive)).recorded is None
    trace = open_trace(str(recorded))
    assert trace.recorded is not None
    assert trace.generated is not None


@pytest.mark.parametrize(
    ("bandwidth", "expert_bytes", "wanted"),
    [
        ("24GB/s", "18.9MiB", Transfer(24e9, 18.9 * 2**20, 0.002)),
        ("24e9", "16000000", Transfer(24e9, 16e6, 0.002)),
        (" 1.5 gib/s ", "3KB", Transfer(1.5 * 2**30, 3000.0, 0.002)),
    ],
)
def test_a_link_may_be_written_with_units(bandwidth: str, expert_bytes: str, wanted: Transfer) -> None:
    assert transfer_of(bandwidth, expert_bytes, 0.002) == wanted
    assert transfer_of(None, None, None) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("24GB/s", None, 0.1),
            r"needs all of --bandwidth, --expert-bytes, --layer-seconds\. --expert-bytes is missing",
        ),
        (("fast", "1MB", 0.1), r"--bandwidth must be a number of bytes more than 0, for example 24GB/s\. Got 'fast'"),
        (("24GX", "1MB", 0.1), "Got '24GX'"),
        (("1.2.3", "1MB", 0.1), "Got '1.2.3'"),
        (("24GB/s", "0", 0.1), "--expert-bytes must be .* more than 0, for example 18.9MiB"),
        (("24GB/s", "1MB", 0.0), "--layer-seconds must be more than 0"),
        (("24GB/s", "1MB", float("nan")), "--layer-seconds must be more than 0"),
    ],
)
def test_a_link_that_is_none_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        transfer_of(*arguments)


def test_ids_alone_load_no_training_library(tmp_path: Path) -> None:
    archive = traces.save(traces.random_trace(), tmp_path / "t.npz")
    program = (
        "import sys\nfrom promoe.training import cli\n"
        f"assert cli.main(['evaluate', '--trace', {str(archive)!r}]) == 0\n"
        "print([name for name in ('torch', 'lightning', 'datasets', 'matplotlib') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip().splitlines()[-1] == "[]"
