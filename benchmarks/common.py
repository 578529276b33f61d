"""What the benchmarks share: their options, the demo model with experts of real size, and where results go."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import promoe
from promoe.commands.bench.example import find_example
from promoe.experts.kernels.formats import FORMATS
from promoe.model.opening import open_headers
from promoe.model.quantizing import write_quantized
from promoe.model.slot_folders import default_folder
from promoe.model.slot_index import INDEX
from promoe.model.tokenizer import load_tokenizer, prompt_inputs
from promoe.units import aligned

DTYPE = torch.bfloat16
# The demo model's experts are made so many times as wide: 10.6 MB each, 4.1 GB in all.
WIDTH = 128
OUT = Path("promoe-out")


def make_parser(description: str | None, script: str) -> argparse.ArgumentParser:
    """Return a parser for a script that has one option, the JSON file that its results go to.

    Args:
        description: the script's docstring.
        script: path of the script, whose name the JSON file gets by default.
    """
    transformers.logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = OUT / "benchmarks" / f"{Path(script).stem}.json"
    parser.add_argument("--json", type=Path, default=default, help=f"where results go (default: {default})")
    return parser


def widened_demo(width: int = WIDTH, out: Path = OUT) -> Path:
    """Return the folder of the demo model with experts `width` times as wide; write it if it is not in `out` yet."""
    return find_example().widened(out, width, DTYPE)


def in_form(checkpoint: Path, form: str) -> None:
    """Write a checkpoint's experts in a slot format beside it (`promoe quantize`), unless they are there already."""
    opened = open_headers(checkpoint)
    with closing(opened.store) as store:
        folder = default_folder(store, form)
        if not (folder / INDEX).is_file():
            write_quantized(opened.layers, store, folder, FORMATS[form])


def heldout_prompts(count: int) -> list[torch.Tensor]:
    """Return the token ids `[1, num_tokens]` of the first `count` prompts that the demo model was not trained on.

    Raises:
        ConfigError: there are fewer.
    """
    example = find_example()
    tokenizer = load_tokenizer(str(example.checkpoint))
    return [prompt_inputs(tokenizer, text)["input_ids"] for text in example.prompts(count)]


def open_slots(
    checkpoint: Path, cache: str, predictor: str | None = None, link: promoe.EmulatedLink | None = None, **fields: Any
) -> PreTrainedModel:
    """Open a model whose experts run from slots in any case, read past the page cache, with prefetch always on.

    Args:
        checkpoint: folder of the model.
        cache: see `promoe.from_pretrained`.
        predictor: name or folder; None switches prefetch off.
        link: that experts come over; None: the disk.
        fields: of `PromoeConfig` or `Ablation`, in place of these.
    """
    settings = {"governor": False, "bypass": False, "read_mode": "direct", **fields}
    names = [field.name for field in dataclasses.fields(promoe.Ablation)]
    ablation = promoe.Ablation(**{name: settings.pop(name) for name in names if name in settings})
    config = promoe.PromoeConfig(**settings, ablation=ablation)
    return promoe.from_pretrained(
        checkpoint, cache=cache, predictor=predictor, link="auto" if link is None else link, config=config
    )


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of equal length in columns, the first row as the head."""
    print("\n".join(aligned(rows)), flush=True)


def save(path: Path, results: Any) -> None:
    """Write results as JSON, and say where they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nwritten to {path}")
