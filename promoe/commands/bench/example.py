"""Finds the demo model, its held-out prompts and the script that widens it, which are in the repository's examples."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import promoe
from promoe.errors import ConfigError, PromoeError
from promoe.files import read_json

PLACE = Path("examples") / "sharegpt_moe"
PROMPTS = "heldout_prompts.json"
MARKER = "widened.json"  # what widen.py leaves in the folders that it wrote
# Above this held-out loss (nats per token) the model's prose is not worth showing.
READABLE_LOSS = 3.5


@dataclass(frozen=True)
class Example:
    """The files of the demo model.

    Attributes:
        folder: examples/sharegpt_moe of a checkout.
        checkpoint: the model to open.
    """

    folder: Path
    checkpoint: Path

    @property
    def predictor(self) -> Path | None:
        """The predictor that was trained for the model; None if there is none, or the model is not the example's own."""
        folder = self.folder / "predictor"
        is_own = self.checkpoint.resolve() == (self.folder / "checkpoint").resolve()
        return folder if is_own and os.path.isfile(folder / "config.json") else None

    def prompts(self, count: int) -> list[str]:
        """Return the first `count` held-out prompts.

        Raises:
            ConfigError: there are fewer, or the file is not a list of texts.
        """
        return read_prompts(self.prompts_file, count, "Ask for fewer with --prompts.")[:count]

    @property
    def prompts_file(self) -> Path:
        """The file of the held-out prompts."""
        return self.folder / PROMPTS

    def heldout_loss(self) -> float | None:
        """Return the held-out loss in nats per token that the model card states; None if it does not."""
        card = self.checkpoint / "README.md"
        found = re.search(r"held-out loss[^0-9]{0,80}([0-9]+\.[0-9]+)", _text(card), re.IGNORECASE)
        return float(found[1]) if found else None

    def widened(self, folder: Path, repeat: int, dtype: torch.dtype) -> Path:
        """Return the widened checkpoint in a folder for several, as `widen` does."""
        return self.widen(folder / f"widened-x{repeat}-{str(dtype).removeprefix('torch.')}", repeat, dtype)

    def widen(self, destination: Path, repeat: int, dtype: torch.dtype) -> Path:
        """Return the widened checkpoint in `destination`. It is written unless it is there and was made of this model.

        Raises:
            PromoeError: it cannot be written.
        """
        write: Callable[..., Path] = _load_script(self.folder / "widen.py").widen
        try:
            return write(self.checkpoint, destination, repeat=repeat, dtype=dtype)
        except PromoeError:
            if not os.path.isfile(destination / MARKER):
                raise
        # Ours, but of another model or repeat: a retrained demo model must not stop the demo.
        shutil.rmtree(destination)
        return write(self.checkpoint, destination, repeat=repeat, dtype=dtype)


def read_prompts(path: Path, count: int, remedy: str) -> list[str]:
    """Return all texts of a file.

    Args:
        path: a JSON list of texts.
        count: how many are needed.
        remedy: what to do if there are fewer.

    Raises:
        ConfigError: there are fewer, or the file is not such a list.
    """
    try:
        texts = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"Cannot read the prompts '{path}': {error}. Give a file with a JSON list of texts."
        ) from error
    if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
        found = "a list with other things in it" if isinstance(texts, list) else type(texts).__name__
        raise ConfigError(f"'{path}' must hold a JSON list of texts that are not empty. Got {found} instead.")
    if len(texts) < count:
        raise ConfigError(f"'{path}' holds {len(texts)} prompts; {count} are needed. {remedy}")
    return texts


def find_example(model: str | None = None) -> Example:
    """Return the example of the checkout in the current folder, or of the one that promoe was installed from.

    Args:
        model: checkpoint folder to use in place of the example's own.

    Raises:
        ConfigError: there is no checkout, or no checkpoint.
    """
    roots = [Path.cwd(), Path(promoe.__file__).resolve().parent.parent]
    folder = next((root / PLACE for root in roots if os.path.isfile(root / PLACE / PROMPTS)), None)
    if folder is None:
        raise ConfigError(
            f"The demo needs '{PLACE / PROMPTS}' of promoe's repository, which is neither in {roots[0]} nor in {roots[1]}. "
            "Clone the repository and run the demo in it (make demo)."
        )
    checkpoint = folder / "checkpoint" if model is None else Path(model)
    if not os.path.isfile(checkpoint / "config.json"):
        raise ConfigError(
            f"The demo model '{checkpoint}' has no config.json. Give the folder of a checkpoint with --model, or train one "
            f"with {PLACE / 'train.py'}."
        )
    return Example(folder, checkpoint)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _load_script(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"promoe_example_{path.stem}", path)
    if spec is None or spec.loader is None or not os.path.isfile(path):
        raise ConfigError(f"The demo needs '{path}', which is missing. Clone promoe's repository again.")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
