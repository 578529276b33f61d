"""A slot format is one class in one file and one entry in the registry; nothing else has to know it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import write_checkpoint
from tiny_models import token_ids
from transformers import AutoModelForCausalLM

import promoe
from promoe.experts.kernels.formats import FORMATS, formats_in
from promoe.model.opening import open_headers
from promoe.model.packing import write_packed
from promoe.stores.layout import TensorSpec


@dataclass(frozen=True)
class Negated:
    """Matrices that are stored with the opposite sign."""

    shape: tuple[int, ...]
    transposed: bool
    dtype: torch.dtype
    name = "negated"
    signature = "sign bit"
    exact = True

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def pack(self, matrix: torch.Tensor) -> torch.Tensor:
        return (-matrix).contiguous().view(-1).view(torch.uint8)

    def view(self, memory: torch.Tensor) -> NegatedMatrix:
        return NegatedMatrix(memory.view(self.dtype).view(self.shape), self.transposed)


class NegatedMatrix:
    """Its kernel: the other factor is negated, too."""

    products = 0

    def __init__(self, stored: torch.Tensor, transposed: bool) -> None:
        self.stored = stored
        self._factor = stored if transposed else stored.t()

    @property
    def shape(self) -> tuple[int, int]:
        in_size, out_size = self._factor.shape
        return in_size, out_size

    def multiply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        NegatedMatrix.products += 1
        return torch.mm(-x, self._factor, out=x.new_empty((len(x), self.shape[1])) if out is None else out)

    def dense(self) -> torch.Tensor:
        return -self.stored


class NegatedFormat:
    """The format as the registry knows it."""

    name = "negated"
    exact = True

    def of(self, matrix: TensorSpec, transposed: bool) -> Negated | None:
        return Negated(matrix.shape, transposed, matrix.dtype)

    def read(self, matrix: TensorSpec, transposed: bool, signature: str) -> Negated | None:
        return self.of(matrix, transposed) if signature == Negated.signature else None


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny checkpoint whose experts are stored in the toy format, too."""
    monkeypatch.setitem(FORMATS, "negated", NegatedFormat())
    monkeypatch.setattr(NegatedMatrix, "products", 0)
    folder = write_checkpoint(tmp_path / "model")
    opened = open_headers(folder)
    write_packed(opened.layers, opened.store, tmp_path / "negated", slot_format="negated")
    opened.store.close()
    return folder


@pytest.mark.parametrize("cache", ["100%", "50%", "13%"])
def test_a_model_is_served_from_a_new_format_bit_by_bit(packed: Path, cache: str) -> None:
    expected = AutoModelForCausalLM.from_pretrained(packed).eval()
    model = promoe.from_pretrained(packed, cache=cache, experts=packed.parent / "negated")
    layouts = model.promoe.runtime.engine.store.layouts
    (formats,) = formats_in(layouts).values()
    assert set(formats) == {"gate_up_proj", "down_proj"}
    with torch.no_grad():
        for num_tokens in (30, 1, 1, 5, 90):
            ids = token_ids(1, num_tokens, seed=num_tokens)
            assert torch.equal(model(ids).logits, expected(ids).logits)
        matrix = model.promoe._pools[0].tensors(0)["down_proj"]
        assert isinstance(matrix, NegatedMatrix)
        rows = {
            tuple(row.flatten().tolist())
            for layer in promoe.find_moe_layers(expected)
            for row in layer.rows()["down_proj"]
        }
        assert tuple(matrix.dense().flatten().tolist()) in rows
    assert NegatedMatrix.products > 0
    promoe.unpatch(model)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)


def test_a_format_that_is_not_there_any_more_is_named(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FORMATS, "negated")
    with pytest.raises(promoe.ConfigError, match="in the slot format 'negated', which this version does not know"):
        promoe.from_pretrained(packed, cache="50%", experts=packed.parent / "negated")
