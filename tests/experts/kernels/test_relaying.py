"""Integers of a checkpoint are moved into slots as they are: what a slot holds is computed here anew, code by code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from promoe.experts.kernels.int4 import Int4
from promoe.experts.kernels.int8 import Int8
from promoe.experts.kernels.relaying import relay_of
from promoe.stores.encodings.base import Encoding, Integers
from promoe.stores.expert_conversion import Decoding
from promoe.stores.layer_plan import DecodedRows
from promoe.stores.layout import ExpertLayout, TensorSpec

INPUTS = 256


@dataclass(frozen=True)
class Plain(Encoding):
    """Codes, scales and zeros as plain tensors."""

    integers: Integers | None
    name = "plain"

    def unpack(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        codes, scales, *zeros = parts
        return codes, scales, zeros[0] if zeros else None

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        codes, scales, zeros = self.unpack(parts)
        middle = 8 if codes.dtype == torch.uint8 else 0
        size = codes.shape[1] // scales.shape[1]
        weights = (codes.float() - middle) * scales.repeat_interleave(size, 1)
        out.copy_(weights if zeros is None else weights + zeros.repeat_interleave(size, 1))


def matrix(outputs: int, dtype: torch.dtype = torch.bfloat16) -> TensorSpec:
    return ExpertLayout.of({"w": ((outputs, INPUTS), dtype)})["w"]


def drawn(outputs: int, kind: Integers, zeros: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(outputs + kind.bits)
    low, high, dtype = (0, 16, torch.uint8) if kind.bits == 4 else (-128, 128, torch.int8)
    codes = torch.randint(low, high, (outputs, INPUTS), generator=generator).to(dtype)
    shape = (outputs, INPUTS // (kind.group or INPUTS))
    parts = [codes, torch.rand(shape, generator=generator).bfloat16().float()]
    return [*parts, torch.randn(shape, generator=generator).bfloat16().float()] if zeros else parts


def rows_of(outputs: int, kind: Integers | None, num_parts: int = 2) -> DecodedRows:
    return DecodedRows(Decoding(Plain(kind), (outputs, INPUTS)), num_parts)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("split", [(128,), (64, 64), (96, 32)])
@pytest.mark.parametrize(("group", "in_slot"), [(32, 32), (64, 64), (128, 128), (256, 128), (None, 128)])
def test_four_bits_are_moved(group: int | None, in_slot: int, split: tuple[int, ...], zeros: bool) -> None:
    kind = Integers(4, group)
    parts = [drawn(outputs, kind, zeros) for outputs in split]
    relay = relay_of(matrix(128), False, [rows_of(outputs, kind, 2 + zeros) for outputs in split], to_int8=False)
    assert relay is not None
    assert isinstance(relay.format, Int4)
    assert (relay.format.group, relay.rounds) == (in_slot, False)
    out = torch.empty(relay.format.nbytes, dtype=torch.uint8)
    relay([part for some in parts for part in some], out)
    expected = torch.empty((128, INPUTS), dtype=torch.bfloat16)
    start = 0
    for outputs, some in zip(split, parts, strict=True):
        Plain(kind).decode(some, expected[start : start + outputs])
        start += outputs
    assert torch.equal(relay.format.view(out).dense(), expected)


def test_eight_bits_with_a_scale_for_each_output_are_moved() -> None:
    kind = Integers(8, None)
    parts = drawn(64, kind)
    relay = relay_of(matrix(64), False, [rows_of(64, kind)], to_int8=False)
    assert relay is not None
    assert isinstance(relay.format, Int8)
    out = torch.empty(relay.format.nbytes, dtype=torch.uint8)
    relay(parts, out)
    codes, scales = relay.format.parts(out)
    assert torch.equal(codes, parts[0])
    assert torch.equal(scales.float(), parts[1].squeeze(1))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", [None, Integers(8, 32), Integers(4, 16)])
def test_what_no_slot_can_hold_is_decoded_or_quantised_to_eight_bits(kind: Integers | None, transposed: bool) -> None:
    rows, parts = [rows_of(64, kind)], drawn(64, kind or Integers(8, 32))
    assert relay_of(matrix(64), transposed, rows, to_int8=False) is None
    relay = relay_of(matrix(64), transposed, rows, to_int8=True)
    assert relay is not None
    assert relay.rounds
    out = torch.empty(relay.format.nbytes, dtype=torch.uint8)
    relay(parts, out)
    plain = torch.empty((64, INPUTS), dtype=torch.bfloat16)
    Plain(kind).decode(parts, plain)
    assert torch.equal(out, relay.format.quantize(plain, "rtn"))


@pytest.mark.parametrize("kind", [Integers(4, 32), Integers(8, None)])
def test_other_sizes_dtypes_and_mixtures_stay_decoded(kind: Integers) -> None:
    assert relay_of(matrix(72), False, [rows_of(72, kind)], to_int8=True) is None
    assert relay_of(matrix(64, torch.float32), False, [rows_of(64, kind)], to_int8=True) is None
    assert relay_of(matrix(64), True, [rows_of(64, kind)], to_int8=False) is None
    mixed = [rows_of(32, kind), rows_of(32, Integers(4, 64))]
    assert relay_of(matrix(64), False, mixed, to_int8=False) is None
