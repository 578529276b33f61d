"""What the demo prints: conditions, tables, words, a sample. At most 110 columns."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from promoe.commands.demo.comparison import Reference, Result, Task
from promoe.commands.demo.options import Options
from promoe.commands.demo.systems import RESIDENT, SYSTEMS
from promoe.commands.measure import REPETITION_PENALTY
from promoe.commands.run.command import with_what_and_when
from promoe.experts.moe_layers import MoELayer
from promoe.stats.counts import PhaseStats
from promoe.stats.text_report import text_comparison
from promoe.transfer.processor import processor_name
from promoe.units import format_megabytes, format_number, format_seconds, format_times, is_number

WIDTH = 100
# From never needed to most needed of its layer.
SHADES = " .:-=+*#%@"


def say(text: str = "") -> None:
    """Print one paragraph at once, so that a piped demo shows its progress."""
    print(text, flush=True)


def paragraph(text: str) -> None:
    """Print text wrapped to the width."""
    say(textwrap.fill(text, WIDTH, break_long_words=False))


def heading(text: str) -> None:
    """Print a line that begins a part."""
    say(f"\n{text}\n{'─' * min(len(text), WIDTH)}")


def bullets(sentences: Sequence[str]) -> None:
    """Print a list."""
    for sentence in sentences:
        say(textwrap.fill(sentence, WIDTH, initial_indent="  - ", subsequent_indent="    "))


def machine() -> dict[str, str]:
    """What the numbers hold for, apart from the model."""
    return {
        "machine": f"{processor_name()}, {torch.get_num_threads()} threads of {os.cpu_count()} for compute",
    } | with_what_and_when()


def conditions(
    checkpoint: Path, dtype: torch.dtype, layers: Sequence[MoELayer], result: Result, task: Task, options: Options
) -> dict[str, str]:
    """What one part's numbers hold for."""
    slots = result.runs[-1].stats.cache_slots
    lengths = [inputs["input_ids"].shape[1] for inputs in task.prompts]
    return {
        "model": f"{checkpoint}, {str(dtype).removeprefix('torch.')}",
        "geometry": geometry(layers),
        "cache": f"{options.cache}: {slots} slots for {sum(layer.num_experts for layer in layers)} experts",
        "link": result.link,
        "prompts": f"{len(task.prompts)} held-out of ShareGPT, {min(lengths)}-{max(lengths)} tokens; one more to warm up",
        "tokens": f"{task.new_tokens} generated per prompt, greedy, repetition penalty {REPETITION_PENALTY}; "
        "systems interleaved over prompts",
    } | machine()


def geometry(layers: Sequence[MoELayer]) -> str:
    """The experts of a model in numbers."""
    first = layers[0]
    expert_bytes = first.layout.payload_bytes
    total_bytes = sum(layer.num_experts * layer.layout.payload_bytes for layer in layers)
    return (
        f"{len(layers)} MoE layers, {first.num_experts} experts of {format_megabytes(expert_bytes)} MB each, top "
        f"{first.top_k}; {format_number(total_bytes / 1e9)} GB of experts"
    )


def show_conditions(pairs: Mapping[str, str]) -> None:
    """Print names and values, aligned."""
    width = max(len(name) for name in pairs)
    for name, value in pairs.items():
        say(textwrap.fill(value, WIDTH, initial_indent=f"  {name.ljust(width)}  ", subsequent_indent=" " * (width + 4)))


def show_result(result: Result, reference: Reference) -> None:
    """Print the table and what it means."""
    say()
    say(text_comparison(result.runs, baseline=SYSTEMS[0].name))
    bullets(words(result))
    prompts, tokens = len(reference.answers) - 1, sum(len(answer.tokens) for answer in reference.answers[1:])
    say(
        f"\n  All tokens agree: {tokens} tokens of {prompts} answers, the same in all {len(result.runs)} systems and "
        "in the unmodified model."
    )


def words(result: Result) -> list[str]:
    """What the table shows that its own words do not say."""
    sentences = []
    first, last = SYSTEMS[0].name, result.runs[-1].name
    speedup = result.speedup
    if len(result.answers[last]) > 1:
        interval = f" [{format_times(speedup.low)}, {format_times(speedup.high)}]"
        basis = "median and 95% interval"
    else:
        interval, basis = "", "one prompt, which says little"
    sentences.append(
        f"Paired by prompt, “{last}” is {format_times(speedup.value)}{interval} as fast as “{first}” ({basis})."
    )
    baseline = next(run for run in result.runs if run.name == first)
    compute_s, transfer_s = result.compute_s, baseline.phase.bytes_per_token / result.bandwidth_bytes_per_s
    if compute_s is not None and is_number(transfer_s):
        most = (compute_s + transfer_s) / max(compute_s, transfer_s)
        sentences.append(
            f"“{first}” needs {format_seconds(compute_s)} of compute and at least {format_seconds(transfer_s)} of transfer "
            f"per token: overlapping them can win {format_times(most)} at most. More than that comes from moving fewer bytes."
        )
    if compute_s is None:
        sentences.append(
            f"“{RESIDENT}” was left out: the model does not fit into free RAM. Bounds are those of the link."
        )
    return sentences


def show_routing(phase: PhaseStats) -> None:
    """Print which experts were needed, a line per layer."""
    counts = phase.expert_counts
    say(
        f"  Experts needed while generating, a line per layer, a column per expert ('{SHADES[-1]}': the layer's most needed)"
    )
    for layer_idx, row in enumerate(counts):
        top = max(max(row), 1)
        cells = "".join(SHADES[-(-count * (len(SHADES) - 1) // top)] for count in row)
        say(f"  {layer_idx:3d} │{cells}│")


def show_sample(prompt: str, text: str) -> None:
    """Print a prompt and the beginning of its answer."""
    for name, content in (("prompt", prompt), ("answer", f"{text} …")):
        lines = textwrap.wrap(" ".join(content.split()), WIDTH - 10) or [""]
        say("\n".join(f"  {name if number == 0 else '':6}  {line}" for number, line in enumerate(lines)))
