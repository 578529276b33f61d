"""The options of commands that open a model and answer with it."""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass
from typing import Any


@dataclass(frozen=True)
class ModelOptions:
    """Which model is opened, and how."""

    model: str
    """folder of a safetensors checkpoint, or a hub id"""
    _: KW_ONLY
    cache: str = "50%"
    """RAM (with --device cuda, GPU memory) for experts: a size ("6GiB"), a share of the routed experts ("25%"), bytes, or
    "auto" (what is free, less 2 GiB)"""
    predictor: str = "gate"
    """what predicts the experts to prefetch: "gate", "previous", "popularity", "random", the folder or hub id of a trained
    predictor, or "none" for no prefetch"""
    device: str = "cpu"
    """"cuda" puts the slots and everything but the experts on the GPU"""
    packed: str = "auto"
    """experts that `promoe pack MODEL` packed: "auto" (beside the checkpoint, if they are there), the folder of --out, or
    "none" to read the checkpoint's own"""

    def for_opening(self) -> dict[str, Any]:
        """Return the arguments of `promoe.from_pretrained` that these options stand for."""
        return {
            "cache": cache_size(self.cache),
            "predictor": _unless_none(self.predictor),
            "device": self.device,
            "packed": _unless_none(self.packed),
        }


def cache_size(text: str) -> str | int:
    """Return the size of a cache as promoe takes it: whole numbers on a command line are bytes."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else text


def _unless_none(text: str) -> str | None:
    return None if text.lower() == "none" else text
