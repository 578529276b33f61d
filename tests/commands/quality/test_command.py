"""The whole command on a tiny model: its figures are those of the models compared directly, in memory."""

from __future__ import annotations

import gc
import io
import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import promoe
from promoe import cli
from promoe.commands.quality import measuring, spool
from promoe.commands.quality.command import run_quality
from promoe.commands.quality.measuring import Result
from promoe.commands.quality.options import Options
from promoe.commands.quality.sample import Sample, read_sample
from promoe.errors import CheckpointError, ConfigError

SETTINGS: dict[str, Any] = {"tokens": 300, "window": 64, "prompts": 2, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def measured(checkpoint: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """One run over all forms, and the reference once more."""
    folder = tmp_path_factory.mktemp("measured")
    options = Options(
        str(checkpoint),
        experts=["checkpoint", "int8", "int4", "int2"],
        data=str(texts),
        json=str(folder / "quality.json"),
        plot=str(folder / "quality.png"),
        **SETTINGS,
    )
    out = io.StringIO()
    return SimpleNamespace(options=options, results=run_quality(options, out), printed=out.getvalue(), folder=folder)


def forms_of(measured: SimpleNamespace) -> dict[str, Result]:
    """The results without the first one, the reference."""
    return {result.form.name: result for result in measured.results[1:]}


def test_the_reference_opened_again_is_exactly_the_same(measured: SimpleNamespace) -> None:
    first, again = measured.results[:2]
    assert first.figures == again.figures
    assert (again.figures.kl, again.figures.agreement, again.figures.loss_increase) == (0, 1, 0)
    assert again.same_tokens == SETTINGS["max_new_tokens"]


def test_fewer_bits_change_more(measured: SimpleNamespace) -> None:
    kl = {name: result.figures.kl for name, result in forms_of(measured).items()}
    assert 0 == kl["checkpoint"] < kl["int8"] < kl["int4"] < kl["int2"]
    agreement = {name: result.figures.agreement for name, result in forms_of(measured).items()}
    assert 1 == agreement["checkpoint"] >= agreement["int8"] >= agreement["int4"] >= agreement["int2"]
    assert agreement["int2"] < 1


def logits_of(experts: str, checkpoint: Path, sample: Sample) -> tuple[list[torch.Tensor], list[list[int]]]:
    """Logits of the windows and greedy answers of a model with all its experts in memory."""
    model = promoe.from_pretrained(checkpoint, experts=experts, cache="100%")
    with torch.no_grad():
        logits = [model(window.unsqueeze(0)).logits[0] for window in sample.windows]
        answers = [
            model.generate(prompt.unsqueeze(0), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
            for prompt in sample.prompts
        ]
    model.promoe.close()
    return logits, answers


@pytest.mark.parametrize("experts", ["int8", "int2"])
def test_figures_are_those_of_the_models_in_memory(measured: SimpleNamespace, checkpoint: Path, experts: str) -> None:
    sample = read_sample(measured.options, AutoTokenizer.from_pretrained(checkpoint))
    assert [len(window) for window in sample.windows] == [64, 64, 64, 64, 44]
    (logits, answers), (expected, expected_answers) = (
        logits_of(one, checkpoint, sample) for one in (experts, "checkpoint")
    )
    losses, divergences, same = [], [], []
    for window, ours, theirs in zip(sample.windows, logits, expected, strict=True):
        log_q, log_p = (one[:-1].double().log_softmax(dim=1) for one in (ours, theirs))
        losses.append(torch.nn.functional.nll_loss(log_q, window[1:], reduction="none"))
        divergences.append(torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=1))
        same.append(ours[:-1].argmax(dim=1) == theirs[:-1].argmax(dim=1))
    found = forms_of(measured)[experts]
    assert found.figures.loss == pytest.approx(float(torch.cat(losses).mean()), rel=1e-12)
    assert found.figures.perplexity == pytest.approx(float(torch.cat(losses).mean().exp()), rel=1e-12)
    assert found.figures.kl == pytest.approx(float(torch.cat(divergences).mean()), rel=1e-9)
    assert found.figures.agreement == float(torch.cat(same).double().mean())
    counts = [
        next((i for i in range(12) if one[i : i + 1] != other[i : i + 1]), 12)
        for one, other in zip(answers, expected_answers, strict=True)
    ]
    assert found.same_tokens == sum(counts) / 2


def test_blocks_of_rows_change_nothing(
    measured: SimpleNamespace, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "BLOCK_ELEMENTS", 259 * 7)  # the vocabulary has 259 tokens
    options = Options(str(checkpoint), experts=["int4"], data=measured.options.data, **SETTINGS)
    _, found = run_quality(options, io.StringIO())
    assert found == forms_of(measured)["int4"]


def test_a_small_cache_and_another_predictor_change_nothing(measured: SimpleNamespace, checkpoint: Path) -> None:
    options = Options(
        str(checkpoint), experts=["int4"], data=measured.options.data, cache="20%", predictor="none", **SETTINGS
    )
    reference, found = run_quality(options, io.StringIO())
    assert reference == measured.results[0]
    assert found == forms_of(measured)["int4"]


def test_never_two_models_at_once(checkpoint: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[weakref.ref[Any]] = []
    real = measuring.from_pretrained

    def count(*args: Any, **options: Any) -> Any:
        assert [reference() for reference in opened] == [None] * len(opened)
        model = real(*args, **options)
        opened.append(weakref.ref(model))
        return model

    monkeypatch.setattr(measuring, "from_pretrained", count)
    run_quality(Options(str(checkpoint), experts=["int8", "int4"], data=str(texts), **SETTINGS), io.StringIO())
    gc.collect()
    assert len(opened) == 3
    assert opened[-1]() is None


def test_what_is_printed_and_written(measured: SimpleNamespace) -> None:
    lines = measured.printed.splitlines()
    assert lines[0].startswith("model on 300 tokens (")
    assert "in 5 windows of 64, of which 295 are predicted, and 2 greedy answers." in " ".join(lines[:3])
    head, *rows = (line.split() for line in lines if line.startswith(("experts ", "checkpoint ", "int")))
    assert head[:4] == ["experts", "bits", "memory", "loss"]
    assert [row[:2] for row in rows] == [
        ["checkpoint", "16.00"], ["checkpoint", "16.00"], ["int8", "8.17"], ["int4", "5.00"], ["int2", "3.00"],
    ]  # fmt: skip
    assert lines[-2:] == [f"written to {measured.options.json}", f"drawn to {measured.options.plot}"]
    written = json.loads(Path(measured.options.json).read_text())
    assert (written["tokens"], written["predicted_tokens"], written["answers"]) == (300, 295, 2)
    for entry, result in zip(written["forms"], measured.results, strict=True):
        assert (entry["experts"], entry["kl"]) == (result.form.experts, result.figures.kl)
        assert (entry["perplexity"], entry["same_tokens"]) == (result.figures.perplexity, result.same_tokens)
        assert entry["experts_bytes"] == result.form.nbytes
    assert Path(measured.options.plot).read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in measured.folder.iterdir()} == {"quality.json", "quality.png"}


def test_without_answers(checkpoint: Path, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--experts", "int4", "--data", str(texts), "--tokens", "100", "--prompts", "0"]
    assert cli.main(["quality", str(checkpoint), *arguments]) == 0
    assert "answer" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--experts", "int5"], "experts='int5' was asked for, but it is not a folder with an experts.json"),
        (
            ["--experts", "int3"],
            "promoe-int3 has no experts.json. Write them once with `promoe quantize MODEL --bits 3`",
        ),
        (["--tokens", "100000"], "100,000 tokens were asked for, but the data"),
        (["--window", "1"], "--window must be at least 2. Got 1 instead."),
        (["--window", "100000"], "--window 100000 is longer than the "),
        (["--plot", "quality.doc"], "--plot must end in .png, .svg, .pdf. Got 'quality.doc' instead."),
        (["--json", "no/such/folder.json"], "the folder 'no/such' does not exist"),
        (["--spool", "/no/such/folder"], "Logits cannot be written into '/no/such/folder': No such file or directory"),
        (["--data", "no-such.jsonl"], "no-such.jsonl"),
    ],
)
def test_what_does_not_go(
    options: list[str], message: str, checkpoint: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["quality", str(checkpoint), "--data", str(texts), *options]) == 2
    assert message in capsys.readouterr().err


def test_too_little_room_for_the_logits(checkpoint: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match=r"The logits of 295 tokens take .* has only 1000 B free"):
        run_quality(Options(str(checkpoint), data=str(texts), **SETTINGS), io.StringIO())


def test_nan_is_an_error(checkpoint: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = measuring.from_pretrained

    def damaged(*args: Any, **options: Any) -> Any:
        model = real(*args, **options)
        if options["experts"] == "int4":
            model.get_output_embeddings().weight.data.fill_(float("nan"))
        return model

    monkeypatch.setattr(measuring, "from_pretrained", damaged)
    with pytest.raises(CheckpointError, match="The model computes NaN with its experts as int4"):
        run_quality(Options(str(checkpoint), experts=["int4"], data=str(texts), **SETTINGS), io.StringIO())
