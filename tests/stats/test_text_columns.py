from __future__ import annotations

import pytest

from promoe.stats.text_columns import labelled, text_columns


@pytest.mark.parametrize(("columns", "expected"), [("40", 60), ("80", 80), ("200", 100)])
def test_sentences_are_as_wide_as_the_terminal_within_limits(
    monkeypatch: pytest.MonkeyPatch, columns: str, expected: int
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert text_columns() == expected


def test_text_beside_a_label_stays_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = labelled("link", "page cache, chunks up to 54.0 KiB, 2 readers " + "x" * 70 + " disk-offload", 10)
    assert lines == [
        "link      page cache, chunks up to 54.0 KiB, 2 readers",
        "          " + "x" * 70,
        "          disk-offload",
    ]
