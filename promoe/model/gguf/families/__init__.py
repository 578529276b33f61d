"""The MoE architectures of GGUF files: what llama.cpp calls each, and how it becomes a model of Transformers.

A GGUF file has no config.json, and its tensors have other names than the model's parameters. A `Family` turns the file's
metadata into the fields of a configuration, and gives the conversions from the file's tensors to the parameters. What
a file does not say follows llama.cpp, which all of them are written for.
"""

from __future__ import annotations

from .base import Family, Metadata, Shapes
from .qwen import QWEN3_MOE

__all__ = ["FAMILIES", "Family", "Metadata", "Shapes"]

# By `general.architecture`.
FAMILIES: dict[str, Family] = {
    "qwen3moe": QWEN3_MOE,
}
