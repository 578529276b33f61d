"""The metadata of a GGUF file and the shapes of its tensors, checked when they are asked for."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import numpy as np

from promoe.errors import CheckpointError, shown
from promoe.model.opening_checks import MAX_LAYERS

Metadata: TypeAlias = Mapping[str, Any]
"""The key-value pairs of a file."""
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""The shapes of a file's tensors by name, with the longest stride first, as in torch."""

# Keys that say nothing of what is computed, or nothing that tensors do not say.
_WITHOUT_EFFECT = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "expert_shared_count")


_OUTER = ("token_embd.weight", "output_norm.weight", "output.weight")


class File:
    """The metadata of a file and the shapes of its tensors, with errors that name the key.

    Args:
        metadata: of the file.
        shapes: of its tensors.
    """

    def __init__(self, metadata: Metadata, shapes: Shapes) -> None:
        self.metadata, self.shapes = metadata, shapes
        self.architecture = str(metadata["general.architecture"])
        self._known = set(_WITHOUT_EFFECT)
        layers, predicting = self.whole("block_count"), self.whole("nextn_predict_layers", 0)
        if layers > MAX_LAYERS:
            raise self.error(f"block_count is {layers}, but at most {MAX_LAYERS} layers were expected")
        if predicting > layers:
            raise self.error(f"nextn_predict_layers is {predicting}, of {layers} layers")
        self.num_layers = layers - predicting
        """Layers of the model. The file also counts those that predict a second token. They come last, and are not used."""

    def has(self, key: str) -> bool:
        """Whether the architecture's `key` is there."""
        self._known.add(key)
        return f"{self.architecture}.{key}" in self.metadata

    def ignore(self, *keys: str) -> None:
        """Note keys that do not matter, or that tensors say, too."""
        self._known.update(keys)

    def whole(self, key: str, default: int | None = None) -> int:
        """Return a whole number of the architecture; without a default the key must be there."""
        value = self._one(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise self.error(f"{key} is {shown(value)}, but a whole number below 2^31 was expected")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        """Return a whole number of the architecture that is not zero."""
        if (value := self.whole(key, default)) == 0:
            raise self.error(f"{key} is 0")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """Return a number of the architecture; without a default the key must be there.

        Files have fp32. Returns the shortest decimal that rounds to it, which is what the original configuration said.
        """
        value = self._one(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.error(f"{key} is {shown(value)}, but a number was expected")
        shortest = np.float32(value)
        return float(str(shortest)) if float(shortest) == value else float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a flag of the architecture."""
        value = self._one(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} is {shown(value)}, but true or false was expected")
        return value

    def text(self, key: str, default: str) -> str:
        """Return a text of the architecture."""
        value = self._one(key, default)
        if not isinstance(value, str):
            raise self.error(f"{key} is {shown(value)}, but a text was expected")
        return value

    def wholes(self, key: str) -> list[int]:
        """Return a list of whole numbers; empty: the key is not there, or is something else."""
        self._known.add(key)
        value = self.metadata.get(f"{self.architecture}.{key}")
        return value if isinstance(value, list) and all(type(one) is int for one in value) else []

    def flags(self, key: str) -> list[bool]:
        """Return a list of flags; empty: the key is not there, or is something else."""
        self._known.add(key)
        value = self.metadata.get(f"{self.architecture}.{key}")
        return value if isinstance(value, list) and all(type(one) is bool for one in value) else []

    def token(self, name: str) -> int | None:
        """Return the id of a special token of the tokenizer; None: it has no such token."""
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) else None

    def rows(self, name: str) -> int:
        """Return the first size of a tensor."""
        if not self.shapes.get(name):
            raise self.error(f"it has no tensor {name!r}")
        return self.shapes[name][0]

    def any_block_has(self, leaf: str) -> bool:
        """Whether some layer has the tensor `leaf`, such as "attn_q.bias"."""
        return any(name.startswith("blk.") and name.endswith(f".{leaf}") for name in self.shapes)

    def check(
        self,
        weights: Collection[str],
        biases: Collection[str] = (),
        others: Collection[str] = (),
    ) -> None:
        """Raise CheckpointError if the file has something that the model has no place for. Called when all is read.

        Args:
            weights: the tensors of a layer that have a weight, such as "attn_q".
            biases: those that have a bias.
            others: further tensors, with their whole names, in a layer or not.
        """
        known = {f"{name}.weight" for name in weights} | {f"{name}.bias" for name in biases} | set(others)
        for name in self.shapes:
            layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
            if layer and int(layer[1]) >= self.num_layers:
                continue  # of those that predict a second token
            if (layer[2] if layer else name) not in (known if layer else {*_OUTER, *others}):
                raise self.error(f"it has the tensor {name!r}, which the model that would be opened has no place for")
        prefix = f"{self.architecture}."
        for key, value in self.metadata.items():
            if key.startswith(prefix) and key.removeprefix(prefix) not in self._known:
                raise self.error(f"{key} is {shown(value)}, which the model that would be opened does not have")

    def refuse_unless(self, key: str, allowed: Collection[Any], why: str) -> None:
        """Raise CheckpointError if `key` is there with another value than those allowed."""
        value = self._one(key, next(iter(allowed)))
        if value not in allowed:
            raise self.error(f"{key} is {shown(value)}, {why}")

    def error(self, what: str) -> CheckpointError:
        """Return an error about the file."""
        return CheckpointError(
            f"The GGUF file (architecture {self.architecture}) cannot be opened: {what}. It is damaged, or a variant of the "
            "architecture that promoe does not read: open the model's safetensors checkpoint."
        )

    def _one(self, key: str, default: Any) -> Any:
        """Return a value; a list with one entry per layer counts if all entries are equal."""
        self._known.add(key)
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise self.error(f"its metadata has no {self.architecture}.{key}")
        if isinstance(value, (list, tuple)):
            if not value or any(one != value[0] for one in value):
                raise self.error(f"{key} differs from layer to layer ({shown(list(value))})")
            return value[0]
        return value
