"""AWQ: each number of each word by the written formula, and tensors that do not belong together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packed_weights import AWQ, AWQ_ORDER, make_awq, read_awq

from promoe.errors import CheckpointError
from promoe.stores.encodings.awq import find_awq
from promoe.stores.encodings.base import EncodedTensor
from stores.encodings.ranges import decoded, ranges


def made(outputs: int = 16, inputs: int = 64) -> dict[str, torch.Tensor]:
    return make_awq(outputs, inputs, torch.Generator().manual_seed(5))


def the_weight(parts: dict[str, torch.Tensor], **fields: Any) -> EncodedTensor:
    weight = find_awq(ranges(parts), AWQ | fields)["layer.weight"]
    assert isinstance(weight, EncodedTensor)
    return weight


def test_number_by_number() -> None:
    parts = made()
    weight = decoded(the_weight(parts), parts, torch.float32)
    words, zeros, scales = (parts[name].tolist() for name in ("qweight", "qzeros", "scales"))
    for row in range(16):
        shift = 4 * AWQ_ORDER.index(row % 8)
        for column in range(64):
            code = (words[column][row // 8] >> shift) & 15
            zero = (zeros[column // 32][row // 8] >> shift) & 15
            assert weight[row, column].item() == (code - zero) * scales[column // 32][row]


def test_the_size_of_groups_is_that_of_the_tensors() -> None:
    """Whatever config.json says."""
    parts = made(inputs=128)
    assert torch.equal(decoded(the_weight(parts, group_size=-1), parts), decoded(the_weight(parts), parts))


@pytest.mark.parametrize("version", ["gemm", "GEMM", None])
def test_versions(version: str | None) -> None:
    assert the_weight(made(), version=version).shape == (16, 64)


@pytest.mark.parametrize("field", ["version", "format"])
def test_other_versions_are_refused(field: str) -> None:
    with pytest.raises(CheckpointError, match=r"version 'gemv' of AWQ. Only \"gemm\" can be read"):
        find_awq({}, {field: "gemv"})


def test_a_weight_that_is_there_twice() -> None:
    parts = {**made(), "weight": torch.zeros(16, 64)}
    with pytest.raises(CheckpointError, match=r"'layer.weight' in two ways: as it is, and as 'layer.qweight'"):
        the_weight(parts)


@pytest.mark.parametrize(
    "change",
    [
        {"qweight": None},
        {"qzeros": None},
        {"scales": None},
        {"qweight": torch.zeros(64, 2)},
        {"qweight": torch.zeros(64, 3, dtype=torch.int32)},
        {"qweight": torch.zeros(65, 2, dtype=torch.int32)},
        {"qweight": torch.zeros(0, 2, dtype=torch.int32)},
        {"qweight": torch.zeros(64, 2, 1, dtype=torch.int32)},
        {"qzeros": torch.zeros(2, 2, dtype=torch.int64)},
        {"qzeros": torch.zeros(1, 2, dtype=torch.int32)},
        {"scales": torch.zeros(2, 16, dtype=torch.int32)},
        {"scales": torch.zeros(2, 17)},
        {"scales": torch.zeros(3, 16)},
    ],
)
def test_parts_that_do_not_belong_together(change: dict[str, torch.Tensor | None]) -> None:
    parts = {name: part for name, part in (made() | change).items() if part is not None}
    with pytest.raises(CheckpointError, match=r"'layer' has .*expected are qweight \[in, out / 8\] I32"):
        the_weight(parts)


@pytest.mark.parametrize("fields", [{"zero_point": False}, {"zero_point": None, "sym": True}])
def test_symmetric_codes_have_their_zero_in_the_middle(fields: dict[str, Any]) -> None:
    parts, right = made(), made()
    right["qzeros"][:] = torch.tensor([0x88888888]).to(torch.int32)
    for stored in (0x88888888, 0x77777777, 0):
        parts["qzeros"][:] = torch.tensor([stored]).to(torch.int32)
        found = decoded(the_weight(parts, **fields), parts, torch.float32)
        assert torch.equal(found, decoded(the_weight(right), right, torch.float32))
    with pytest.raises(CheckpointError, match=r"config\.json says that codes are symmetric"):
        decoded(the_weight(made(), **fields), made(), torch.float32)


def test_gptqmodel_quantises_by_zero_point_whatever_sym_is() -> None:
    parts = made()
    weight = the_weight(parts, zero_point=True, sym=True)
    assert torch.equal(decoded(weight, parts, torch.float32), read_awq(parts))
