from __future__ import annotations

import os
from pathlib import Path

import pytest
from synthetic_runs import make_run, make_stats, make_token

from promoe import cli
from promoe.stats.saved_run import save_run


@pytest.fixture
def saved(tmp_path: Path) -> list[str]:
    runs = [
        make_run("this run", tpot_s=0.02, token=make_token()),
        make_run("this run", tpot_s=0.01, stats=make_stats(predictor="gate", lookahead=2), token=make_token()),
    ]
    return [
        str(save_run(run, tmp_path / f"{name}.json", {"model": "tiny", "threads": str(number)}))
        for number, (name, run) in enumerate(zip(("before", "after"), runs, strict=True), start=1)
    ]


def test_two_runs_are_set_side_by_side(saved: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "compare.html"
    assert cli.main(["report", *saved, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "“after” is 2.00x as fast as “before”" in text
    assert "(one run each: how much of it is chance is not known)" in " ".join(text.split())
    assert "The runs are not of the same threads: see the page's head." in text
    assert f"report    {out}" in text
    page = out.read_text()
    assert "promoe report: before and after" in page
    assert "Side by side" in page
    assert "<dt>model</dt><dd>tiny</dd>" in page
    assert "<dt>threads</dt><dd>before: 1\nafter: 2</dd>" in page


def test_alike_is_what_was_measured_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alike = {"model": "tiny", "prompt": "a", "link": "one"}
    others = {"b": alike | {"link": "another", "date": "later"}, "c": alike | {"prompt": "b", "versions": "promoe 2"}}
    paths = {
        name: str(save_run(make_run(tpot_s=0.02), tmp_path / f"{name}.json", conditions))
        for name, conditions in {"a": alike, **others}.items()
    }
    for other, said in (("b", ""), ("c", "The runs are not of the same prompt and versions: see the page's head.")):
        assert cli.main(["report", paths["a"], paths[other], "--out", str(tmp_path / "page.html")]) == 0
        text = capsys.readouterr().out
        assert (said in text) if said else ("not of the same" not in text)


def test_the_baseline_may_be_chosen(saved: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "compare.html")
    assert cli.main(["report", *saved, "--out", out, "--baseline", "after"]) == 0
    assert cli.main(["report", *saved, "--out", out, "--baseline", "later"]) == 2
    assert "must be one of the runs' names ['before', 'after']. Got 'later'" in capsys.readouterr().err


def test_one_run_makes_its_page_again(saved: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "again.html"
    assert cli.main(["report", saved[0], "--out", str(out)]) == 0
    assert "What it means" in capsys.readouterr().out
    assert "One token, from begin to end" in out.read_text()


def test_files_of_one_name_are_told_apart(saved: list[str], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "before.json"
    Path(saved[1]).rename(other)
    assert cli.main(["report", saved[0], str(other), "--out", str(tmp_path / "c.html")]) == 0
    assert str(other) in (tmp_path / "c.html").read_text()


def test_a_file_whose_name_is_no_utf8(saved: list[str], tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"caf\xe9.json")
    Path(saved[0]).rename(odd)
    assert cli.main(["report", str(odd), saved[1], "--out", str(tmp_path / "c.html")]) == 0
    assert "promoe report: caf? and after" in (tmp_path / "c.html").read_text()


def test_mistakes_are_told(saved: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    larger = str(save_run(make_run(stats=make_stats(layers=5)), tmp_path / "larger.json"))
    out = str(tmp_path / "c.html")
    for arguments, message in (
        ([saved[0], saved[0], "--out", out], "Give each run once."),
        ([*saved, "--out", saved[1]], "which is one of the runs"),
        ([*saved, "--out", str(tmp_path / "none" / "c.html")], "does not exist"),
        ([saved[0], larger, "--out", out], "“before” has 4 MoE layers with 32 experts, “larger” 5 MoE layers with 40"),
        ([saved[0], str(tmp_path / "none.json"), "--out", out], "No such file"),
    ):
        assert cli.main(["report", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert not Path(out).exists()
