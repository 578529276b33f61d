"""Folders of recorded traces: their description, their Arrow parts, their gates."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save
from training.recordings import make_info, make_rows, write

from promoe.training.recorded_traces import RecordedTrace
from promoe.training.routing_traces import TraceError
from promoe.training.trace_folder import GATES_FILE, INFO_FILE, check_folder, part_paths

from .inputs import fuzzed, outcome
from .mutations import DEEP, damaged, json_bytes


class Whole:
    """A folder as it was written, and what was read from it."""

    def __init__(self, folder: Path) -> None:
        self.folder = write(folder, [[make_rows(0), make_rows(1, 3)]])
        (self.part,) = part_paths(folder)
        self.gates = save({f"{i}.weight": torch.full((4, 5), float(i)) for i in range(3)})
        self.info, self.content = (folder / INFO_FILE).read_bytes(), self.part.read_bytes()
        self.restore()
        trace = RecordedTrace(folder)
        self.truth = read(trace)

    def restore(self) -> None:
        (self.folder / INFO_FILE).write_bytes(self.info)
        self.part.write_bytes(self.content)
        (self.folder / GATES_FILE).write_bytes(self.gates)

    def table(self) -> pa.Table:
        return pa.ipc.open_stream(pa.py_buffer(self.content)).read_all()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(tmp_path_factory.mktemp("fuzz") / "trace")


def read(trace: RecordedTrace) -> dict[str, Any]:
    """Everything that is in it."""
    routing = trace.routing
    assert routing.num_tokens == trace.num_tokens == routing.prompt_lengths.sum()
    assert all(len(set(ids)) == routing.top_k for _, _, ids in routing.visits())
    rows = np.arange(trace.num_tokens)
    return {
        "experts": routing.experts,
        "token_ids": routing.token_ids,
        "lengths": routing.prompt_lengths,
        "inputs": trace.gate_inputs(rows).float().nan_to_num().numpy(),
        "layer": trace.layer_inputs(trace.info.num_layers - 1, slice(0, trace.num_tokens)).float().nan_to_num().numpy(),
        "logits": trace.gate_logits(rows),
        "gates": np.array([len(gate) for gate in trace.gates]),
    }


def opened(target: str, whole: Whole) -> dict[str, Any] | None:
    try:
        return outcome(target, lambda: read(RecordedTrace(whole.folder)))
    finally:
        whole.restore()


def same(found: dict[str, Any] | None, truth: dict[str, Any], *names: str) -> None:
    for name in names or truth:
        assert found is None or np.array_equal(found[name], truth[name], equal_nan=found[name].dtype.kind == "f"), name


INFO = json.loads(json.dumps(vars(make_info())))


@fuzzed(100)
@given(content=json_bytes(INFO))
@example(content=b'{"format": ' + b"[" * DEEP)
@example(content=json.dumps(INFO | {"hidden_size": 2**62}).encode())
@example(content=json.dumps(INFO | {"num_experts": [10**30, 4, 4]}).encode())
@example(content=json.dumps(INFO | {"num_experts": [2**31, 2**31, 2**31]}).encode())
@example(content=json.dumps(INFO | {"top_k": [2**40] * 3}).encode())
@example(content=json.dumps(INFO | {"model": 3}).encode())
@example(content=json.dumps(INFO | {"versions": []}).encode())
def test_descriptions(whole: Whole, content: bytes) -> None:
    (whole.folder / INFO_FILE).write_bytes(content)
    outcome("trace: going on", lambda: check_folder(whole.folder, "org/model", {"seed": 0}))
    same(opened("trace: description", whole), whole.truth, "experts", "token_ids", "lengths", "inputs", "logits")


@fuzzed(100)
@given(data=st.data())
def test_bytes_of_parts(whole: Whole, data: st.DataObject) -> None:
    whole.part.write_bytes(data.draw(damaged(whole.content)))
    opened("trace: bytes of a part", whole)


@fuzzed(60)
@given(data=st.data())
def test_bytes_of_gates(whole: Whole, data: st.DataObject) -> None:
    (whole.folder / GATES_FILE).write_bytes(data.draw(damaged(whole.gates)))
    same(opened("trace: bytes of the gates", whole), whole.truth, "experts", "inputs", "logits")


def stream(table: pa.Table, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=1 << 30)
    return sink.getvalue().to_pybytes()


numbers = st.sampled_from((-(2**15), -1, 0, 1, 3, 4, 100, 2**15 - 1))


def with_values(table: pa.Table, name: str, index: int, value: Any) -> pa.Table:
    """One number of a column changed, in the same type."""
    column = table.column(name).chunk(0)
    is_list = pa.types.is_fixed_size_list(column.type)
    values = np.array((column.flatten() if is_list else column).to_numpy(zero_copy_only=False))
    mask = None
    whole = np.iinfo(values.dtype) if values.dtype.kind in "iu" else None
    if value is None:
        mask = np.zeros(len(values), np.bool_)
        mask[index % len(values)] = True
    else:
        values[index % len(values)] = value if whole is None else np.clip(value, whole.min, whole.max)
    flat = pa.array(values, type=column.type.value_type if is_list else column.type, mask=mask)
    new = pa.FixedSizeListArray.from_arrays(flat, type=column.type) if is_list else flat
    return table.set_column(table.schema.get_field_index(name), table.schema.field(name), new)


@st.composite
def changed_tables(draw: st.DrawFn, table: pa.Table) -> bytes:
    """Columns with other numbers, gaps, types, names and order; packed, in several batches, with rows repeated or left out."""
    how = draw(st.integers(0, 7))
    names = table.schema.names
    name = draw(st.sampled_from(names))
    if how <= 2:
        table = with_values(table, name, draw(st.integers(0, 999)), draw(numbers | st.none()))
    elif how == 3:
        table = (
            table.drop_columns([name]) if draw(st.booleans()) else table.rename_columns([f"{one}x" for one in names])
        )
    elif how == 4:
        table = table.take(
            pa.array(draw(st.lists(st.integers(0, len(table) - 1), max_size=9)), pa.int64())
        ).combine_chunks()
    elif how == 5:
        start = draw(st.integers(0, len(table)))
        table = table.slice(start, draw(st.integers(0, len(table))))
    elif how == 6:
        half = draw(st.integers(0, len(table)))
        table = pa.Table.from_batches(table.slice(0, half).to_batches() + table.slice(half).to_batches(), table.schema)
    else:
        table = table.append_column(draw(st.text(max_size=3)), pa.array(range(len(table))))
    return stream(table, compression=draw(st.sampled_from((None, None, "lz4", "zstd"))))


@fuzzed(100)
@given(data=st.data())
def test_tables(whole: Whole, data: st.DataObject) -> None:
    whole.part.write_bytes(data.draw(changed_tables(whole.table())))
    opened("trace: tables", whole)


@pytest.mark.parametrize("name", ["gate_input", "gate_logits", "experts"])
def test_gaps_inside_of_lists_are_refused(whole: Whole, name: str) -> None:
    whole.part.write_bytes(stream(with_values(whole.table(), name, 3, None)))
    try:
        with pytest.raises(TraceError, match="gaps"):
            read(RecordedTrace(whole.folder))
    finally:
        whole.restore()


def test_an_expert_that_is_used_twice_is_refused(whole: Whole) -> None:
    table = whole.table()
    first = table.column("experts").chunk(0).flatten()[0].as_py()
    whole.part.write_bytes(stream(with_values(table, "experts", 1, first)))
    try:
        with pytest.raises(TraceError, match="twice"):
            read(RecordedTrace(whole.folder))
    finally:
        whole.restore()


def test_packed_parts_are_refused(whole: Whole) -> None:
    """Which could be a thousand times as large in memory as on disk; those that promoe writes are read in place."""
    whole.part.write_bytes(stream(whole.table(), compression="zstd"))
    try:
        with pytest.raises(TraceError, match="compressed"):
            RecordedTrace(whole.folder)
    finally:
        whole.restore()


@pytest.mark.parametrize("name", [INFO_FILE, GATES_FILE, "part-00000-00000.arrow"])
def test_a_pipe_is_no_file(tmp_path: Path, name: str) -> None:
    whole = Whole(tmp_path)
    assert (tmp_path / name).is_file()
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(TraceError, match="Not a plain file"):
        read(RecordedTrace(whole.folder))
