"""Recorded traces, read and written: what every gate saw and chose, token by token, in Arrow files that are read in place.

A part is complete once it has its name, so whatever was written before an interruption is kept, and nothing is there twice.
What a folder and its parts hold is in `trace_folder`. Knows files and arrays; not models.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from promoe.files import make_folder, open_plain, write_atomically
from promoe.training.routing_traces import RoutingTrace, TraceError, are_distinct
from promoe.training.trace_folder import (
    DECODE,
    GATES_FILE,
    INFO_FILE,
    Rows,
    TraceInfo,
    distinct_prompts,
    find_info,
    flat,
    open_part,
    part_paths,
    read_info,
)

# A part is written when it has so many bytes. Until then its rows are in memory, and lost if the process is killed.
PART_BYTES = 64 << 20
_UNFINISHED = ".unfinished"


class RecordedTrace:
    """A trace that is read in place: opening takes no memory, rows are gathered when they are asked for.

    Args:
        folder: a folder that `TraceWriter` wrote.

    Raises:
        TraceError: it holds no such trace, no rows, or a prompt twice.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.info = read_info(self.folder)
        parts = [open_part(path, self.info) for path in part_paths(self.folder)]
        if not parts:
            raise TraceError(f"{self.folder} holds no rows yet. Record some with `promoe-train collect`.")
        self.prompts = distinct_prompts(parts, self.folder)
        """`[p]`, the prompts' positions in the data, in the order of the rows."""
        self._lengths = np.concatenate([part.lengths for part in parts])
        self._parts = [part.table for part in parts]
        self._starts = np.array([0, *accumulate(map(len, self._parts))])

    @property
    def num_tokens(self) -> int:
        """Rows."""
        return int(self._starts[-1])

    @cached_property
    def routing(self) -> RoutingTrace:
        """Its ids, with this trace as where the hidden states are.

        Raises:
            TraceError: layers differ in their experts, or ids are damaged.
        """
        info = self.info
        if len(set(info.num_experts)) > 1 or len(set(info.top_k)) > 1:
            raise TraceError(
                f"{self.folder}: layers with different numbers of experts ({sorted(set(info.num_experts))}, top "
                f"{sorted(set(info.top_k))}) are not supported here yet. Choose a model whose layers are alike."
            )
        experts = np.concatenate([flat(part, "experts") for part in self._parts])
        if experts.min() < 0 or experts.max() >= info.num_experts[0]:
            raise TraceError(
                f"{self.folder} is damaged: it has ids {experts.min()} to {experts.max()}, of {info.num_experts[0]} experts. "
                "Record it anew into an empty folder."
            )
        experts = experts.reshape(self.num_tokens, info.num_layers, -1)
        if not are_distinct(experts):
            raise TraceError(
                f"{self.folder} is damaged: a token uses an expert of a layer twice. Record it anew into an empty folder."
            )
        return RoutingTrace(
            experts=experts,
            token_ids=self._column("token_id"),
            prompt_lengths=self._lengths,
            num_experts=info.num_experts[0],
            generated=self._column("phase") == DECODE,
            recorded=self,
        )

    def gate_inputs(self, rows: npt.NDArray[np.integer[Any]] | slice) -> torch.Tensor:
        """Return the gate inputs of some rows, in the order asked for: bfloat16 `[n, layers, hidden_size]`."""
        bits = torch.from_numpy(self._gather("gate_input", rows))
        return bits.view(torch.bfloat16).view(len(bits), self.info.num_layers, self.info.hidden_size)

    def layer_inputs(self, layer_idx: int, rows: slice) -> torch.Tensor:
        """Return one layer's gate inputs of consecutive rows: bfloat16 `[n, hidden_size]`."""
        size = self.info.hidden_size
        columns = slice(layer_idx * size, (layer_idx + 1) * size)
        start, stop, step = rows.indices(self.num_tokens)
        assert step == 1, f"not consecutive rows: {rows}"
        pieces = [
            flat(part, "gate_input")[max(0, start - first) : max(0, stop - first), columns]
            for part, first in zip(self._parts, self._starts.tolist(), strict=False)
        ]
        return torch.from_numpy(np.concatenate(pieces)).view(torch.bfloat16)

    def gate_logits(self, rows: npt.NDArray[np.integer[Any]] | slice) -> npt.NDArray[np.float32]:
        """Return the gate logits of some rows: `[n, sum of experts over layers]`."""
        return self._gather("gate_logits", rows)

    @cached_property
    def gates(self) -> list[dict[str, torch.Tensor]]:
        """Parameters and buffers of each layer's gate, by name.

        Raises:
            TraceError: they are missing.
        """
        path = self.folder / GATES_FILE
        try:
            os.close(open_plain(path))
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
        first = flat(self._parts[0], name)
        result = np.empty((len(wanted), first.shape[1]), first.dtype)
        owner = np.searchsorted(self._starts, wanted, side="right") - 1
        for part_idx in np.unique(owner):
            mine = owner == part_idx
            result[mine] = flat(self._parts[part_idx], name)[wanted[mine] - self._starts[part_idx]]
        return result


class TraceWriter:
    """Appends prompts to one shard of a trace, and goes on after what the folder already holds.

    Args:
        folder: it is made if there is none.
        info: must agree with the folder's.
        shard_index: the shard whose parts are written; it has one writer at a time.
        part_bytes: a part is written when it has so many bytes, see `PART_BYTES`.

    Raises:
        ConfigError: the folder holds another trace, or cannot be made.
        TraceError: the folder's trace cannot be read.
    """

    def __init__(self, folder: Path, info: TraceInfo, shard_index: int = 0, part_bytes: int = PART_BYTES) -> None:
        self._folder = folder
        self._info = info
        self._shard_index = shard_index
        self._part_bytes = part_bytes
        self._tables: list[pa.Table] = []
        make_folder(folder)
        found = find_info(folder)
        if found is not None:
            info.check_same(found, folder)
        else:
            write_atomically(folder / INFO_FILE, [json.dumps(asdict(info), indent=2), "\n"])
        for unfinished in folder.glob(f"part-{shard_index:05d}-*{_UNFINISHED}"):  # of a run that was killed
            unfinished.unlink(missing_ok=True)
        paths = part_paths(folder, shard_index)
        parts = [open_part(path, info) for path in paths]
        # The last one's number, not their count: one in between may have been deleted.
        self._next_part = int(paths[-1].stem.rpartition("-")[2]) + 1 if paths else 0
        self.recorded = frozenset(distinct_prompts(parts, folder).tolist())
        """Prompts on disk, which need not be run again."""
        self.num_tokens = sum(len(part.table) for part in parts)
        """Rows on disk and in memory."""
        self._generated = sum(_count_generated(part.table.column("phase").to_numpy()) for part in parts)

    @property
    def decode_share(self) -> float:
        """Share of the rows that were generated."""
        return self._generated / max(1, self.num_tokens)

    def append(self, prompts: Sequence[Rows]) -> None:
        """Add the prompts of one batch. They are on disk after the next `flush`, or earlier.

        Raises:
            TraceError: they cannot be written, for example because the disk is full.
        """
        features = self._info.features
        tables = [rows.table(features) for rows in prompts]
        self._tables.extend(tables)  # at once: an interrupt leaves the batch whole, or nothing of it
        self.num_tokens += sum(map(len, tables))
        self._generated += sum(_count_generated(rows.phase) for rows in prompts)
        if sum(map(len, self._tables)) * self._info.token_bytes >= self._part_bytes:
            self.flush()

    def flush(self) -> None:
        """Write the rows in memory as a part of their own.

        Raises:
            TraceError: as `append`. The rows stay in memory.
        """
        if not self._tables:
            return
        table = pa.concat_tables(self._tables).combine_chunks()
        path = self._folder / f"part-{self._shard_index:05d}-{self._next_part:05d}.arrow"
        with _written_whole(path) as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
        # In this order: after an interruption in between, the same rows are written to the same part once more.
        self._tables.clear()
        self._next_part += 1


def _count_generated(phase: npt.NDArray[np.int64]) -> int:
    return int(np.count_nonzero(phase == DECODE))


def write_gates(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write the gates' parameters and buffers, by `<layer>.<name>`; see `RecordedTrace.gates`.

    Raises:
        TraceError: they cannot be written, for example because the disk is full.
    """
    with _written_whole(folder / GATES_FILE) as file:
        file.write(save(tensors))


@contextmanager
def _written_whole(path: Path) -> Iterator[BinaryIO]:
    """Open a file that gets its name when it is complete, and that leaves nothing behind otherwise."""
    # Named by process, because shards that are recorded at the same time write the same gates.
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
