from __future__ import annotations

import json
from dataclasses import replace

from commands.bench.reports import READ, report, row, table
from promoe.commands.bench.markdown import markdown
from promoe.commands.bench.show import impossible, ratios, report_lines, table_lines
from promoe.transfer.cpu_contention import Taken


def test_a_table_is_markdown_with_a_cell_per_column() -> None:
    lines = [line for line in table_lines(table()) if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert len({len(line) for line in lines}) == 1
    assert len(lines) == 2 + 4, "the system without answers has no row"
    head = [cell.strip() for cell in lines[0].strip("|").split("|")]
    gate = dict(zip(head, (cell.strip() for cell in lines[4].strip("|").split("|")), strict=True))
    assert gate["system"] == "gate"
    assert gate["TPOT, ms"] == "110 [107, 111]"
    assert gate["ratio"] == "1.10"
    assert gate["limited, MiB"] == "130"
    assert gate["RSS, MiB"] == "500"


def test_columns_without_values_are_left_out() -> None:
    lines = [line for line in table_lines(replace(table(), rows=[row("resident", 0.1)])) if line.startswith("|")]
    assert "bound" not in lines[0]
    assert markdown((), []) == ["|  |", "||"]


def test_ratios_are_paired_by_prompt_against_the_default() -> None:
    (sentence,) = ratios(table())
    assert sentence.startswith("TPOT of others over that of `gate`, per prompt: resident / gate: 0.50x")
    assert "on-demand / gate: 1.91x" in sentence
    assert "page-cache / gate: 4.55x [4.00x, 5.00x]" in sentence
    (sentence,) = ratios(table(task=READ))
    assert sentence.startswith("TTFT of others")
    assert "on-demand / gate: 1.00x" in sentence


def test_what_failed_is_said() -> None:
    assert "- `airllm`: The system 'airllm' was killed." in list(table_lines(table()))


def test_what_computing_a_prompt_takes_is_said_where_prompts_are_read() -> None:
    words = "Computing alone takes 250 ms with everything in RAM"
    assert words in "\n".join(table_lines(replace(table(task=READ), prompt_compute_s=0.25)))
    assert words not in "\n".join(table_lines(replace(table(), prompt_compute_s=0.25)))


def test_packed_experts_are_set_against_the_unmodified_models_computing_too() -> None:
    found = table()
    assert "packed" not in "\n".join(table_lines(found))
    packed = [replace(one, tpot_unmodified_s=2 * one.tpot.value) if one.answers else one for one in found.rows[:1]]
    text = "\n".join(table_lines(replace(found, rows=[*packed, *found.rows[1:]])))
    assert f"with the unmodified model's C: {found.rows[0].system.name} 0.50." in text


def test_what_others_took_of_the_cores_is_said_and_written() -> None:
    said = "- Meanwhile other processes took 0.10 of 2 cores, the host withheld 0.20."
    assert "Meanwhile" not in "\n".join(table_lines(table()))
    quiet, busy = (replace(table(), taken=Taken(2, taken, 0.2)) for taken in (0.1, 0.5))
    assert said in list(table_lines(quiet))
    assert "took 0.50 of 2 cores, the host withheld 0.20: everything is slower then." in "\n".join(table_lines(busy))
    values = json.loads(json.dumps(replace(report(), tables=[quiet, table()]).to_json()))
    assert values["tables"][0]["cores_taken"] == {"cores": 2, "by_others": 0.1, "withheld": 0.2}
    assert values["tables"][1]["cores_taken"] is None


def test_a_time_below_its_bound_is_a_measuring_error() -> None:
    assert impossible(table()) == []
    wrong = replace(table(), rows=[row("gate", 0.1, bound_s=0.104)])
    (sentence,) = impossible(wrong)
    assert "MEASURED WRONG" in sentence
    assert "`gate` took 100 ms, less than the least possible 104 ms" in sentence


def test_the_report_says_its_conditions() -> None:
    text = "\n".join(report_lines(report()))
    assert "16 routed experts in 2 layers" in text
    assert "control group" in text
    assert "- `page-cache`: the unmodified model, its experts mapped from a file" in text
    assert "Memory was not limited (no root): compare" in "\n".join(report_lines(report(not_limited="no root")))


def test_json_has_every_answer() -> None:
    values = json.loads(json.dumps(report().to_json()))
    rows = {one["system"]: one for one in values["tables"][0]["rows"]}
    assert [answer["tpot_s"] for answer in rows["gate"]["answers"]] == [0.1, 0.11, 0.12]
    assert rows["gate"]["tpot_bound_s"] == 0.1
    assert rows["airllm"]["error"] == "The system 'airllm' was killed."
    assert rows["airllm"]["tpot_s"] is None
    assert rows["gate"]["decode"]["passes"] == 4
