from __future__ import annotations

import pytest

from promoe.columns import text_columns


@pytest.mark.parametrize(("columns", "expected"), [("40", 60), ("80", 80), ("200", 100)])
def test_sentences_are_as_wide_as_the_terminal_within_limits(
    monkeypatch: pytest.MonkeyPatch, columns: str, expected: int
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert text_columns() == expected
