"""What `promoe-train collect` does: open a model, say how large the trace will be, record it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import promoe
from promoe.errors import CheckpointError, ConfigError, PromoeError
from promoe.moe_layers import find_moe_layers
from promoe.training.collect import CollectOptions, check_disk, collect, describe, save_gates
from promoe.training.prompts import read_exclusions, read_prompts
from promoe.training.recorded_traces import TraceWriter

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Collection:
    """What is recorded, and where to."""

    model: str
    data: str
    out: Path
    dtype: str
    cache: str | None
    exclude: str | None
    options: CollectOptions


def run_collect(task: Collection, out: TextIO) -> None:
    """Record a trace, or go on with one, and say what it holds.

    Raises:
        PromoeError: the model, the data or the folder cannot be used.
    """
    excluded = read_exclusions(task.exclude) if task.exclude is not None else []
    prompts = read_prompts(task.data, excluded)
    model, tokenizer = open_model(task.model, task.dtype, task.cache)
    layers = find_moe_layers(model, allow_meta=True)
    info = describe(model, layers, task.model, task.options.settings(task.data, len(excluded)))
    print(check_disk(info, task.out, task.options.shard_tokens), file=out)
    writer = TraceWriter(task.out, info, task.options.shard_index)
    if writer.num_tokens:
        print(f"going on after the {writer.num_tokens:,} tokens that are there", file=out)
    save_gates(layers, task.out)
    collect(model, tokenizer, prompts, writer, task.options)
    print(f"{writer.num_tokens:,} tokens ({writer.decode_share:.0%} generated) in {task.out}", file=out)


def open_model(path: str, dtype: str, cache: str | None) -> tuple[Any, Any]:
    """A model and its tokenizer; with `cache`, its experts stay on disk.

    Raises:
        ConfigError: no such dtype.
        CheckpointError: there are none that can be opened.
        PromoeError: promoe cannot serve it.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype must be of {', '.join(DTYPES)}. Got {dtype!r} instead.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        if cache is not None:
            chosen = None if dtype == "auto" else getattr(torch, dtype)
            return promoe.from_pretrained(path, cache=cache, dtype=chosen), tokenizer
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval(), tokenizer
    except PromoeError:
        raise  # a ConfigError is a ValueError too
    except (OSError, ValueError) as error:
        raise CheckpointError(f"Cannot open the model {path!r}: {error}") from error
