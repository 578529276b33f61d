from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_checkpoints import write_fp8
from tiny_checkpoint import write_checkpoint

from promoe.commands.plan import measuring
from promoe.commands.plan.measuring import measure_compute, measure_link
from promoe.commands.plan.reading import ReadModel, read_model
from promoe.commands.plan.stand_in import StandIn
from promoe.transfer.links.direct import DirectUnsupportedError


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SECONDS": 0.01, "READ_SECONDS": 0.01, "GROUP_PASSES": 2}.items():
        monkeypatch.setattr(measuring, name, value)
    real = measuring.contention
    monkeypatch.setattr(measuring, "contention", lambda decode, read: real(decode, read, 0.02))


@pytest.fixture
def read(tmp_path: Path) -> Iterator[ReadModel]:
    found = read_model(str(write_checkpoint(tmp_path / "checkpoint")))
    assert found.store is not None
    with closing(found.store):
        yield found


def test_times_are_of_a_token_and_of_a_prompt(read: ReadModel) -> None:
    with closing(StandIn(read.model, read.layers)) as stand_in:
        found = measure_compute(stand_in, 24)
    (one, layer_s), (prompt, prompt_s) = found.layer.points
    assert (one, prompt) == (1, 24)
    assert min(layer_s, prompt_s) > 0
    (row, _), (rows, _) = found.expert.points
    assert row == 1
    assert rows == pytest.approx(24 * 2 / 8, rel=0.5), "rows of an expert, of eight that two are chosen from"
    assert found.expert_bytes == read.layers[0].layout.payload_bytes
    assert found.group_s >= 0
    assert "3 of 3 blocks" in found.how


def test_a_prompt_of_one_token(read: ReadModel) -> None:
    with closing(StandIn(read.model, read.layers)) as stand_in:
        found = measure_compute(stand_in, 1)
    assert len(found.layer.points) == len(found.expert.points) == 1


def test_the_models_own_files_are_read(read: ReadModel) -> None:
    with closing(StandIn(read.model, read.layers)) as stand_in:
        found = measure_link(stand_in, read.store, read.folder, "page_cache", 2)
    assert (found.name, found.how, found.convert_s) == ("page cache", "the model's own files", 0.0)
    assert 0 < found.bytes_per_s <= found.alone_bytes_per_s
    assert found.slowdown >= 1
    alone = measure_link(None, read.store, read.folder, "page_cache", 2)
    assert (alone.slowdown, alone.bytes_per_s) == (1.0, alone.alone_bytes_per_s)


def test_without_files_one_is_written_and_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from promoe.commands.doctor import facts

    monkeypatch.setattr(facts, "PROBE_FILE_BYTES", facts.REQUEST_BYTES * 2)
    found = measure_link(None, None, tmp_path, "page_cache", 2)
    assert str(tmp_path) in found.how
    assert list(tmp_path.iterdir()) == []


def test_where_files_cannot_be_read_directly(read: ReadModel, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = measuring.probe_read_bandwidth

    def probe(store: Any, nbytes: int, depth: int, mode: str, seconds: float, **more: Any) -> Any:
        if mode == "direct":
            raise DirectUnsupportedError(22, "no O_DIRECT")
        return real(store, nbytes, depth, mode, seconds, **more)

    monkeypatch.setattr(measuring, "probe_read_bandwidth", probe)
    assert measure_link(None, read.store, read.folder, "direct", 2).name == "page cache"


def test_dequantising_takes_time(tmp_path: Path) -> None:
    found = read_model(str(write_fp8(tmp_path)))
    assert found.store is not None
    with closing(found.store) as store:
        assert measure_link(None, store, tmp_path, "page_cache", 2).convert_s > 0
    assert found.model.dtype == torch.bfloat16
