from __future__ import annotations

from dataclasses import replace

from commands.bench.reports import READ, row, table
from promoe.commands.bench.beside_llama_cpp import llama_cpp_lines
from promoe.commands.bench.quantised import quantised_lines
from promoe.commands.bench.show import table_lines
from promoe.commands.bench.table import Table


def with_llama_cpp(task: str = "generate") -> Table:
    found = table(task=task)
    tokens = 5 if task == "generate" else 1
    more = [
        row("gate:int8", 0.1, 0.1, 0.1, tokens=tokens),
        row("llama-cpp", 0.5, 0.44, 0.6, tokens=tokens, ttft_s=1.0),
        replace(
            row("llama-cpp:q8_0", 0.2, 0.3, 0.4, tokens=tokens, ttft_s=2.0),
            num_same=9,
            num_tokens=15,
            same_as="“resident:q8_0”",
        ),
        row("llama-cpp:q4_0", 0.2, 0.3, 0.4, tokens=tokens),
    ]
    return replace(found, rows=[*found.rows, *more])


def cells(found: Table, name: str) -> dict[str, str]:
    lines = [line for line in llama_cpp_lines(found) if line.startswith("|")]
    head, *others = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return next(dict(zip(head, line, strict=True)) for line in others if line[0] == name)


def test_times_are_set_against_our_systems_with_as_many_bits() -> None:
    found = cells(with_llama_cpp(), "llama-cpp:q8_0")
    assert found["TPOT / gate:int8"] == "3.00x [2.00x, 4.00x]"
    assert found["TPOT / gate"] == "–"
    assert found["first tokens as"] == "9 of 15 as “resident:q8_0”"
    assert cells(with_llama_cpp(), "llama-cpp")["TPOT / gate"] == "5.00x [4.00x, 5.00x]"
    assert set(cells(with_llama_cpp(), "llama-cpp:q4_0").values()) == {"llama-cpp:q4_0", "–"}
    assert cells(with_llama_cpp(READ), "llama-cpp:q8_0")["TTFT / gate:int8"] == "4.00x [4.00x, 4.00x]"


def test_it_is_printed_where_llama_cpp_answered() -> None:
    lines = list(table_lines(with_llama_cpp()))
    assert any(line.startswith("llama.cpp's TPOT over that of this library's") for line in lines)
    assert not any("llama" in line for line in quantised_lines(with_llama_cpp()))
    assert llama_cpp_lines(table()) == []
