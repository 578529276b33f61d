"""The folder of a recorded trace: what it is named, what it was recorded from, whether it can be gone on with.

It holds `trace.json` (`TraceInfo`), `gates.safetensors` (the gates' weights), and parts
`part-<shard>-<number>.arrow`; see `trace_parts`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Features, Value
from datasets import Sequence as ListOf

from promoe.errors import ConfigError
from promoe.files import read_json
from promoe.training.routing_traces import MAX_EXPERTS, TraceError

INFO_FILE = "trace.json"
GATES_FILE = "gates.safetensors"
FORMAT = 1
PREFILL, DECODE = 0, 1
MAX_LIST_LENGTH = 2**31 - 1  # Arrow's


@dataclass(frozen=True)
class TraceInfo:
    """What a trace was recorded from; the same for all its parts.

    Args:
        model: folder or hub id.
        revision: commit of the hub, if known.
        model_type: the model's family in Transformers.
        hidden_size: of the gate input.
        num_experts: of each MoE layer.
        top_k: of each MoE layer.
        settings: how the data was chosen and run.
        versions: of the libraries.
        format: of the files.
    """

    model: str
    revision: str | None
    model_type: str
    hidden_size: int
    num_experts: list[int]
    top_k: list[int]
    settings: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return len(self.num_experts)

    @property
    def token_bytes(self) -> int:
        """Bytes of one row."""
        return 24 + 2 * self.num_layers * self.hidden_size + 4 * sum(self.num_experts) + 2 * sum(self.top_k)

    @property
    def features(self) -> Features:
        """The columns."""
        return Features(
            {
                "prompt": Value("int64"),
                "position": Value("int32"),
                "phase": ClassLabel(names=["prefill", "decode"]),
                "token_id": Value("int32"),
                "gate_input": ListOf(Value("uint16"), length=self.num_layers * self.hidden_size),
                "gate_logits": ListOf(Value("float32"), length=sum(self.num_experts)),
                "experts": ListOf(Value("int16"), length=sum(self.top_k)),
            }
        )

    def check_same(self, found: TraceInfo, folder: Path) -> None:
        """Raise ConfigError if a folder's trace is of another model or of other settings."""
        for name in ("model", "revision", "model_type", "hidden_size", "num_experts", "top_k"):
            _require_same(name, getattr(self, name), getattr(found, name), folder)
        require_same_settings(self.settings, found.settings, folder)


def part_paths(folder: Path, shard_index: int | None = None) -> list[Path]:
    """Complete parts, of one shard or of all, in order."""
    if not os.path.isdir(folder):
        return []  # also of a name that cannot be one
    shard = "*" if shard_index is None else f"{shard_index:05d}"
    return sorted(folder.glob(f"part-{shard}-*.arrow"))


def model_folder(folder: Path) -> str | None:
    """Where the model is that a trace was recorded from; None: that is no folder here.

    Raises:
        TraceError: there is no trace, or one that this version cannot read.
    """
    model = read_info(folder).model
    return model if os.path.isdir(model) else None


def read_info(folder: Path) -> TraceInfo:
    """What a trace was recorded from.

    Raises:
        TraceError: there is no trace, or one that this version cannot read.
    """
    path = folder / INFO_FILE
    try:
        values = read_json(path)
    except OSError as error:
        raise TraceError(
            f"{folder} holds no recorded trace: {INFO_FILE}: {error.strerror}. Record one with `promoe-train collect`."
        ) from error
    except ValueError as error:
        raise TraceError(f"{path} is not JSON: {error}. Restore it, or record anew into another folder.") from error
    found = values.get("format") if isinstance(values, dict) else None
    if found != FORMAT:
        raise TraceError(
            f"{path} does not describe a trace of format {FORMAT}: found format {found!r:.80}. Read it with the version of "
            "promoe that wrote it, or record anew into another folder."
        )
    if values.keys() != {f.name for f in fields(TraceInfo)} or not _are_sound(values):
        raise TraceError(
            f"{path} is damaged: fields are missing or wrong. Restore it, or record anew into another folder."
        )
    return TraceInfo(**values)


def _are_sound(values: Mapping[str, Any]) -> bool:
    """Whether what the columns are made from has the right types."""
    experts, top_k, hidden_size = values["num_experts"], values["top_k"], values["hidden_size"]
    if not (isinstance(experts, list) and isinstance(top_k, list) and len(experts) == len(top_k) > 0):
        return False
    if not all(isinstance(values[name], dict) for name in ("settings", "versions")):
        return False
    texts = (values["model"], values["model_type"], values["revision"] or "")
    if not all(isinstance(text, str) for text in texts):
        return False
    if not all(type(size) is int and size > 0 for size in (hidden_size, *experts, *top_k)):
        return False
    fits = all(chosen <= count <= MAX_EXPERTS for chosen, count in zip(top_k, experts, strict=True))
    return fits and max(hidden_size * len(experts), sum(experts)) <= MAX_LIST_LENGTH


def find_info(folder: Path) -> TraceInfo | None:
    """What a folder's trace was recorded from; None: it holds none.

    Raises:
        ConfigError: it holds parts, and nothing says of what.
        TraceError: as `read_info`.
    """
    if os.path.exists(folder / INFO_FILE):
        return read_info(folder)
    if part_paths(folder):  # of which model, nobody knows
        raise ConfigError(
            f"{folder} holds parts of a trace without their {INFO_FILE}. Restore it, or choose another folder."
        )
    return None


def check_folder(folder: Path, model: str, settings: Mapping[str, Any]) -> None:
    """What can be said before a model is opened: whether a folder is empty, or holds a trace that can be gone on with.

    Raises:
        ConfigError: it is no folder, or holds another trace.
        TraceError: it holds one that this version cannot read.
    """
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise ConfigError(f"'{folder}' is not a folder. Choose another.")
    found = find_info(folder)
    if found is not None:
        _require_same("model", model, found.model, folder)
        require_same_settings(settings, found.settings, folder)


def require_same_settings(
    asked: Mapping[str, Any], found: Mapping[str, Any], folder: Path, what: str = "trace"
) -> None:
    """Raise ConfigError if a folder holds what was made with other settings, and so cannot be gone on with."""
    for name in sorted(asked.keys() | found.keys()):
        _require_same(name, asked.get(name), found.get(name), folder, what)


def _require_same(name: str, asked: object, found: object, folder: Path, what: str = "trace") -> None:
    if asked != found:
        raise ConfigError(
            f"{folder} holds a {what} with {name} = {found!r}, and {asked!r} was asked for. Repeat the command as it was to "
            f"go on with that {what}, or choose another folder."
        )
