from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path

import pytest
import torch
from needs import needs_packing
from tiny_checkpoint import write_checkpoint

from commands.plan.planned import link, times
from promoe.commands.pack import options as pack
from promoe.commands.pack.command import run_pack
from promoe.commands.plan import overlap
from promoe.commands.plan.overlap import MOST_FACTOR, fit_overlap, fitted
from promoe.commands.plan.reading import read_model
from promoe.commands.plan.stand_in import StandIn, token_ids
from promoe.experts.kernels.formats import formats_in
from promoe.experts.kernels.packed import PackedMatrix
from promoe.experts.moe_layers import find_moe_layers
from promoe.stores.slot_files import SlotFilesStore


def simulated_s(bytes_per_s: float, slowdown: float) -> float:
    """A second of computing beside a second of moving at 1 GB/s."""
    return slowdown + 1e9 / bytes_per_s


def test_the_simulator_is_made_to_give_what_was_measured() -> None:
    measured = link(slowdown=3.0)
    slower = fitted(measured, 3.5, simulated_s)
    assert slower.slowdown == pytest.approx(2.5, abs=1e-3)
    assert slower.bytes_per_s == measured.bytes_per_s
    faster = fitted(measured, 1.8, simulated_s)
    assert (faster.slowdown, faster.bytes_per_s) == (1.0, pytest.approx(1.25e9, rel=1e-3))
    waiting = fitted(measured, 5.0, simulated_s)
    assert (waiting.slowdown, waiting.bytes_per_s) == (3.0, pytest.approx(0.5e9, rel=1e-3))
    for found, token_s in ((slower, 3.5), (faster, 1.8), (waiting, 5.0)):
        assert simulated_s(found.bytes_per_s, found.slowdown) == pytest.approx(token_s, abs=1e-3)


def test_nothing_absurd_is_fitted() -> None:
    assert fitted(link(), 100.0, simulated_s).bytes_per_s == pytest.approx(1e9 / MOST_FACTOR, rel=1e-3)
    assert fitted(link(), 0.1, simulated_s).bytes_per_s == pytest.approx(1e9 * MOST_FACTOR, rel=1e-3)


def test_blocks_are_served_from_the_models_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "SECONDS", 0.05)
    read = read_model(str(write_checkpoint(tmp_path, num_experts=16, layers=6)))
    assert read.store is not None
    seen: list[tuple[int, int]] = []
    real = overlap.fitted

    def spy(link: object, token_s: float, simulated: object) -> object:
        seen.append((token_s > 0, simulated(1e9, 1.0) > 0))  # type: ignore[operator]
        return real(link, token_s, simulated)  # type: ignore[arg-type]

    monkeypatch.setattr(overlap, "fitted", spy)
    with closing(read.store) as store, closing(StandIn(read.model, read.layers)) as stand_in:
        stand_in.layer_s = 1e-4
        for mode in ("page_cache", "direct"):
            assert fit_overlap(stand_in, store, mode, times(1e-4, 1e-5), link()).slowdown >= 1.0
        assert seen == [(True, True)] * 2
        assert not hasattr(stand_in.model, "promoe"), "nothing is left of the run"
        assert len(find_moe_layers(stand_in.model, allow_meta=True)) == len(stand_in.layers) == 4


@needs_packing
def test_packed_experts_are_timed_and_served_as_they_will_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "SECONDS", 0.05)
    folder = write_checkpoint(tmp_path, num_experts=16, layers=6, hidden=128, intermediate=64)
    with closing(read_model(str(folder)).store) as plain:  # type: ignore[type-var]
        assert not isinstance(plain, SlotFilesStore)
    run_pack(pack.Options(str(folder)), io.StringIO())
    read = read_model(str(folder))
    assert isinstance(read.store, SlotFilesStore)
    assert read.sizes.found_in.endswith(", experts packed")
    multiplied: list[int] = []
    real = PackedMatrix.multiply

    def multiply(self: PackedMatrix, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        multiplied.append(len(x))
        return real(self, x, out)

    monkeypatch.setattr(PackedMatrix, "multiply", multiply)
    with (
        closing(read.store) as store,
        closing(StandIn(read.model, read.layers, formats=formats_in(store.layouts))) as stand_in,
    ):
        assert stand_in.form == "packed"
        _, timed = stand_in.run(token_ids(stand_in.model, 1))
        assert len(multiplied) >= 2 * timed.experts_used > 0
        stand_in.layer_s = 1e-4
        multiplied.clear()
        for _ in range(2):  # the files are open afterwards
            assert fit_overlap(stand_in, store, "direct", times(1e-4, 1e-5), link()).slowdown >= 1.0
        assert multiplied
        assert not hasattr(stand_in.model, "promoe")
