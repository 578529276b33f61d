"""The scripts in `benchmarks/` open, explain themselves, and are named where their figures are."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
SHARED = ("common", "streamed_layers")  # what scripts import
SCRIPTS = sorted(path for path in FOLDER.glob("*.py") if path.stem not in SHARED)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_help_says_what_a_script_prints_and_how_long_it_takes(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert f"python benchmarks/{script.name}" in printed
    assert "Prints" in printed
    assert "Takes" in printed
    assert "--json" in printed


def test_every_script_is_named_beside_its_figures() -> None:
    pages = (FOLDER.parent / "docs" / "benchmarks.md", FOLDER / "NOTES.md")
    page = " ".join(page.read_text(encoding="utf-8") for page in pages).replace("\n", " ")
    assert [script.name for script in SCRIPTS if f"python benchmarks/{script.name}" not in page] == []
