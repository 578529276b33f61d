"""What the demo prints: headings, conditions, tables, words, a sample."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping

import torch

from promoe.commands.bench.messages import Opening
from promoe.commands.bench.table import Table
from promoe.commands.demo.systems import RESIDENT, SYSTEMS
from promoe.commands.measure import REPETITION_PENALTY
from promoe.commands.run.command import with_what_and_when
from promoe.stats.counts import PhaseStats
from promoe.stats.text_columns import bullets, labelled, text_columns
from promoe.stats.text_report import text_comparison
from promoe.transfer.processor import processor_name
from promoe.units import format_megabytes, format_number, format_seconds, format_times, is_number

# From never needed to most needed of its layer.
SHADES = " .:-=+*#%@"


def say(*lines: str) -> None:
    """Print lines at once, so that a demo whose output is piped shows its progress."""
    print(*lines, sep="\n", flush=True)


def paragraph(text: str) -> None:
    """Print text wrapped to the terminal."""
    say(textwrap.fill(text, text_columns(), break_long_words=False))


def heading(text: str) -> None:
    """Print a line that begins a part."""
    say("", text, "─" * min(len(text), text_columns()))


def show_table(table: Table, conditions: Mapping[str, str]) -> None:
    """Print a comparison, what it means, and what it holds for."""
    say("", text_comparison(table.runs(), baseline=SYSTEMS[0].name), *bullets(words(table)))
    tokens = [sum(len(answer.tokens) for answer in row.answers) for row in table.rows]
    cut = " Some answers were cut short, because they took long." if min(tokens) < max(tokens) else ""
    say(
        "",
        *bullets(
            [
                f"All tokens agree: {max(tokens)} tokens of {len(table.rows[-1].answers)} answers, the same in all "
                f"{len(table.rows)} systems and in the unmodified model.{cut}"
            ]
        ),
        "",
    )
    width = max(map(len, conditions)) + 4
    say(*(line for name, value in conditions.items() for line in labelled(f"  {name}", value, width)))


def words(table: Table) -> list[str]:
    """Say what the table shows that its own words do not."""
    first, last = table.row(SYSTEMS[0].name) or table.rows[0], table.rows[-1]
    speedup, compute_s = table.speedup(first, last), table.token_compute_s
    interval, basis = "", "one prompt, which says little"
    if len(last.answers) > 1:
        interval = f" [{format_times(speedup.low)}, {format_times(speedup.high)}]"
        basis = "median and 95% interval"
    sentences = [
        f"Paired by prompt, “{last.system.name}” is {format_times(speedup.value)}{interval} as fast as "
        f"“{first.system.name}” ({basis})."
    ]
    assert first.decode is not None, "the first system fetches"
    transfer_s = first.decode.bytes_per_token / table.bandwidth_bytes_per_s
    if compute_s is None:
        sentences.append(
            f"“{RESIDENT.name}” was left out: the model does not fit into free RAM. Bounds are those of the link."
        )
    elif is_number(transfer_s):
        most = (compute_s + transfer_s) / max(compute_s, transfer_s)
        sentences.append(
            f"“{first.system.name}” needs {format_seconds(compute_s)} of compute and at least {format_seconds(transfer_s)} of "
            f"transfer per token: overlapping them can win {format_times(most)} at most. More than that comes from moving "
            "fewer bytes."
        )
    return sentences


def conditions(table: Table, opening: Opening) -> dict[str, str]:
    """Return what the numbers of a comparison hold for; `opening` is how its last system was opened."""
    sizes, stats = table.sizes, table.rows[-1].stats
    assert stats is not None, "the last system fetches"
    measured = table.task.prompts[1:]
    lengths = [len(prompt.ids) for prompt in measured]
    return {
        "model": f"{opening.checkpoint}, {opening.dtype}",
        "geometry": (
            f"{len(sizes.num_experts)} MoE layers, {sizes.num_experts[0]} experts of "
            f"{format_megabytes(sizes.expert_bytes[0])} MB each, top {sizes.top_k[0]}; "
            f"{format_number(sizes.experts_bytes / 1e9)} GB of experts"
        ),
        "cache": f"{table.cache}: {stats.cache_slots} slots for {sum(sizes.num_experts)} experts",
        "link": stats.link,
        "prompts": f"{len(measured)} held-out of ShareGPT, {min(lengths)}-{max(lengths)} tokens; one more to warm up",
        "tokens": f"{measured[0].new_tokens} generated per prompt in at most {measured[0].seconds:.0f} s, greedy, repetition "
        f"penalty {REPETITION_PENALTY}; systems interleaved over prompts",
        "machine": f"{processor_name()}, {torch.get_num_threads()} threads of {os.cpu_count()} for compute",
        **with_what_and_when(),
        **({} if table.taken is None else {"cores": table.taken.describe()}),
    }


def show_routing(phase: PhaseStats) -> None:
    """Print which experts were needed, a line per layer."""
    say(
        "",
        f"  Experts needed while generating, a line per layer, a column per expert ('{SHADES[-1]}': the layer's most needed)",
    )
    for layer_idx, row in enumerate(phase.expert_counts):
        top = max(max(row), 1)
        cells = "".join(SHADES[-(-count * (len(SHADES) - 1) // top)] for count in row)
        say(f"  {layer_idx:3d} │{cells}│")


def show_sample(prompt: str, text: str) -> None:
    """Print a prompt and the beginning of its answer."""
    say("")
    for name, content in (("prompt", prompt), ("answer", f"{text} …")):
        say(*labelled(f"  {name}", " ".join(content.split()), 10))
