"""The options of commands that open a model and answer with it."""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ModelOptions:
    """Which model is opened, and how."""

    model: str
    """folder of a checkpoint, a GGUF file, or a hub id (of a GGUF file: org/name/file.gguf)"""
    _: KW_ONLY
    experts: str = "auto"
    """form of the experts: "auto" (as the checkpoint has them, or packed by `promoe pack`), "int8", "int4" or "int4-hot8" (as
    `promoe quantize` wrote them; output changes), the folder of --out, or "checkpoint" (never packed)"""
    cache: str = "50%"
    """RAM (with --device cuda, GPU memory) for experts: a size ("6GiB"), a share of the routed experts ("25%"), bytes,
    "auto" (what is free, less 2 GiB), or slots for each layer ("2 per layer")"""
    predictor: str = "gate"
    """what predicts the experts to prefetch: "gate", "correlation", "previous", "popularity", "random", the folder or hub id
    of a trained predictor, or "none" for no prefetch"""
    kernels: Literal["exact", "fast"] = "exact"
    """"fast" multiplies in fp32 where a processor is slow in 16 bits (mostly for many tokens at once); the last bits of the
    output change, and the report says how far"""
    device: str = "cpu"
    """"cuda" puts the slots and everything but the experts on the GPU"""

    def for_opening(self) -> dict[str, Any]:
        """Return the arguments of `promoe.from_pretrained` that these options stand for."""
        from promoe.config import PromoeConfig  # only now: a parser of options needs no torch

        return {
            "experts": self.experts,
            "cache": cache_size(self.cache),
            "predictor": _unless_none(self.predictor),
            "device": self.device,
            "config": PromoeConfig(kernels=self.kernels),
        }


def cache_size(text: str) -> str | int:
    """Return the size of a cache as promoe takes it: whole numbers on a command line are bytes."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else text


def _unless_none(text: str) -> str | None:
    return None if text.lower() == "none" else text
