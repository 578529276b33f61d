"""What a plan of many prompts says: what was measured, a row per setting, what limits, and what to copy."""

from __future__ import annotations

import re
from dataclasses import replace

from commands.plan.test_throughput import WORK, batch_model
from promoe.commands.plan.many_prompts import BatchPlan
from promoe.commands.plan.show_batch import as_numbers, choice_lines, measured_lines, table_lines
from promoe.commands.plan.throughput import Wanted


def plan(bytes_per_s: float = 1e7) -> BatchPlan:
    """Of a link so slow that it limits everything, unless everything has a slot."""
    model = batch_model(bytes_per_s=bytes_per_s)
    memory_bytes = model.sizes.other_bytes + model.sizes.slots_bytes * 3 // 4
    memory_bytes += 2**28  # what steps take
    chosen, fast = (model.best(memory_bytes, Wanted(rate=0.5, kernels=(name,))) for name in ("exact", "fast"))
    assert chosen is not None
    return BatchPlan(model, memory_bytes, chosen, fast)


def test_what_was_measured_is_said_with_where_the_roofs_meet() -> None:
    text = " ".join(" ".join(measured_lines(plan())).split())
    assert "steps 1.10 ms for a token alone without routed experts, and 6.30 ms more for 64 sequences" in text
    assert "exact an expert takes, by its rows (tokens): 1.00 ms for 1.00" in text
    assert "reading its weights limits it up to 8 rows" in text


def test_a_row_for_some_numbers_of_sequences_the_chosen_one_marked() -> None:
    found = plan()
    lines = table_lines({"auto": found, "int4": replace(found, chosen=replace(found.chosen), fast=None)})
    assert lines[0].split()[:4] == ["experts", "kernels", "at", "once"]
    rows = [re.split(r"\s{2,}", line.replace(">", " ").strip()) for line in lines[1:]]
    marked = [row for row, line in zip(rows, lines[1:], strict=True) if line.startswith("> ")]
    assert len(marked) == 1
    assert marked[0][:4] == ["auto", "exact", str(found.chosen.setting.at_once), str(found.chosen.setting.step_tokens)]
    assert [row[2] for row in rows if row[:2] == ["auto", "exact"]][:2] == ["1", "8"]
    assert [row[1] for row in rows if row[0] == "auto"][-1] == "fast"
    assert [row[0] for row in rows][-1] == "int4"
    assert marked[0][-1] == "the link"


def test_the_choice_can_be_copied() -> None:
    found = plan()
    setting = found.chosen.setting
    lines = choice_lines(found, "a model", "in.jsonl", "auto")
    assert lines[-2:] == [
        "  promoe batch 'a model' in.jsonl --out answers.jsonl \\",
        f"    --cache 50% --at-once {setting.at_once} --step-tokens {setting.step_tokens} --kv-tokens {setting.kv_tokens}",
    ]
    text = " ".join(" ".join(lines).split())
    assert "limit the link; what helps is more memory for slots" in text
    assert "--kernels fast would give" not in text, "the link limits, whatever the products take"
    quick = plan(bytes_per_s=1e12)
    assert quick.fast_pays
    assert "--kernels fast would give" in " ".join(choice_lines(quick, "m", "in.jsonl", "auto"))


def test_all_of_it_as_numbers() -> None:
    found = plan()
    (one,) = as_numbers({"auto": found})
    assert one["work"]["answers"] == WORK.answers  # type: ignore[index]
    assert one["chosen"]["tokens_per_s"] == found.chosen.tokens_per_s  # type: ignore[index]
    assert one["chosen"]["limit"] == "the link"  # type: ignore[index]
    assert set(one["steps"]) == {"fixed_s", "sequence_s", "token_s", "pair_s"}  # type: ignore[arg-type, call-overload]
