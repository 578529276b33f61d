from __future__ import annotations

import pytest
from synthetic_runs import make_run, make_stats

from promoe.stats.run_table import COLUMNS, Change, change, columns_for

BY_HEAD = {column.head: column for column in COLUMNS}


@pytest.mark.parametrize(
    ("head", "before", "after", "expected"),
    [
        ("TPOT", {"tpot_s": 0.02}, {"tpot_s": 0.01}, Change("−50.0%", True)),
        ("TPOT", {"tpot_s": 0.02}, {"tpot_s": 0.03}, Change("+50.0%", False)),
        ("TPOT", {"tpot_s": 0.02}, {"tpot_s": 0.02}, Change("the same", None)),
        ("TPOT", {"tpot_s": 0.02}, {"tpot_s": 0.0200001}, Change("the same", None)),
        ("bound", {"bound_s": 0.01}, {"bound_s": 0.02}, Change("+100.0%", None)),
        ("bound", {}, {"bound_s": 0.02}, Change("–", None)),
        ("hit", {"stats": make_stats(hits=1)}, {"stats": make_stats(hits=2)}, Change("+50.0 points", True)),
        ("stall", {"stats": make_stats(stall_s=0.0)}, {"stats": make_stats()}, Change("–", None)),
    ],
)
def test_what_became_of_a_quantity(head: str, before: dict, after: dict, expected: Change) -> None:  # type: ignore[type-arg]
    assert change(BY_HEAD[head], make_run("a", **before), make_run("b", **after)) == expected


def test_only_columns_with_a_value_are_shown() -> None:
    heads = [column.head for column in columns_for([make_run()])]
    assert heads == ["TTFT", "TPOT", "hit", "ready", "stall", "moved"]
    assert "speed" in [column.head for column in columns_for([make_run("a"), make_run("b")])]
