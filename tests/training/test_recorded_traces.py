"""Recorded traces: what is written comes back, from files that are whole or not there."""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from promoe.errors import ConfigError, PromoeError
from promoe.training.recorded_traces import RecordedTrace, TraceWriter, write_gates
from promoe.training.routing_traces import TraceError
from promoe.training.trace_folder import GATES_FILE, INFO_FILE, Rows, TraceInfo, check_folder, part_paths, read_info

from .recordings import EXPERTS, HIDDEN, LAYERS, PROMPTS, TOP_K, assert_same_rows, make_info, make_rows, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five prompts in three parts."""
    return write(tmp_path / "trace", [PROMPTS[:2], PROMPTS[2:3], PROMPTS[3:]])


@pytest.fixture
def trace(folder: Path) -> RecordedTrace:
    return RecordedTrace(folder)


def joined(name: str, prompts: list[Rows] = PROMPTS) -> Any:
    values = [getattr(rows, name) for rows in prompts]
    return torch.cat(values) if isinstance(values[0], torch.Tensor) else np.concatenate(values)


def bits(tensor: torch.Tensor) -> Any:
    """Random bits hold NaN, which equals nothing."""
    assert tensor.dtype == torch.bfloat16
    return tensor.contiguous().view(torch.uint16).numpy()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- reading ----------------------------------------------------------------------------------------------------


def test_what_was_written_comes_back(trace: RecordedTrace) -> None:
    assert trace.info == make_info()
    assert trace.num_tokens == 19
    assert trace.prompts.tolist() == [0, 2, 3, 7, 8]
    np.testing.assert_array_equal(bits(trace.gate_inputs(slice(None))), bits(joined("gate_inputs")))
    np.testing.assert_array_equal(trace.gate_logits(slice(None)), joined("gate_logits"))
    assert trace.gate_inputs(slice(None)).shape == (19, LAYERS, HIDDEN)


@pytest.mark.parametrize(
    "rows", [[0], [18], [18, 0, 9, 9, 4, 3, 5], list(range(18, -1, -1)), [], slice(2, 12, 3), slice(5, 5)], ids=str
)
def test_rows_are_gathered_across_parts_in_the_order_asked_for(trace: RecordedTrace, rows: Any) -> None:
    wanted = rows if isinstance(rows, slice) else np.array(rows, dtype=np.int64)
    np.testing.assert_array_equal(bits(trace.gate_inputs(wanted)), bits(joined("gate_inputs"))[wanted])
    np.testing.assert_array_equal(trace.gate_logits(wanted), joined("gate_logits")[wanted])


@pytest.mark.parametrize("row", [19, -1])
def test_rows_that_are_not_there(trace: RecordedTrace, row: int) -> None:
    with pytest.raises(IndexError):
        trace.gate_inputs(np.array([row]))


@pytest.mark.parametrize("rows", [slice(None), slice(3, 12), slice(7, 8), slice(13, 19), slice(4, 4), slice(15, 99)])
def test_one_layers_inputs(trace: RecordedTrace, rows: slice) -> None:
    for layer_idx in range(LAYERS):
        found = trace.layer_inputs(layer_idx, rows)
        np.testing.assert_array_equal(bits(found), bits(trace.gate_inputs(rows)[:, layer_idx]))
        found.zero_()  # a copy: the file is not written to


def test_one_layers_inputs_of_rows_that_do_not_follow_each_other(trace: RecordedTrace) -> None:
    with pytest.raises(AssertionError, match="not consecutive rows"):
        trace.layer_inputs(0, slice(0, 9, 2))


def test_routing(trace: RecordedTrace) -> None:
    routing = trace.routing
    np.testing.assert_array_equal(routing.experts, joined("experts").reshape(19, LAYERS, TOP_K))
    np.testing.assert_array_equal(routing.token_ids, joined("token_ids"))
    np.testing.assert_array_equal(routing.generated, joined("phase") == 1)
    assert routing.prompt_lengths.tolist() == [4, 3, 6, 1, 5]
    assert (routing.num_experts, routing.top_k, routing.recorded) == (EXPERTS, TOP_K, trace)


def test_a_split_knows_where_its_rows_are(trace: RecordedTrace) -> None:
    fitted, judged = trace.routing.split()
    assert (fitted.first_row, judged.first_row) == (0, 14)
    fitted, _ = judged.prompts(0, 1).first(3), None
    assert fitted.recorded is not None
    rows = slice(fitted.first_row, fitted.first_row + fitted.num_tokens)
    np.testing.assert_array_equal(bits(fitted.recorded.layer_inputs(1, rows)), bits(PROMPTS[4].gate_inputs[:3, 1]))


def test_parts_open_as_data_sets(folder: Path) -> None:
    for path, rows in zip(part_paths(folder), (PROMPTS[0], PROMPTS[2], PROMPTS[3]), strict=True):
        data = datasets.Dataset.from_file(str(path))
        assert data.features == make_info().features
        assert data.features["phase"].names == ["prefill", "decode"]
        row = data[0]
        assert (row["prompt"], row["position"], row["token_id"]) == (rows.prompt, 0, rows.token_ids[0])
        assert row["gate_input"] == bits(rows.gate_inputs)[0].reshape(-1).tolist()
        assert row["experts"] == rows.experts[0].tolist()


def test_opening_keeps_no_file_open(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    trace = RecordedTrace(folder)
    assert len(os.listdir("/proc/self/fd")) == before
    assert trace.num_tokens


def test_layers_of_different_sizes_have_no_routing(tmp_path: Path) -> None:
    info = make_info(num_experts=[EXPERTS - 1, EXPERTS, EXPERTS + 1])
    trace = RecordedTrace(write(tmp_path, [PROMPTS], info))
    assert trace.gate_logits(slice(2)).shape == (2, LAYERS * EXPERTS)
    with pytest.raises(TraceError, match=r"different numbers of experts \(\[3, 4, 5\], top \[2\]\).*Choose a model"):
        _ = trace.routing


# -- writing ----------------------------------------------------------------------------------------------------


def test_a_part_is_written_when_it_is_large_enough(tmp_path: Path) -> None:
    info = make_info()
    writer = TraceWriter(tmp_path, info, part_bytes=7 * info.token_bytes)
    sizes = []
    for rows in PROMPTS:
        writer.append([rows])
        sizes.append(len(part_paths(tmp_path)))
    assert sizes == [0, 1, 1, 2, 2]
    assert (writer.num_tokens, writer.decode_share) == (19, 6 / 19)
    writer.flush()
    writer.flush()
    assert [path.name for path in part_paths(tmp_path)] == [f"part-00000-0000{number}.arrow" for number in range(3)]
    np.testing.assert_array_equal(RecordedTrace(tmp_path).gate_logits(slice(None)), joined("gate_logits"))


def test_the_size_of_a_row_is_what_it_takes_on_disk(tmp_path: Path) -> None:
    write(tmp_path, [[make_rows(0, 1000)]])
    assert part_paths(tmp_path)[0].stat().st_size == pytest.approx(1000 * make_info().token_bytes, abs=4096)


def test_going_on_with_a_trace(folder: Path) -> None:
    writer = TraceWriter(folder, make_info())
    assert writer.recorded == {0, 2, 3, 7, 8}
    assert (writer.num_tokens, writer.decode_share) == (19, 6 / 19)
    writer.append([make_rows(9)])
    writer.flush()
    assert RecordedTrace(folder).prompts.tolist() == [0, 2, 3, 7, 8, 9]


def test_an_empty_trace_has_no_share(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, make_info())
    assert (writer.num_tokens, writer.decode_share, writer.recorded) == (0, 0.0, frozenset())
    writer.append([])
    writer.flush()
    assert files(tmp_path) == [INFO_FILE]


def test_a_part_that_was_deleted_can_be_recorded_again_and_no_other_is_overwritten(
    folder: Path, tmp_path: Path
) -> None:
    whole = write(tmp_path / "whole", [PROMPTS])
    part_paths(folder)[1].unlink()
    writer = TraceWriter(folder, make_info())
    assert writer.recorded == {0, 2, 7, 8}
    assert writer.num_tokens == 13
    writer.append([PROMPTS[2]])
    writer.flush()
    assert [path.name[-7] for path in part_paths(folder)] == ["0", "2", "3"]
    assert_same_rows(folder, whole)


def test_shards_share_a_folder(tmp_path: Path) -> None:
    first, second = (TraceWriter(tmp_path, make_info(), shard_index) for shard_index in (0, 1))
    first.append([PROMPTS[0]])
    second.append([PROMPTS[3]])
    second.flush()
    first.flush()
    assert TraceWriter(tmp_path, make_info(), 1).recorded == {7}
    assert TraceWriter(tmp_path, make_info(), 2).recorded == frozenset()
    assert RecordedTrace(tmp_path).prompts.tolist() == [0, 7]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "org/other"},
        {"revision": None},
        {"model_type": "mixtral"},
        {"hidden_size": HIDDEN + 1},
        {"num_experts": [EXPERTS] * (LAYERS + 1), "top_k": [TOP_K] * (LAYERS + 1)},
        {"top_k": [1] * LAYERS},
        {"settings": {"seed": 1}},
        {"settings": {"seed": 0, "temperature": 0.5}},
        {"settings": {}},
    ],
    ids=str,
)
def test_a_folder_of_another_trace_is_left_alone(folder: Path, change: dict[str, Any]) -> None:
    before = files(folder)
    with pytest.raises(ConfigError, match=r"was asked for. Repeat the command as it was .* or choose another folder"):
        TraceWriter(folder, make_info(**change))
    assert files(folder) == before


def test_other_versions_may_go_on(folder: Path) -> None:
    assert TraceWriter(folder, make_info(versions={"torch": "9"})).num_tokens == 19
    assert read_info(folder).versions == {}


def test_what_can_be_said_of_a_folder_before_a_model_is_opened(folder: Path, tmp_path: Path) -> None:
    check_folder(folder, "org/model", {"seed": 0})
    check_folder(tmp_path / "none" / "yet", "org/model", {"seed": 0})
    with pytest.raises(ConfigError, match="holds a trace with model = 'org/model', and 'org/other' was asked for"):
        check_folder(folder, "org/other", {"seed": 0})
    with pytest.raises(ConfigError, match="holds a trace with seed = 0, and 1 was asked for"):
        check_folder(folder, "org/model", {"seed": 1})
    with pytest.raises(ConfigError, match=r"is not a folder. Choose another"):
        check_folder(folder / INFO_FILE, "org/model", {})
    (folder / INFO_FILE).unlink()
    with pytest.raises(ConfigError, match=r"holds parts of a trace without their trace\.json. Restore it, or choose"):
        check_folder(folder, "org/model", {})
    with pytest.raises(ConfigError, match=r"without their trace\.json"):
        TraceWriter(folder, make_info())
    assert not (folder / INFO_FILE).exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=f"Cannot make the folder '{path}'.*Choose another"):
            TraceWriter(path, make_info())


# -- interruptions and full disks -------------------------------------------------------------------------------


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)


@contextmanager
def small_files_only() -> Iterator[None]:
    """The kernel refuses to make a file larger than 1,000 bytes: any of this process, so only for as long as needed."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_leaves_nothing_half_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(folder)
    writer = TraceWriter(folder, make_info())
    with monkeypatch.context() as patch:
        full_disk(patch)
        writer.append([make_rows(9), make_rows(10)])
        with pytest.raises(TraceError, match=r"No space left on device. Free some space and repeat the command"):
            writer.flush()
        with pytest.raises(TraceError, match="Free some space"):
            write_gates(folder, {"0.weight": torch.zeros(2, 2)})
    assert files(folder) == before
    assert RecordedTrace(folder).num_tokens == 19
    writer.flush()  # nothing of it was lost
    assert_same_rows(folder, write(tmp_path / "whole", [[*PROMPTS, make_rows(9), make_rows(10)]]))


def test_a_write_that_the_system_refuses(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, make_info(), part_bytes=1)
    with small_files_only(), pytest.raises(TraceError, match=r"File too large. Mend the cause and repeat the command"):
        writer.append([make_rows(0, 1000)])
    assert files(tmp_path) == [INFO_FILE]


@pytest.mark.parametrize("moment", ["before it has its name", "after it has its name"])
def test_an_interruption_while_a_part_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    replace = Path.replace

    def interrupted(self: Path, target: Path) -> None:
        if moment.startswith("after"):
            replace(self, target)
        raise KeyboardInterrupt

    writer = TraceWriter(tmp_path / "trace", make_info())
    writer.append(PROMPTS[:2])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.flush()
    assert len(files(tmp_path / "trace")) == 1 + moment.startswith("after")
    writer.flush()  # as `collect` does when it is interrupted
    writer.append(PROMPTS[2:])
    writer.flush()
    assert_same_rows(tmp_path / "trace", write(tmp_path / "whole", [PROMPTS]))


def test_an_interruption_while_a_batch_is_added_leaves_nothing_of_it(folder: Path) -> None:
    def prompts() -> Iterator[Rows]:
        yield make_rows(9)
        raise KeyboardInterrupt

    class Batch(list[Rows]):
        def __iter__(self) -> Iterator[Rows]:
            return prompts()

    writer = TraceWriter(folder, make_info())
    with pytest.raises(KeyboardInterrupt):
        writer.append(Batch())
    writer.flush()
    assert RecordedTrace(folder).num_tokens == writer.num_tokens == 19


def test_what_a_killed_run_left_unfinished_is_removed(folder: Path) -> None:
    ours, others = folder / "part-00000-00003.123.unfinished", folder / "part-00001-00000.124.unfinished"
    ours.write_bytes(b"half")
    others.write_bytes(b"half")
    assert RecordedTrace(folder).num_tokens == 19
    with pytest.raises(ConfigError, match="was asked for"):
        TraceWriter(folder, make_info(revision="other"))
    assert ours.exists()  # its own run may be going on
    assert TraceWriter(folder, make_info()).num_tokens == 19
    assert not ours.exists()
    assert others.exists()  # its shard may be being recorded


# -- gates ------------------------------------------------------------------------------------------------------


def gate_tensors() -> dict[str, torch.Tensor]:
    weights = {f"{layer}.weight": torch.full((EXPERTS, HIDDEN), float(layer)) for layer in range(LAYERS)}
    return weights | {"1.bias": torch.ones(EXPERTS, dtype=torch.bfloat16)}


def test_gates_come_back_by_layer_and_name(folder: Path) -> None:
    write_gates(folder, {name: torch.zeros(1) for name in gate_tensors()})
    write_gates(folder, gate_tensors())
    gates = RecordedTrace(folder).gates
    assert [set(gate) for gate in gates] == [{"weight"}, {"weight", "bias"}, {"weight"}]
    assert torch.equal(gates[2]["weight"], torch.full((EXPERTS, HIDDEN), 2.0))
    assert torch.equal(gates[1]["bias"], gate_tensors()["1.bias"])
    assert not list(folder.glob("*.unfinished"))


def test_gates_of_two_shards_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def with_another_shard(descriptor: int) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            patch.setattr(os, "getpid", lambda: 1)
            write_gates(folder, gate_tensors())

    monkeypatch.setattr(os, "fsync", with_another_shard)
    write_gates(folder, gate_tensors())
    assert len(RecordedTrace(folder).gates) == LAYERS


@pytest.mark.parametrize("harm", ["missing", "cut", "a layer less", "others"])
def test_gates_that_cannot_be_read(folder: Path, harm: str) -> None:
    path = folder / GATES_FILE
    tensors = gate_tensors()
    if harm == "others":
        tensors = {"model.weight": torch.zeros(2)}
    elif harm == "a layer less":
        del tensors["2.weight"]
    if harm != "missing":
        save_file(tensors, path)
    if harm == "cut":
        os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(TraceError, match=re.escape(str(path)) + ".*Repeat `promoe-train collect`"):
        _ = RecordedTrace(folder).gates


def test_every_error_is_one_that_a_user_can_mend() -> None:
    assert issubclass(TraceError, PromoeError)
    assert isinstance(make_info(), TraceInfo)
