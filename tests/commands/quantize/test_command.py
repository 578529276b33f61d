"""`promoe quantize`: what it says, and what it leaves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from synthetic_runs import make_run, make_stats
from tiny_checkpoint import write_checkpoint

import promoe
from promoe import cli
from promoe.experts.kernels.int4 import Int4
from promoe.runtime.popularity import usage_rates
from promoe.scheduler import ExpertKey
from promoe.stats.saved_run import save_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("quantize") / "model", chat=False, hidden=128, intermediate=64)


def test_it_says_what_was_gained_and_lost_and_what_comes_next(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["quantize", str(folder)]) == 0
    sizes, errors, use, measure = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        rf"1\.1 MiB of experts are .* KiB in int4 \(\d\d%\), written into {folder}/promoe-int4 in .*\.", sizes
    )
    assert re.match(r"Relative error of the weights, layer by layer: [\d.]+% on average, [\d.]+% to [\d.]+%\. ", errors)
    assert use == (
        f"Use them: promoe run {folder} --experts int4, or promoe.from_pretrained('{folder}', experts='int4')."
    )
    assert measure == f"Measure what that changes: promoe quality {folder} --experts int4"


def test_a_folder_of_ones_own(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine"
    assert (
        cli.main(["quantize", str(folder), "--bits", "3", "--method", "hqq", "--group", "32", "--out", str(out)]) == 0
    )
    assert f"--experts {out}, or " in capsys.readouterr().out
    model = promoe.from_pretrained(folder, cache="30%", experts=out)
    formats = [spec.format for spec in model.promoe._pools[0].layout.tensors]
    assert [(made.bits, made.group) for made in formats if isinstance(made, Int4)] == [(3, 32)] * 2
    model.promoe.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bits", "5"], "5"),
        (["--group", "48"], "48"),
    ],
)
def test_what_does_not_go(folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["quantize", str(folder), *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_eight_bits_have_one_method(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["quantize", str(folder), "--bits", "8", "--method", "hqq"]) == 2
    assert "--method hqq is for 4 bits and fewer. Leave it out with --bits 8." in capsys.readouterr().err


# -- more bits for the most used experts ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def counts(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What `promoe run --report` wrote of a run."""
    page = tmp_path_factory.mktemp("run") / "a.html"
    arguments = ["run", str(folder), "What is a lighthouse?", "--cache", "50%", "--max-new-tokens", "4"]
    assert cli.main([*arguments, "--report", str(page)]) == 0
    return str(page.with_suffix(".json"))


def test_the_most_used_experts_have_more_bits(folder: Path, counts: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cli.main(["quantize", str(folder), "--hot", "8", "--hot-share", "30%", "--counts", counts]) == 0
    sizes, _, use, measure = capsys.readouterr().out.splitlines()
    assert " in int4, and int8 for the 6 most used of 24 (" in sizes
    assert f"written into {folder}/promoe-int4-hot8 in " in sizes
    assert use.startswith(f"Use them: promoe run {folder} --experts int4-hot8, or ")
    assert measure.endswith("--experts int4-hot8")
    rates = usage_rates(counts, [8] * 3, [2] * 3)
    model = promoe.from_pretrained(folder, cache="50%", experts="int4-hot8")
    hot = model.promoe.runtime.engine.store.hot
    for layer_idx, of_layer in enumerate(rates):
        kept = [rate for idx, rate in enumerate(of_layer) if ExpertKey(layer_idx, idx) in hot.experts]
        assert sorted(kept) == sorted(of_layer)[-2:]
    assert model.promoe.stats().store == "SlotFilesStore, int8/int4, 5.42 bits per weight"
    model.promoe.close()


def test_it_serves_an_answer(folder: Path, counts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "mixed")
    more = ["--hot", "4", "--bits", "2", "--method", "hqq", "--counts", counts, "--out", out]
    assert cli.main(["quantize", str(folder), *more]) == 0
    answers = []
    for cache in ("100%", "25%"):
        capsys.readouterr()
        arguments = ["run", str(folder), "What?", "--cache", cache, "--experts", out, "--max-new-tokens", "4"]
        assert cli.main(arguments) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--hot", "8"],
            "--hot 8 needs --counts FILE, which says how often each expert is used. Write one with `promoe run",
        ),
        (["--hot", "4", "--counts", "a.json"], "--hot must be more bits than --bits. Got --hot 4 and --bits 4."),
        (["--counts", "a.json"], "--counts and --hot-share say which experts --hot is for. Add --hot 8, or"),
        (["--hot-share", "10%"], "--counts and --hot-share say which experts --hot is for."),
        (["--hot", "8", "--hot-share", "100%", "--counts", "a.json"], 'must be a share of the experts such as "25%"'),
        (["--hot", "8", "--hot-share", "3", "--counts", "a.json"], "(more than 0, less than 100%). Got '3' instead."),
        (["--hot", "8", "--counts", "/nowhere/a.json"], "/nowhere/a.json"),
    ],
)
def test_what_hot_needs(folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["quantize", str(folder), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_counts_of_another_model(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_run(make_run(stats=make_stats(layers=2, experts=4, top_k=2)), tmp_path / "run.json", {})
    assert cli.main(["quantize", str(folder), "--hot", "8", "--counts", str(path)]) == 2
    assert "belongs to another model: it has 2 layers of 4 experts" in capsys.readouterr().err


def test_a_plan_does_not_know_it(folder: Path, counts: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["quantize", str(folder), "--hot", "8", "--counts", counts]) == 0
    assert cli.main(["plan", str(folder), "--experts", "int4-hot8"]) == 2
    assert "a plan knows layers whose experts are all alike" in capsys.readouterr().err
