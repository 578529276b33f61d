"""`promoe doctor`: finds facts, judges them, and prints both."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from promoe.commands.doctor.advice import advice
from promoe.commands.doctor.chaos import KINDS, Outcome, chaos
from promoe.commands.doctor.facts import Facts, find_facts
from promoe.commands.doctor.options import Options
from promoe.files import write_atomically
from promoe.stats.text_columns import bullets, labelled
from promoe.units import aligned, format_bandwidth, format_memory


def run_doctor(options: Options, out: TextIO | None = None) -> bool:
    """Look, measure and print to `out` (None: stdout), and return whether all answers were right.

    Raises:
        ConfigError: the folder cannot be measured, or the JSON not be written.
    """
    facts = find_facts(Path(options.folder))
    print("```", *facts_lines(facts), "```", sep="\n", file=out)
    found = advice(facts)
    print("\nWhat would be slow, and why" if found else "\nNothing stands out.", file=out)
    for item in bullets(found):
        print(item, file=out)
    outcomes = chaos() if options.chaos else []
    if outcomes:
        print("\nA tiny model, its reads failing\n", file=out)
        print(*chaos_lines(outcomes), "", *verdict(outcomes), sep="\n", file=out)
    if options.json is not None:
        whole = {
            "facts": dataclasses.asdict(facts),
            "advice": found,
            "chaos": [outcome._asdict() for outcome in outcomes],
        }
        write_atomically(options.json, [json.dumps(whole, indent=2), "\n"])
    return all(outcome.survived for outcome in outcomes)


def facts_lines(facts: Facts) -> list[str]:
    """Return names and values, aligned."""
    disk, limit = facts.disk, facts.locked_limit_bytes
    past_cache = (
        "no O_DIRECT" if disk.direct_bytes_per_s is None else f"{format_bandwidth(disk.direct_bytes_per_s)} O_DIRECT"
    )
    free = "unknown" if facts.free_ram_bytes is None else format_memory(facts.free_ram_bytes)
    computing = "1 thread computes" if facts.threads == 1 else f"{facts.threads} threads compute"
    pairs = {
        "versions": ", ".join(f"{name} {version}" for name, version in facts.versions.items()),
        "system": facts.system,
        "processor": f"{facts.processor}, {facts.cores} cores, {computing}, {facts.kernels}"
        + (", bf16 products" if facts.bfloat16 else ""),
        "RAM": f"{format_memory(facts.total_ram_bytes)}, {free} of it free"
        + (" to this process (control group)" if facts.limited_by_group else ""),
        "": f"{format_bandwidth(facts.copy_bytes_per_s)} copied by one core; huge pages: {facts.huge_pages}; may lock "
        + ("any amount" if limit is None else format_memory(limit)),
        "disk": f"{disk.folder}, {format_memory(disk.free_bytes)} free",
        " ": f"{past_cache}, {format_bandwidth(disk.cached_bytes_per_s)} from the page cache",
        "GPU": "none that torch can use",
    }
    for idx, gpu in enumerate(facts.gpus):
        pairs["GPU" + str(idx or "")] = (
            f"{gpu.name}, {format_memory(gpu.free_bytes)} free, {format_bandwidth(gpu.pinned_bytes_per_s)} from pinned memory"
        )
    width = max(map(len, pairs)) + 2
    return [line for name, value in pairs.items() for line in labelled(name.strip(), value, width)]


def chaos_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a table of what each kind of fault did."""
    rows = [["fault", "injected", "errors", "answers right"]]
    for outcome in outcomes:
        errors = ", ".join(f"{count} {name}" for name, count in outcome.errors.items()) or "none"
        rows.append([_what(outcome), str(outcome.injected), errors, str(outcome.right)])
    return [f"  {line}" for line in aligned(rows)]


def verdict(outcomes: Sequence[Outcome]) -> list[str]:
    """Say whether all answers were right, and why some tests ended early."""
    answers = sum(outcome.right for outcome in outcomes)
    bad = [outcome for outcome in outcomes if not outcome.survived]
    if bad:
        names = "; ".join(f"{_what(outcome)}: {outcome.end}" for outcome in bad)
        first = f"NOT all was right: {names}. Please report this, with the text above."
    else:
        first = (
            f"All {answers} answers are bit by bit those of the unpatched model. Where a fault could not be borne, an error "
            "came in place of an answer."
        )
    closed = [f"{_what(outcome)}: {outcome.end}" for outcome in outcomes if outcome.end and outcome.survived]
    return bullets([first, *closed])


def _what(outcome: Outcome) -> str:
    return next((words for kind, words in KINDS.items() if kind == outcome.kind), outcome.kind)
