"""What `promoe-train collect` does: open a model, say how large the trace will be, record it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import torch

import promoe
from promoe.errors import CheckpointError, ConfigError, PromoeError
from promoe.experts.moe_layers import find_moe_layers
from promoe.model.hub import base_of
from promoe.model.model_class import class_to_open
from promoe.model.tokenizer import load_tokenizer
from promoe.training.collect import collect, describe, save_gates
from promoe.training.collect_options import CollectOptions, check_disk, check_positions
from promoe.training.prompts import read_exclusions, read_prompts
from promoe.training.recorded_traces import TraceWriter
from promoe.training.trace_folder import check_folder

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Collection:
    """What is recorded, and where to.

    Raises:
        ConfigError: no such dtype.
    """

    model: str
    data: str
    out: Path
    dtype: str
    cache: str | None
    exclude: str | None
    options: CollectOptions

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype must be of {', '.join(DTYPES)}. Got {self.dtype!r} instead.")


def run_collect(task: Collection, out: TextIO) -> None:
    """Record a trace, or go on with one, and say what it holds.

    Raises:
        PromoeError: the model, the data or the folder cannot be used.
    """
    excluded = read_exclusions(task.exclude) if task.exclude is not None else []
    settings = task.options.settings(task.data, excluded, task.dtype)
    # Mistakes in the folder and the data are answered before a model is opened, which can take long.
    check_folder(task.out, task.model, settings)
    prompts = read_prompts(task.data, excluded)
    first = next(prompts)
    model, tokenizer = open_model(task.model, task.dtype, task.cache)
    try:
        layers = find_moe_layers(model, allow_meta=True)
        info = describe(model, layers, task.model, settings)
        check_positions(model, task.options)
        print(check_disk(info, task.out, task.options), file=out)
        writer = TraceWriter(task.out, info, task.options.shard_index)
        if writer.num_tokens:
            print(f"going on after the {writer.num_tokens:,} tokens that are there", file=out)
        save_gates(layers, task.out)
        collect(model, tokenizer, chain([first], prompts), writer, task.options)
    finally:
        if task.cache is not None:
            model.promoe.close()
    print(f"{writer.num_tokens:,} tokens ({writer.decode_share:.0%} generated) in {task.out}", file=out)


def open_model(path: str, dtype: str, cache: str | None) -> tuple[Any, Any]:
    """A model and its tokenizer; with `cache`, its experts stay on disk.

    Raises:
        CheckpointError: there are none that can be opened.
        PromoeError: promoe cannot serve it.
    """
    tokenizer = load_tokenizer(path)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # Transformers makes one up where there are no files
        raise CheckpointError(f"There is no tokenizer beside the model '{path}'. Put its files there.")
    try:
        if cache is not None:
            chosen = None if dtype == "auto" else getattr(torch, dtype)
            return promoe.from_pretrained(path, cache=cache, dtype=chosen), tokenizer
        # Never ask on the terminal whether a checkpoint's own code may run, nor open a pickle.
        options = {"trust_remote_code": False, "use_safetensors": True}
        return class_to_open(base_of(path), options).from_pretrained(path, dtype=dtype, **options).eval(), tokenizer
    except PromoeError:
        raise  # a ConfigError is a ValueError too
    except Exception as error:  # Transformers computes with what config.json says
        raise CheckpointError(
            f"Cannot open the model '{path}': {type(error).__name__}: {str(error)[:2000].rstrip('. ')}. Transformers "
            "cannot open it: a file is missing or damaged, or its config.json is of a model that it does not have."
        ) from error
