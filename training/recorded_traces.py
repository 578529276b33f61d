"""Recorded traces: what every gate saw and chose, token by token, as `datasets` Arrow files that are read in place.

A folder holds `trace.json` (`TraceInfo`), `gates.safetensors` (the gates' weights), and parts
`part-<shard>-<number>.arrow`, each one Arrow stream that `datasets.Dataset.from_file` opens. A row is a token:

    prompt       int64   position of its prompt in the data
    position     int32   its place in the sequence
    phase        class   prefill, or decode: it was generated
    token_id     int32
    gate_input   uint16  [layers * hidden_size], the bits of bfloat16
    gate_logits  float32 [sum of experts over layers], logits or scores as the gate returned them
    experts      int16   [sum of top_k over layers]

A prompt's rows lie in one part, in order. A part is complete once it has its name, so whatever was written before an
interruption is kept, and nothing is there twice. A part that is deleted is recorded again by the next run. Knows files
and arrays; not models.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from datasets import ClassLabel, Features, Value
from datasets import Sequence as ListOf
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from promoe.errors import ConfigError
from promoe.output import write_atomically
from promoe.training.routing_traces import RoutingTrace, TraceError

INFO_FILE = "trace.json"
GATES_FILE = "gates.safetensors"
FORMAT = 1
PREFILL, DECODE = 0, 1
# A part is written when it has so many bytes; until then its rows are in memory, and lost if the process is killed.
PART_BYTES = 64 << 20
_UNFINISHED = ".unfinished"


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


def check_folder(folder: Path, model: str, settings: Mapping[str, Any]) -> None:
    """What can be said before a model is opened: whether a folder is empty, or holds a trace that can be gone on with.

    Raises:
        ConfigError: it is no folder, or holds another trace.
        TraceError: it holds one that this version cannot read.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"'{folder}' is not a folder. Choose another.")
    found = _find_info(folder)
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


def _find_info(folder: Path) -> TraceInfo | None:
    """What a folder's trace was recorded from; None: it holds none."""
    if (folder / INFO_FILE).exists():
        return read_info(folder)
    if part_paths(folder):  # of which model, nobody knows
        raise ConfigError(
            f"{folder} holds parts of a trace without their {INFO_FILE}. Restore it, or choose another folder."
        )
    return None


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
        """As Arrow."""
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


class TraceWriter:
    """Appends prompts to one shard of a trace, going on after what the folder already holds.

    Args:
        folder: made if there is none.
        info: must agree with the folder's.
        shard_index: whose parts are written; one writer per shard.
        part_bytes: see `PART_BYTES`.

    Raises:
        ConfigError: the folder holds another trace, or cannot be made.
        TraceError: it cannot be read.
    """

    def __init__(self, folder: Path, info: TraceInfo, shard_index: int = 0, part_bytes: int = PART_BYTES) -> None:
        self._folder = folder
        self._info = info
        self._shard_index = shard_index
        self._part_bytes = part_bytes
        self._tables: list[pa.Table] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"Cannot make the folder '{folder}': {error.strerror}. Choose another.") from error
        found = _find_info(folder)
        if found is not None:
            info.check_same(found, folder)
        else:
            write_atomically(folder / INFO_FILE, [json.dumps(asdict(info), indent=2), "\n"])
        for unfinished in folder.glob(f"part-{shard_index:05d}-*{_UNFINISHED}"):  # of a run that was killed
            unfinished.unlink(missing_ok=True)
        paths = part_paths(folder, shard_index)
        parts = [_open_part(path, info) for path in paths]
        # Not their count: one in between may have been deleted.
        self._next_part = int(paths[-1].stem.rpartition("-")[2]) + 1 if paths else 0
        self.recorded = frozenset(_distinct_prompts(parts, folder).tolist())
        """Prompts on disk: they need not be run again."""
        self.num_tokens = sum(len(part.table) for part in parts)
        """Rows on disk and in memory."""
        self._generated = sum(_count_generated(part.table.column("phase").to_numpy()) for part in parts)

    @property
    def decode_share(self) -> float:
        """Of the rows."""
        return self._generated / max(1, self.num_tokens)

    def append(self, prompts: Sequence[Rows]) -> None:
        """Add the prompts of one batch; they are on disk at the latest after `flush`.

        Raises:
            TraceError: the disk is full, or does not take them for another reason.
        """
        features = self._info.features
        tables = [rows.table(features) for rows in prompts]
        self._tables.extend(tables)  # at once: an interrupt leaves the batch whole, or nothing of it
        self.num_tokens += sum(map(len, tables))
        self._generated += sum(_count_generated(rows.phase) for rows in prompts)
        if sum(map(len, self._tables)) * self._info.token_bytes >= self._part_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what is in memory as a part of its own.

        Raises:
            TraceError: as `append`. What was to be written stays in memory.
        """
        if not self._tables:
            return
        table = pa.concat_tables(self._tables).combine_chunks()
        path = self._folder / f"part-{self._shard_index:05d}-{self._next_part:05d}.arrow"
        with _written_whole(path) as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
        # In this order: if interrupted between, the same rows are written to the same part once more.
        self._tables.clear()
        self._next_part += 1


def _count_generated(phase: npt.NDArray[np.int64]) -> int:
    return int(np.count_nonzero(phase == DECODE))


def write_gates(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write the gates' parameters and buffers, by `<layer>.<name>`; see `RecordedTrace.gates`.

    Raises:
        TraceError: the disk is full, or does not take them for another reason.
    """
    with _written_whole(folder / GATES_FILE) as file:
        file.write(save(tensors))


@contextmanager
def _written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name once it is complete, and otherwise leaves nothing."""
    # By process: shards that are recorded at the same time write the same gates.
    unfinished = path.with_name(f"{path.stem}.{os.getpid()}{_UNFINISHED}")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise TraceError(
            f"Cannot write {path}: {error.strerror or error}. {'Free some space' if full else 'Mend the cause'} and repeat the "
            "command: it goes on after the parts that are complete."
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)


def part_paths(folder: Path, shard_index: int | None = None) -> list[Path]:
    """Complete parts, of one shard or of all, in order."""
    shard = "*" if shard_index is None else f"{shard_index:05d}"
    return sorted(folder.glob(f"part-{shard}-*.arrow"))


def read_info(folder: Path) -> TraceInfo:
    """What a trace was recorded from.

    Raises:
        TraceError: there is no trace, or one that this version cannot read.
    """
    path = folder / INFO_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceError(
            f"{folder} holds no recorded trace: {INFO_FILE}: {error.strerror}. Record one with `promoe-train collect`."
        ) from error
    except ValueError as error:
        raise TraceError(f"{path} is not JSON: {error}. Restore it, or record anew into another folder.") from error
    found = values.get("format") if isinstance(values, dict) else None
    if found != FORMAT:
        raise TraceError(
            f"{path} does not describe a trace of format {FORMAT}: found format {found!r}. Read it with the version of promoe "
            "that wrote it, or record anew into another folder."
        )
    if values.keys() != {f.name for f in fields(TraceInfo)} or not _are_sound(values):
        raise TraceError(
            f"{path} is damaged: fields are missing or wrong. Restore it, or record anew into another folder."
        )
    return TraceInfo(**values)


def _are_sound(values: Mapping[str, Any]) -> bool:
    """Whether what the columns are made from has the right types."""
    experts, top_k = values["num_experts"], values["top_k"]
    if not (isinstance(experts, list) and isinstance(top_k, list) and isinstance(values["settings"], dict)):
        return False
    sizes = [values["hidden_size"], *experts, *top_k]
    return len(experts) == len(top_k) > 0 and all(type(size) is int and size > 0 for size in sizes)


@dataclass(frozen=True)
class _Part:
    """Rows on disk.

    Args:
        table: read in place.
        prompts: `[p]`, its prompts in order.
        lengths: `[p]`, rows of each.
    """

    table: pa.Table
    prompts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


def _open_part(path: Path, info: TraceInfo) -> _Part:
    remedy = "Delete it, and repeat `promoe-train collect`: it records again what is missing."
    try:
        table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
        table.validate()
        names = table.schema.names
    except (OSError, ValueError, pa.ArrowException) as error:  # also names that are no Unicode
        raise TraceError(f"Cannot read {path}: {error}. {remedy}") from error
    expected = info.features.arrow_schema
    if not table.schema.equals(expected):
        raise TraceError(
            f"{path} has other columns than {INFO_FILE} says: expected {expected.names}, in their types; found {names}. "
            f"{remedy}"
        )
    if not len(table):
        raise TraceError(f"{path} holds no rows. {remedy}")
    if any(column.num_chunks != 1 or column.null_count for column in table.columns):
        raise TraceError(f"{path} was not written by promoe: it has several batches, or gaps. {remedy}")
    prompts, positions = table.column("prompt").to_numpy(), table.column("position").to_numpy()
    starts = np.flatnonzero(positions == 0)
    lengths = np.diff(starts, append=len(table))
    whole = len(starts) > 0 and starts[0] == 0
    whole = whole and bool((positions == np.arange(len(table)) - np.repeat(starts, lengths)).all())
    if not whole or not (prompts == np.repeat(prompts[starts], lengths)).all():
        raise TraceError(f"{path} is damaged: the tokens of its prompts do not follow each other. {remedy}")
    return _Part(table, prompts[starts], lengths)


def _distinct_prompts(parts: Sequence[_Part], folder: Path) -> npt.NDArray[np.int64]:
    """The prompts of some parts, in order. Raises TraceError if one is there twice."""
    prompts = np.concatenate([np.empty(0, np.int64), *(part.prompts for part in parts)])
    found, counts = np.unique(prompts, return_counts=True)
    if (counts > 1).any():
        raise TraceError(
            f"{folder} holds prompt {found[counts > 1][0]} twice: parts of different runs were put together. Delete those that "
            "do not belong there, or record anew into an empty folder."
        )
    return prompts


class RecordedTrace:
    """A trace that is read in place: opening takes no memory, rows are gathered as they are asked for.

    Args:
        folder: written by `TraceWriter`.

    Raises:
        TraceError: it holds no such trace, no rows, or prompts that are there twice.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.info = read_info(self.folder)
        parts = [_open_part(path, self.info) for path in part_paths(self.folder)]
        if not parts:
            raise TraceError(f"{self.folder} holds no rows yet. Record some with `promoe-train collect`.")
        self.prompts = _distinct_prompts(parts, self.folder)
        """`[p]`, their positions in the data, in the order of the rows."""
        self._lengths = np.concatenate([part.lengths for part in parts])
        self._parts = [part.table for part in parts]
        self._starts = np.array([0, *accumulate(map(len, self._parts))])

    @property
    def num_tokens(self) -> int:
        """Rows."""
        return int(self._starts[-1])

    @cached_property
    def routing(self) -> RoutingTrace:
        """Its ids alone.

        Raises:
            TraceError: layers differ in their experts, or ids are damaged.
        """
        info = self.info
        if len(set(info.num_experts)) > 1 or len(set(info.top_k)) > 1:
            raise TraceError(
                f"{self.folder}: layers with different numbers of experts ({sorted(set(info.num_experts))}, top "
                f"{sorted(set(info.top_k))}) are not supported here yet. Choose a model whose layers are alike."
            )
        experts = np.concatenate([_flat(part, "experts") for part in self._parts])
        if experts.min() < 0 or experts.max() >= info.num_experts[0]:
            raise TraceError(
                f"{self.folder} is damaged: it has ids {experts.min()} to {experts.max()}, of {info.num_experts[0]} experts. "
                "Record it anew into an empty folder."
            )
        return RoutingTrace(
            experts=experts.reshape(self.num_tokens, info.num_layers, -1),
            token_ids=self._column("token_id"),
            prompt_lengths=self._lengths,
            num_experts=info.num_experts[0],
            generated=self._column("phase") == DECODE,
            recorded=self,
        )

    def gate_inputs(self, rows: npt.NDArray[np.integer[Any]] | slice) -> torch.Tensor:
        """bfloat16 `[n, layers, hidden_size]` of some rows, in the order asked for."""
        bits = torch.from_numpy(self._gather("gate_input", rows))
        return bits.view(torch.bfloat16).view(len(bits), self.info.num_layers, self.info.hidden_size)

    def layer_inputs(self, layer_idx: int, rows: slice) -> torch.Tensor:
        """One layer's gate inputs, bfloat16 `[n, hidden_size]`, of rows that follow each other."""
        size = self.info.hidden_size
        columns = slice(layer_idx * size, (layer_idx + 1) * size)
        start, stop, step = rows.indices(self.num_tokens)
        assert step == 1, f"rows that do not follow each other: {rows}"
        pieces = [
            _flat(part, "gate_input")[max(0, start - first) : max(0, stop - first), columns]
            for part, first in zip(self._parts, self._starts.tolist(), strict=False)
        ]
        return torch.from_numpy(np.concatenate(pieces)).view(torch.bfloat16)

    def gate_logits(self, rows: npt.NDArray[np.integer[Any]] | slice) -> npt.NDArray[np.float32]:
        """`[n, sum of experts over layers]` of some rows."""
        return self._gather("gate_logits", rows)

    @cached_property
    def gates(self) -> list[dict[str, torch.Tensor]]:
        """Parameters and buffers of each layer's gate, by name.

        Raises:
            TraceError: they are missing.
        """
        path = self.folder / GATES_FILE
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise TraceError(
                f"Cannot read the gates' weights {path}: {error}. Repeat `promoe-train collect`."
            ) from error
        gates: list[dict[str, torch.Tensor]] = [{} for _ in range(self.info.num_layers)]
        for layer_idx, gate in enumerate(gates):
            prefix = f"{layer_idx}."
            gate |= {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        if not all(gates):
            raise TraceError(f"{path} does not hold the gates of all layers. Repeat `promoe-train collect`.")
        return gates

    def _column(self, name: str) -> npt.NDArray[Any]:
        return np.concatenate([part.column(name).to_numpy() for part in self._parts])

    def _gather(self, name: str, rows: npt.NDArray[np.integer[Any]] | slice) -> npt.NDArray[Any]:
        wanted = np.arange(self.num_tokens)[rows] if isinstance(rows, slice) else rows
        first = _flat(self._parts[0], name)
        result = np.empty((len(wanted), first.shape[1]), first.dtype)
        owner = np.searchsorted(self._starts, wanted, side="right") - 1
        for part_idx in np.unique(owner):
            mine = owner == part_idx
            result[mine] = _flat(self._parts[part_idx], name)[wanted[mine] - self._starts[part_idx]]
        return result


def _flat(part: pa.Table, name: str) -> npt.NDArray[Any]:
    """A column of fixed-size lists as `[rows, length]`, where it lies."""
    (column,) = part.column(name).chunks  # a part is written as one batch
    length = column.type.list_size
    # `values` would begin at the parent's first row, also for a slice.
    values = column.flatten().to_numpy(zero_copy_only=True)
    result: npt.NDArray[Any] = values.reshape(-1, length)
    return result
