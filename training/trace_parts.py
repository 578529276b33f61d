"""Parts of a recorded trace: each one Arrow stream that `datasets.Dataset.from_file` opens. A row is a token:

    prompt       int64   position of its prompt in the data
    position     int32   its place in the sequence
    phase        class   prefill, or decode: it was generated
    token_id     int32
    gate_input   uint16  [layers * hidden_size], the bits of bfloat16
    gate_logits  float32 [sum of experts over layers], logits or scores as the gate returned them
    experts      int16   [sum of top_k over layers]

A prompt's rows lie in one part, in order. A part that is deleted is recorded again by the next run.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from datasets import Features

from promoe.files import open_plain
from promoe.training.routing_traces import TraceError
from promoe.training.trace_folder import INFO_FILE, TraceInfo


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


@dataclass(frozen=True)
class Part:
    """Rows on disk.

    Args:
        table: read in place.
        prompts: `[p]`, its prompts in order.
        lengths: `[p]`, rows of each.
    """

    table: pa.Table
    prompts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


def open_part(path: Path, info: TraceInfo) -> Part:
    """Read a part in place.

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
    # Also names that are no Unicode, and the end where a message should be.
    except (OSError, ValueError, EOFError, StopIteration, struct.error, pa.ArrowException) as error:
        raise TraceError(f"Cannot read {path}: {type(error).__name__}: {str(error)[:500]}. {remedy}") from error
    if not schema.equals(expected):
        raise TraceError(
            f"{path} has other columns than {INFO_FILE} says: expected {expected.names}, in their types; found {names[:20]}. "
            f"{remedy}"
        )
    if not len(table):
        raise TraceError(f"{path} holds no rows. {remedy}")
    if any(column.num_chunks != 1 or _num_gaps(column.chunk(0)) for column in table.columns):
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
    """Those of a stream, where they lie.

    Raises:
        ValueError: one is packed, so that nothing tells how large it is.
    """
    for message in messages:
        if _is_packed(message.metadata.to_pybytes()):
            raise ValueError("its columns are packed, which promoe never does")
        yield pa.ipc.read_record_batch(message, schema)


def _is_packed(metadata: bytes) -> bool:
    """Whether a batch says how its columns are packed: field 3 of the header, which is field 2 of a message (Arrow's format
    in flatbuffers). Arrow itself only tells when it has unpacked them."""
    message = _field(metadata, struct.unpack_from("<I", metadata)[0], 2)
    if message is None:
        return False
    return _field(metadata, message + struct.unpack_from("<I", metadata, message)[0], 3) is not None


def _field(content: bytes, table: int, number: int) -> int | None:
    """Where a field of a flatbuffers table lies; None: it has its default."""
    listed = table - struct.unpack_from("<i", content, table)[0]
    entry = 4 + 2 * number
    if entry >= struct.unpack_from("<H", content, listed)[0]:
        return None
    offset: int = struct.unpack_from("<H", content, listed + entry)[0]
    return table + offset if offset else None


def _num_gaps(column: pa.Array) -> int:
    """Rows, and for lists also numbers in them, that are null."""
    inner = column.flatten().null_count if pa.types.is_fixed_size_list(column.type) else 0
    return int(column.null_count + inner)


def distinct_prompts(parts: Sequence[Part], folder: Path) -> npt.NDArray[np.int64]:
    """The prompts of some parts, in order.

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
    """A column of fixed-size lists as `[rows, length]`, where it lies."""
    (column,) = part.column(name).chunks  # a part is written as one batch
    length = column.type.list_size
    # `values` would begin at the parent's first row, also for a slice.
    values = column.flatten().to_numpy(zero_copy_only=True)
    result: npt.NDArray[Any] = values.reshape(-1, length)
    return result
