"""Shows what was measured: a table for a terminal, and JSON."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

import promoe
from promoe.commands.quality.measuring import Result
from promoe.commands.quality.options import Options
from promoe.commands.quality.sample import Sample
from promoe.units import DASH, aligned, format_memory, format_percent

WIDTH = 120
# With fewer, a line says so.
MANY_TOKENS = 4096


class Column(NamedTuple):
    """A column of the table: its head, the cell of a form, and what the head means."""

    head: str
    cell: Callable[[Result], str]
    words: str = ""


def _fixed(value: float, digits: str) -> str:
    """Write a number with a fixed number of digits, so that a column can be compared at a glance; exactly 0 as `0`."""
    if math.isnan(value):
        return DASH
    return f"{value:{digits}}" if value else "0"


def _columns(options: Options) -> list[Column]:
    columns = [
        Column("experts", lambda r: r.form.name),
        Column("bits", lambda r: f"{r.form.bits_per_weight:.2f}", "bits of a weight of the experts, scales included"),
        Column("memory", lambda r: format_memory(r.form.nbytes), "all experts in slots"),
        Column("loss", lambda r: f"{r.figures.loss:.4f}", "negative log-likelihood, in nats per token"),
        Column("perplexity", lambda r: f"{r.figures.perplexity:.2f}", "exp(loss)"),
        Column("increase", lambda r: _fixed(r.figures.loss_increase, "+.4f"), "of the loss, over the first row's"),
        Column("±", lambda r: _fixed(r.figures.loss_increase_error, ".4f"), "standard error of the increase"),
        Column("KL", lambda r: _fixed(r.figures.kl, ".5f"), "divergence KL(first row || form), in nats per token"),
        Column(
            "top-1, %",
            lambda r: format_percent(r.figures.agreement),
            "share of tokens whose most likely prediction is the first row's",
        ),
    ]
    if options.prompts:
        columns.append(
            Column(
                "same tokens",
                lambda r: DASH if r.same_tokens is None else f"{r.same_tokens:.1f}",
                f"of greedy answers of {options.max_new_tokens} tokens: how many come before the first that differs; mean",
            )
        )
    return columns


def lines(options: Options, sample: Sample, results: Sequence[Result]) -> list[str]:
    """Return the lines to print: conditions, the table, and what its heads mean."""
    columns = _columns(options)
    rows = [[column.head for column in columns], *([column.cell(one) for column in columns] for one in results)]
    explained = [column for column in columns if column.words]
    widest = max(len(column.head) for column in explained)
    few = "With so few tokens only large changes can be told from chance: give more with --data and --tokens."
    return [
        *_wrapped(_conditions(options, sample)),
        *(_wrapped(few) if sample.num_tokens < MANY_TOKENS else []),
        "",
        *aligned(rows),
        "",
        *(f"{column.head.ljust(widest)}  {column.words}" for column in explained),
    ]


def _conditions(options: Options, sample: Sample) -> str:
    answers = f", and {len(sample.prompts)} greedy answers" if sample.prompts else ""
    windows = f"{len(sample.windows):,} window{'s' if len(sample.windows) != 1 else ''} of {options.window:,}"
    return (
        f"{Path(options.model).name} on {sample.num_tokens:,} tokens ({sample.source}) in {windows}, of which "
        f"{sample.num_predicted:,} are predicted{answers}."
    )


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, break_on_hyphens=False)


def to_json(options: Options, sample: Sample, results: Sequence[Result]) -> dict[str, Any]:
    """Return what the JSON file holds. What is not a number is None."""
    return {
        "model": options.model,
        "data": sample.source,
        "tokens": sample.num_tokens,
        "predicted_tokens": sample.num_predicted,
        "window": options.window,
        "answers": len(sample.prompts),
        "max_new_tokens": options.max_new_tokens,
        "dtype": options.dtype,
        "promoe": promoe.__version__,
        "torch": torch.__version__,
        "forms": [_entry(result) for result in results],
    }


def _entry(result: Result) -> dict[str, Any]:
    figures = {**asdict(result.figures), "perplexity": result.figures.perplexity}
    return {
        "experts": result.form.experts,
        "bits_per_weight": result.form.bits_per_weight,
        "experts_bytes": result.form.nbytes,
        **{name: value if math.isfinite(value) else None for name, value in figures.items()},
        "same_tokens": result.same_tokens,
    }
