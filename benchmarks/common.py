"""What several benchmarks need: the demo model with experts of real size, and where their figures go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Experts of 10.6 MB each.
WIDTH = 128
# Hidden and intermediate size.
SHAPES = {"demo x128": (192, 9216), "Qwen3-30B-A3B": (2048, 768), "gpt-oss-20b": (2880, 2880)}


def widened_demo(out: Path, count: int) -> tuple[Path, list[torch.Tensor]]:
    """The widened checkpoint in `out`, made unless it is there, and `count` held-out prompts, `[1, num_tokens]` ids each."""
    import torch
    from transformers import AutoTokenizer

    from promoe.commands.bench.example import find_example

    example = find_example()
    checkpoint = example.widened(out, WIDTH, torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return checkpoint, [tokenizer(text, return_tensors="pt").input_ids for text in example.prompts(count)]


def on_the_way(misses: float, lru: float, belady: float) -> str:
    """A cell: misses per token, and per cent of the way from LRU's to Belady's."""
    return f"{misses:.2f} ({100 * (lru - misses) / (lru - belady):.0f}%)"


def save(path: Path, results: Any) -> None:
    """As JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2))
