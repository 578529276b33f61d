"""docs/support.md says what the tiny models of the newest supported Transformers say."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from zoo.support import support

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "support.md"
WRITTEN_WITH = "5.23"


@pytest.mark.skipif(not transformers.__version__.startswith(WRITTEN_WITH), reason=f"written with {WRITTEN_WITH}")
def test_the_document_is_current() -> None:
    """Write it anew with `python tests/zoo/support.py > docs/support.md`."""
    assert DOCUMENT.read_text(encoding="utf-8") == support()
