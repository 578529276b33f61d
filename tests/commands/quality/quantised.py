"""A tiny checkpoint whose experts are also there in fewer bits, and texts."""

from __future__ import annotations

import io
import json
from pathlib import Path

import torch
from tiny_checkpoint import write_checkpoint

from promoe.commands.quantize import options as quantize
from promoe.commands.quantize.command import run_quantize

GROUP = 32


def write_quantised(folder: Path) -> Path:
    """int8, int4 and int2 beside the files, and int4 with another group in a folder of its own."""
    model = write_checkpoint(folder / "model", hidden=128, intermediate=64)
    for options in (
        quantize.Options(str(model), bits=8),
        quantize.Options(str(model), bits=4, group=GROUP),
        quantize.Options(str(model), bits=2, group=GROUP),
        quantize.Options(str(model), bits=4, group=64, out=str(folder / "coarse")),
    ):
        run_quantize(options, io.StringIO())
    return model


def write_texts(folder: Path) -> Path:
    """Random bytes, because the model's weights are random, too."""
    path = folder / "texts.jsonl"
    generator = torch.Generator().manual_seed(0)
    letters = [bytes(torch.randint(97, 123, (60,), generator=generator).tolist()).decode() for _ in range(8)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in letters))
    return path
