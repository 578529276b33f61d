"""`promoe quantize`: what it says, and what it leaves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny_checkpoint import write_checkpoint

import promoe
from promoe import cli
from promoe.experts.kernels.int4 import Int4


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
