"""Where the demo model, its held-out prompts and the script that widens it are: in the repository's examples."""

from __future__ import annotations

import importlib.util
import json
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

PLACE = Path("examples") / "sharegpt_moe"
PROMPTS = "heldout_prompts.json"
MARKER = "widened.json"  # what widen.py leaves in the folders that it wrote
# Above this held-out loss (nats per token) the model's prose is not worth showing.
READABLE_LOSS = 3.5


@dataclass(frozen=True)
class Example:
    """The demo's files.

    Args:
        folder: examples/sharegpt_moe of a checkout.
        checkpoint: the model to open.
    """

    folder: Path
    checkpoint: Path

    @property
    def predictor(self) -> Path | None:
        """The trained predictor of the example's own model; None where there is none, or the model is another."""
        folder = self.folder / "predictor"
        is_own = self.checkpoint.resolve() == (self.folder / "checkpoint").resolve()
        return folder if is_own and (folder / "config.json").is_file() else None

    def prompts(self, count: int) -> list[str]:
        """The first `count` held-out prompts.

        Raises:
            ConfigError: there are fewer, or the file is not a list of texts.
        """
        return self.all_prompts(count)[:count]

    def all_prompts(self, count: int) -> list[str]:
        """All held-out prompts, at least `count`.

        Raises:
            ConfigError: there are fewer, or the file is not a list of texts.
        """
        path = self.folder / PROMPTS
        try:
            texts = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"Cannot read the held-out prompts '{path}': {error}") from error
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"'{path}' must hold a JSON list of texts. Got {type(texts).__name__} instead.")
        if len(texts) < count:
            raise ConfigError(f"'{path}' holds {len(texts)} prompts; {count} are needed. Ask for fewer with --prompts.")
        return texts

    def heldout_loss(self) -> float | None:
        """Held-out loss in nats per token, as the checkpoint's model card states it; None where it does not."""
        card = self.checkpoint / "README.md"
        found = re.search(r"held-out loss[^0-9]*([0-9]+\.[0-9]+)", _text(card), re.IGNORECASE)
        return float(found[1]) if found else None

    def widen(self, destination: Path, repeat: int, dtype: torch.dtype) -> Path:
        """The widened checkpoint in `destination`: as it is if this was its source, else written (anew).

        Raises:
            PromoeError: it cannot be written.
        """
        write: Callable[..., Path] = _load_script(self.folder / "widen.py").widen
        try:
            return write(self.checkpoint, destination, repeat=repeat, dtype=dtype)
        except PromoeError:
            if not (destination / MARKER).is_file():
                raise
        # Ours, but of another model or repeat: a retrained demo model must not stop the demo.
        shutil.rmtree(destination)
        return write(self.checkpoint, destination, repeat=repeat, dtype=dtype)


def find_example(model: str | None = None) -> Example:
    """The example in the current folder's checkout, or in the one that promoe was installed from.

    Args:
        model: checkpoint folder to use in place of the example's own.

    Raises:
        ConfigError: there is no checkout, or no checkpoint.
    """
    roots = [Path.cwd(), Path(promoe.__file__).resolve().parent.parent]
    folder = next((root / PLACE for root in roots if (root / PLACE / PROMPTS).is_file()), None)
    if folder is None:
        raise ConfigError(
            f"The demo needs '{PLACE / PROMPTS}' of promoe's repository, which is neither in {roots[0]} nor in {roots[1]}. "
            "Clone the repository and run the demo in it (make demo)."
        )
    checkpoint = folder / "checkpoint" if model is None else Path(model)
    if not (checkpoint / "config.json").is_file():
        raise ConfigError(
            f"The demo model '{checkpoint}' has no config.json. Give the folder of a checkpoint with --model, or train one "
            f"with {PLACE / 'train.py'}."
        )
    return Example(folder, checkpoint)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _load_script(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"promoe_example_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"The demo needs '{path}', which is missing. Clone promoe's repository again.")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
