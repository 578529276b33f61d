"""docs/api.md is what its generator makes of the docstrings."""

from __future__ import annotations

import runpy

import promoe

from .pages import ROOT

DOCUMENT = ROOT / "docs" / "api.md"


def test_the_document_is_current() -> None:
    """If this fails, run `python docs/api.py > docs/api.md`."""
    assert runpy.run_path(str(ROOT / "docs" / "api.py"))["api_page"]() == DOCUMENT.read_text(encoding="utf-8")


def test_every_public_name_is_in_it() -> None:
    headings = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("### ")]
    assert {f"### `promoe.{name}`" for name in promoe.__all__} <= set(headings)
    assert len(headings) == len(set(headings))
