"""Folders of traces that are damaged: each file that is, is named, with what to do about it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from promoe.training.recorded_traces import RecordedTrace, TraceWriter
from promoe.training.routing_traces import TraceError
from promoe.training.trace_folder import INFO_FILE, part_paths

from .recordings import EXPERTS, PROMPTS, assert_same_rows, make_info, make_rows, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five prompts in three parts."""
    return write(tmp_path / "trace", [PROMPTS[:2], PROMPTS[2:3], PROMPTS[3:]])


def changed_info(**changes: Any) -> str:
    values = json.loads(json.dumps(vars(make_info()))) | changes
    return json.dumps({name: value for name, value in values.items() if value != "missing"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON: .* Restore it, or record anew into another folder"),
        ("\udcff", "is not JSON: .*utf-8.* Restore it"),
        ("[]", "does not describe a trace of format 1: found format None. Read it with the version .* or record anew"),
        (changed_info(format=2), "format 1: found format 2. Read it with the version of promoe that wrote it"),
        (changed_info(top_k="missing"), "is damaged: fields are missing or wrong. Restore it, or record anew"),
        (changed_info(more=1), "is damaged"),
        (changed_info(hidden_size="64"), "is damaged"),
        (changed_info(hidden_size=0), "is damaged"),
        (changed_info(num_experts=EXPERTS), "is damaged"),
        (changed_info(num_experts=[EXPERTS]), "is damaged"),
        (changed_info(num_experts=[], top_k=[]), "is damaged"),
        (changed_info(top_k=[1, 2, None]), "is damaged"),
        (changed_info(settings=None), "is damaged"),
    ],
)
def test_a_header_that_cannot_be_read(folder: Path, text: str, message: str) -> None:
    (folder / INFO_FILE).write_text(text, encoding="utf-8", errors="surrogateescape")
    for open_trace in (RecordedTrace, lambda path: TraceWriter(path, make_info())):
        with pytest.raises(TraceError, match=message):
            open_trace(folder)


@pytest.mark.parametrize("name", ["none", "file"])
def test_there_is_no_trace(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TraceError, match=r"holds no recorded trace.* Record one with `promoe-train collect`"):
        RecordedTrace(tmp_path / name)


def test_a_trace_without_rows(tmp_path: Path) -> None:
    TraceWriter(tmp_path, make_info())
    with pytest.raises(TraceError, match=r"holds no rows yet. Record some"):
        RecordedTrace(tmp_path)


def rewritten(change: Callable[[pa.Table], pa.Table], batches: int = 1) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        table = change(pa.ipc.open_stream(path.read_bytes()).read_all())
        with path.open("wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=-(-len(table) // batches) or None)

    return rewrite


def cut(share: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, int(share * path.stat().st_size))


def with_gap(table: pa.Table) -> pa.Table:
    return table.set_column(3, table.schema.field(3), pa.array([None] + [1] * (len(table) - 1), pa.int32()))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty file": (cut(0), "Cannot read"),
    "cut in its schema": (cut(0.1), "Cannot read"),
    "cut in its rows": (cut(0.9), "Cannot read"),
    "no Arrow": (lambda path: path.write_bytes(b"PK\x03\x04" * 100), "Cannot read"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "Cannot read"),
    "other columns": (rewritten(lambda table: table.drop_columns("phase")), "other columns than trace.json says"),
    "other types": (
        rewritten(lambda table: table.set_column(3, "token_id", table["token_id"].cast("int64"))),
        "other columns",
    ),
    "no rows": (rewritten(lambda table: table.slice(0, 0)), "holds no rows"),
    "several batches": (rewritten(lambda table: table, 2), "was not written by promoe: it has several batches"),
    "gaps": (rewritten(with_gap), "was not written by promoe.*or gaps"),
    "without its first row": (rewritten(lambda table: table.slice(1)), "do not follow each other"),
    "without a row": (rewritten(lambda table: table.take([0, 1, 3, 4, 5, 6])), "do not follow each other"),
    "rows in another order": (rewritten(lambda table: table.take([0, 2, 1, 3, 4, 5, 6])), "do not follow each other"),
    "another prompt's row": (rewritten(lambda table: table.take([0, 5, 2, 3, 4, 5, 6])), "do not follow each other"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_part_is_named_and_can_be_deleted(folder: Path, tmp_path: Path, damage: str) -> None:
    path = part_paths(folder)[0]
    harm, message = DAMAGES[damage]
    harm(path)
    for open_trace in (RecordedTrace, lambda path: TraceWriter(path, make_info())):
        with pytest.raises(TraceError, match=message) as raised:
            open_trace(folder)
        assert str(path) in str(raised.value)
        assert "Delete it, and repeat `promoe-train collect`" in str(raised.value)
    path.rmdir() if path.is_dir() else path.unlink()
    write(folder, [PROMPTS[:2]])  # what was deleted is recorded again
    assert_same_rows(folder, write(tmp_path / "whole", [PROMPTS]))


def test_whatever_byte_is_damaged_the_rest_can_be_read_or_it_is_said(tmp_path: Path) -> None:
    path = part_paths(write(tmp_path, [PROMPTS[:2]]))[0]
    whole, outcomes = path.read_bytes(), set()
    for position in range(0, len(whole), 3):
        harmed = bytearray(whole)
        harmed[position] ^= 0x80 if position % 2 else 0x01
        path.unlink()  # not overwritten: the last one may still be mapped
        path.write_bytes(harmed)
        try:
            trace = RecordedTrace(tmp_path)
            outcomes.add(
                (len(trace.gate_inputs(slice(None))), len(trace.gate_logits(slice(None))), len(trace.routing.experts))
            )
        except TraceError:
            outcomes.add(None)
    assert outcomes == {(7, 7, 7), None}


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("copied_to", ["part-00000-00001.arrow", "part-00001-00000.arrow"])
def test_a_prompt_that_is_there_twice(tmp_path: Path, length: int, copied_to: str) -> None:
    write(tmp_path, [[make_rows(5, length)]])
    (tmp_path / copied_to).write_bytes(part_paths(tmp_path)[0].read_bytes())
    with pytest.raises(TraceError, match=r"holds prompt 5 twice: .* Delete those .* or record anew"):
        RecordedTrace(tmp_path)
    if copied_to.startswith("part-00000"):
        with pytest.raises(TraceError, match="holds prompt 5 twice"):
            TraceWriter(tmp_path, make_info())


@pytest.mark.parametrize("ids", [(-1, 0), (0, EXPERTS)])
def test_ids_that_no_expert_has(tmp_path: Path, ids: tuple[int, int]) -> None:
    rows = make_rows(0)
    rows.experts[2, :2] = ids
    trace = RecordedTrace(write(tmp_path, [[rows]]))
    with pytest.raises(TraceError, match=f"is damaged: it has ids .*, of {EXPERTS} experts. Record it anew"):
        _ = trace.routing
