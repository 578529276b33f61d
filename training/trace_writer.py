"""Writes a recorded trace, part by part.

A part is complete once it has its name, so whatever was written before an interruption is kept, and nothing is there
twice.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from safetensors.torch import save

from promoe.files import make_folder, write_atomically
from promoe.training.routing_traces import TraceError
from promoe.training.trace_folder import DECODE, GATES_FILE, INFO_FILE, TraceInfo, find_info, part_paths
from promoe.training.trace_parts import Rows, distinct_prompts, open_part

# A part is written when it has so many bytes; until then its rows are in memory, and lost if the process is killed.
PART_BYTES = 64 << 20
_UNFINISHED = ".unfinished"


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
        # Not their count: one in between may have been deleted.
        self._next_part = int(paths[-1].stem.rpartition("-")[2]) + 1 if paths else 0
        self.recorded = frozenset(distinct_prompts(parts, folder).tolist())
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
