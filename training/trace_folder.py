"""The folder of a recorded trace: what its files are named, what they hold, and whether a collection can go on with it.

It holds `trace.json` (`TraceInfo`), `gates.safetensors` (the gates' weights), and parts `part-<shard>-<number>.arrow`. A part
is an Arrow stream that `datasets.Dataset.from_file` opens. Each row is a token:

    prompt       int64   position of its prompt in the data
    position     int32   its place in the sequence
    phase        class   prefill, or decode: it was generated
    token_id     int32
    gate_input   uint16  [layers * hidden_size], the bits of bfloat16
    gate_logits  float32 [sum of experts over layers], logits or scores as the gate returned them
    experts      int16   [sum of top_k over layers]

A prompt's rows are in one part, in order. A part that is deleted is recorded again by the next run.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from datasets import ClassLabel, Features, Value
from datasets import Sequence as ListOf

from promoe.errors import ConfigError
from promoe.files import open_plain, read_json
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
        revision: commit on the hub, if known.
        model_type: the model's family in Transformers.
        hidden_size: size of the gate input.
        num_experts: experts of each MoE layer.
        top_k: experts per token of each MoE layer.
        settings: how the data was chosen and run.
        versions: versions of the libraries.
        format: version of this format.
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
        """The columns of a part."""
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
        names = ("model", "revision", "model_type", "hidden_size", "num_experts", "top_k")
        asked, recorded = ({name: getattr(info, name) for name in names} for info in (self, found))
        require_same(asked | self.settings, recorded | found.settings, folder)


def read_info(folder: Path) -> TraceInfo:
    """Return what a trace was recorded from.

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
    """Return whether the fields from which the columns follow have the right types and possible sizes."""
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


def model_folder(folder: Path) -> str | None:
    """Return the folder or GGUF file of the model that a trace was recorded from; None: it is not on this machine.

    Raises:
        TraceError: there is no trace, or one that this version cannot read.
    """
    model = read_info(folder).model
    return model if os.path.exists(model) else None


def find_info(folder: Path) -> TraceInfo | None:
    """Return what a folder's trace was recorded from; None: the folder holds no trace.

    Raises:
        ConfigError: the folder holds parts, but nothing says what they were recorded from.
        TraceError: as `read_info`.
    """
    if os.path.exists(folder / INFO_FILE):
        return read_info(folder)
    if part_paths(folder):
        raise ConfigError(
            f"{folder} holds parts of a trace without their {INFO_FILE}. Restore it, or choose another folder."
        )
    return None


def check_folder(folder: Path, model: str, settings: Mapping[str, Any]) -> None:
    """Check, before a model is opened, that a folder is empty or holds a trace with which a collection can go on.

    Raises:
        ConfigError: it is not a folder, or holds another trace.
        TraceError: it holds one that this version cannot read.
    """
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise ConfigError(f"'{folder}' is not a folder. Choose another.")
    found = find_info(folder)
    if found is not None:
        require_same({"model": model, **settings}, {"model": found.model, **found.settings}, folder)


def require_same(asked: Mapping[str, Any], found: Mapping[str, Any], folder: Path, what: str = "trace") -> None:
    """Raise ConfigError if a folder holds something that was made with settings other than those asked for."""
    for name in dict.fromkeys([*asked, *sorted(found)]):
        if asked.get(name) != found.get(name):
            raise ConfigError(
                f"{folder} holds a {what} with {name} = {found.get(name)!r}, and {asked.get(name)!r} was asked for. Repeat "
                f"the command as it was to go on with that {what}, or choose another folder."
            )


def part_paths(folder: Path, shard_index: int | None = None) -> list[Path]:
    """Return the complete parts, of one shard or of all, in order."""
    if not os.path.isdir(folder):
        return []  # also for names that no folder can have
    shard = "*" if shard_index is None else f"{shard_index:05d}"
    return sorted(folder.glob(f"part-{shard}-*.arrow"))


@dataclass(frozen=True)
class Rows:
    """Tokens of one prompt, in order; at least one.

    Args:
        prompt: its position in the data.
        phase: `[n]`, PREFILL or DECODE.
        token_ids: `[n]`.
        gate_inputs: bfloat16 `[n, layers, hidden_size]`.
        gate_logits: float32 `[n, sum of experts]`.
        experts: `[n, sum of top_k]`.
    """

    prompt: int
    phase: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int32]
    gate_inputs: torch.Tensor
    gate_logits: npt.NDArray[np.float32]
    experts: npt.NDArray[np.int16]

    def table(self, features: Features) -> pa.Table:
        """Return the rows as an Arrow table."""
        count = len(self.token_ids)
        bits = self.gate_inputs.reshape(count, -1).view(torch.uint16).numpy()
        columns = {
            "prompt": pa.array(np.full(count, self.prompt)),
            "position": pa.array(np.arange(count, dtype=np.int32)),
            "phase": pa.array(self.phase),
            "token_id": pa.array(self.token_ids),
            "gate_input": _lists(bits),
            "gate_logits": _lists(self.gate_logits),
            "experts": _lists(self.experts),
        }
        return pa.table(columns, schema=features.arrow_schema)


def _lists(values: npt.NDArray[Any]) -> pa.FixedSizeListArray:
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).reshape(-1)), values.shape[1])


@dataclass(frozen=True)
class Part:
    """Rows on disk.

    Args:
        table: the rows, read where they lie.
        prompts: `[p]`, its prompts in order.
        lengths: `[p]`, rows of each prompt.
    """

    table: pa.Table
    prompts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


def open_part(path: Path, info: TraceInfo) -> Part:
    """Map a part into memory and check it.

    Raises:
        TraceError: it cannot be read, or is damaged.
    """
    remedy = "Delete it, and repeat `promoe-train collect`: it records again what is missing."
    expected = info.features.arrow_schema
    try:
        os.close(open_plain(path))
        messages = pa.ipc.MessageReader.open_stream(pa.memory_map(str(path)))
        schema = pa.ipc.read_schema(messages.read_next_message())
        names = schema.names
        batches = list(_batches(messages, schema)) if schema.equals(expected) else []
        table = pa.Table.from_batches(batches, schema)
        table.validate()
    # Also for names that are not Unicode, and for a file that ends before a message.
    except (OSError, ValueError, EOFError, StopIteration, struct.error, pa.ArrowException) as error:
        raise TraceError(f"Cannot read {path}: {type(error).__name__}: {str(error)[:500]}. {remedy}") from error
    if not schema.equals(expected):
        raise TraceError(
            f"{path} has other columns than {INFO_FILE} says: expected {expected.names}, in their types; found {names[:20]}. "
            f"{remedy}"
        )
    if not len(table):
        raise TraceError(f"{path} holds no rows. {remedy}")
    if any(column.num_chunks != 1 or _num_nulls(column.chunk(0)) for column in table.columns):
        raise TraceError(f"{path} was not written by promoe: it has several batches, or gaps. {remedy}")
    prompts, positions = table.column("prompt").to_numpy(), table.column("position").to_numpy()
    starts = np.flatnonzero(positions == 0)
    lengths = np.diff(starts, append=len(table))
    whole = len(starts) > 0 and starts[0] == 0
    whole = whole and bool((positions == np.arange(len(table)) - np.repeat(starts, lengths)).all())
    if not whole or not (prompts == np.repeat(prompts[starts], lengths)).all():
        raise TraceError(f"{path} is damaged: the tokens of its prompts do not follow each other. {remedy}")
    return Part(table, prompts[starts], lengths)


def _batches(messages: pa.ipc.MessageReader, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a stream, where they lie.

    Raises:
        ValueError: one is compressed, so that nothing tells how large it is.
    """
    for message in messages:
        if _is_compressed(message.metadata.to_pybytes()):
            raise ValueError("its columns are compressed, which promoe never does")
        yield pa.ipc.read_record_batch(message, schema)


def _is_compressed(metadata: bytes) -> bool:
    """Return whether a batch names a compression: field 3 of the header, which is field 2 of a message.

    The metadata is in flatbuffers (see Arrow's format). Arrow itself only tells after it has decompressed the columns.
    """
    message = _field(metadata, struct.unpack_from("<I", metadata)[0], 2)
    if message is None:
        return False
    return _field(metadata, message + struct.unpack_from("<I", metadata, message)[0], 3) is not None


def _field(content: bytes, table: int, number: int) -> int | None:
    """Return the position of a field of a flatbuffers table; None: the field has its default."""
    listed = table - struct.unpack_from("<i", content, table)[0]
    entry = 4 + 2 * number
    if entry >= struct.unpack_from("<H", content, listed)[0]:
        return None
    offset: int = struct.unpack_from("<H", content, listed + entry)[0]
    return table + offset if offset else None


def _num_nulls(column: pa.Array) -> int:
    """Return how many rows are null, and for lists also how many numbers in them."""
    inner = column.flatten().null_count if pa.types.is_fixed_size_list(column.type) else 0
    return int(column.null_count + inner)


def distinct_prompts(parts: Sequence[Part], folder: Path) -> npt.NDArray[np.int64]:
    """Return the prompts of some parts, in order.

    Raises:
        TraceError: one is there twice.
    """
    prompts = np.concatenate([np.empty(0, np.int64), *(part.prompts for part in parts)])
    found, counts = np.unique(prompts, return_counts=True)
    if (counts > 1).any():
        raise TraceError(
            f"{folder} holds prompt {found[counts > 1][0]} twice: parts of different runs were put together. Delete those that "
            "do not belong there, or record anew into an empty folder."
        )
    return prompts


def flat(part: pa.Table, name: str) -> npt.NDArray[Any]:
    """Return a column of fixed-size lists as `[rows, length]`, where it lies."""
    (column,) = part.column(name).chunks  # a part is written as one batch
    length = column.type.list_size
    # `values` would begin at the parent's first row, also for a slice.
    values = column.flatten().to_numpy(zero_copy_only=True)
    result: npt.NDArray[Any] = values.reshape(-1, length)
    return result
