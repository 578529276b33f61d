"""Quantised systems beside the same systems in 16 bits."""

from __future__ import annotations

import json
from dataclasses import replace

from commands.bench.reports import READ, report, row, table
from promoe.commands.bench.quantised import quantised_lines
from promoe.commands.bench.show import table_lines
from promoe.commands.bench.table import Table


def with_quantised(cache: str = "25%", task: str = "generate") -> Table:
    found = table(cache, task)
    tokens = 5 if task == "generate" else 1
    more = [row("resident:int8", 0.08, 0.08, 0.08, tokens=tokens), row("gate:int8", 0.05, 0.066, 0.06, tokens=tokens)]
    more += [replace(row("lru:int8", 0.1, 0.1, 0.1, tokens=tokens), num_same=9, num_tokens=15)]
    return replace(found, rows=[*found.rows, *more])


def cells(found: Table, name: str) -> dict[str, str]:
    lines = [line for line in quantised_lines(found) if line.startswith("|")]
    head, *others = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return next(dict(zip(head, line, strict=True)) for line in others if line[0] == name)


def test_times_are_set_against_the_same_system_in_16_bits_prompt_by_prompt() -> None:
    found = cells(with_quantised(), "gate:int8")
    # 50 / 100, 66 / 110 and 60 / 120; 50 / 50, 66 / 60 and 60 / 55
    assert found["TPOT / in 16 bits"] == "0.50x [0.50x, 0.60x]"
    assert found["TPOT / resident"] == "1.09x [1.00x, 1.10x]"
    assert found["tokens as"] == "resident:int8"


def test_what_there_is_nothing_to_compare_with_is_a_dash() -> None:
    found = cells(with_quantised(), "lru:int8")
    assert found["TPOT / in 16 bits"] == "–"
    assert found["first tokens as in 16 bits"] == "9 of 15"
    assert cells(with_quantised(), "gate:int8")["first tokens as in 16 bits"] == "–"


def test_long_prompts_are_compared_by_the_time_to_the_first_token() -> None:
    assert cells(with_quantised(task=READ), "gate:int8")["TTFT / in 16 bits"] == "1.00x [1.00x, 1.00x]"


def test_without_quantised_systems_nothing_is_said() -> None:
    assert quantised_lines(table()) == []
    assert "quantised" not in "\n".join(table_lines(table()))
    assert "| quantised " in "\n".join(table_lines(with_quantised()))


def test_what_is_equal_is_said() -> None:
    assert "have as many bytes of slots as the others" in quantised_lines(with_quantised())[1]
    assert "have as many slots per layer as the others" in quantised_lines(with_quantised("2 per layer"))[1]


def test_tokens_per_second_are_a_table_by_system_and_form() -> None:
    lines = quantised_lines(with_quantised())
    begin = next(number for number, line in enumerate(lines) if line.startswith("| tokens/s"))
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[begin:]]
    assert found[0] == ["tokens/s", "16 bits", "int8"]
    assert found[2:] == [
        ["resident", "18.2", "12.5"],
        ["on-demand", "4.76", "–"],
        ["gate", "9.09", "16.7"],
        ["page-cache", "2.00", "–"],
        ["lru", "–", "10.0"],
    ]
    assert not any("tokens/s" in line for line in quantised_lines(with_quantised(task=READ)))


def test_json_has_the_ratios() -> None:
    values = json.loads(json.dumps(report(with_quantised()).to_json()))
    rows = {one["system"]: one for one in values["tables"][0]["rows"]}
    assert rows["gate:int8"]["over_16_bits"]["value"] == 0.5
    assert rows["gate:int8"]["tokens_compared_with"] == "resident:int8"
    assert rows["gate"]["over_16_bits"] is None
    assert rows["gate"]["over_resident"]["value"] == 2.0
    assert rows["gate"]["tokens_compared_with"] == "resident"
    assert rows["lru:int8"]["tokens_same"] == 9
    assert rows["airllm"]["over_resident"] is None
