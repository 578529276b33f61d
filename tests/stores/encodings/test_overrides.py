"""What config.json says of single modules counts for these: whether they are symmetric, and their order of activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packed_weights import GROUP, gptq, make_awq, make_gptq, read_awq, read_gptq

from promoe.errors import CheckpointError
from promoe.stores.encodings.auto_round import find_auto_round
from promoe.stores.encodings.base import EncodedTensor
from promoe.stores.encodings.gptq import find_gptq
from promoe.stores.encodings.overrides import Overrides
from promoe.stores.encodings.packed_integers import stated_bits, stated_integers
from stores.encodings.ranges import decoded, ranges

MODULE = "model.layers.3.mlp.experts.1.up_proj"


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def gptq_weight(parts: dict[str, torch.Tensor], **fields: Any) -> EncodedTensor:
    weight = find_gptq(ranges(parts, MODULE), gptq(4, **fields))[f"{MODULE}.weight"]
    assert isinstance(weight, EncodedTensor)
    return weight


@pytest.mark.parametrize(
    "dynamic",
    [
        {r"+:.*experts.*": {"sym": False}},
        {r".*\.up_proj": {"sym": False, "bits": 4}},
        {r"-:.*experts.*": {}, r".*attn.*": {"sym": True}, r"model\.": {"sym": False}, r".*": {"sym": True}},
    ],
)
def test_modules_of_gptqmodel_with_zeros(dynamic: dict[str, Any]) -> None:
    parts = make_gptq(16, 64, seeded(), 4)
    found = decoded(gptq_weight(parts, sym=True, dynamic=dynamic), parts, torch.float32)
    assert torch.equal(found, read_gptq(parts, 4, plus_one=True))


@pytest.mark.parametrize(
    "dynamic", [None, {}, [], {"experts": {"sym": False}}, {".*experts.*": {"bits": 4}}, {".*": 3}]
)
def test_modules_of_which_nothing_else_is_said(dynamic: Any) -> None:
    parts = make_gptq(16, 64, seeded(), 4)
    with pytest.raises(CheckpointError, match=r"config\.json says that codes are symmetric"):
        decoded(gptq_weight(parts, sym=True, dynamic=dynamic), parts)


def test_a_symmetric_module_among_others() -> None:
    parts = make_gptq(16, 64, seeded(), 4)
    parts["qzeros"][:] = torch.tensor([0x77777777]).to(torch.int32)
    expected = read_gptq(parts, 4, plus_one=True)
    parts["qzeros"][:] = torch.tensor([0x88888888]).to(torch.int32)
    weight = gptq_weight(parts, sym=False, dynamic={".*experts": {"sym": True}})
    assert torch.equal(decoded(weight, parts, torch.float32), expected)


def test_an_order_of_activations_of_one_module() -> None:
    parts = make_gptq(16, 64, seeded(), 4, ordered=True)
    assert gptq_weight(parts).encoding.integers is not None
    assert gptq_weight(parts, dynamic={".*up_proj": {"desc_act": True}}).encoding.integers is None


@pytest.mark.parametrize("name", [MODULE, r".*experts.*up_proj", r"experts\.\d+"])
@pytest.mark.parametrize("packing", ["auto_gptq", "auto_awq"])
def test_layers_of_auto_round(packing: str, name: str) -> None:
    parts = make_awq(16, 64, seeded()) if packing == "auto_awq" else make_gptq(16, 64, seeded(), 4)
    config = {"bits": 4, "group_size": GROUP, "sym": True, "packing_format": f"auto_round:{packing}"}
    tensors = ranges(parts, MODULE)
    weight = find_auto_round(tensors, {**config, "extra_config": {name: {"sym": False}}})[f"{MODULE}.weight"]
    assert isinstance(weight, EncodedTensor)
    expected = read_awq(parts) if packing == "auto_awq" else read_gptq(parts, 4, plus_one=True)
    assert torch.equal(decoded(weight, parts, torch.float32), expected)
    for other in ("experts", "up_proj", MODULE + "2", "+"):
        contradicted = {**config, "extra_config": {other: {"sym": False}} if other != "+" else ["+"]}
        weight = find_auto_round(tensors, contradicted)[f"{MODULE}.weight"]
        assert isinstance(weight, EncodedTensor)
        with pytest.raises(CheckpointError, match=r"config\.json says that codes are symmetric"):
            decoded(weight, parts)


def test_a_name_counts_before_an_expression() -> None:
    found = Overrides({"sym": True, "extra_config": {".*": {"sym": False}, "a.b": {"bits": 8}}})
    assert found.of("a.b")["bits"] == 8
    assert found.of("a.b")["sym"]
    assert not found.of("a.c")["sym"]


def test_expressions_that_cannot_be_used() -> None:
    parts = make_gptq(16, 64, seeded(), 4)
    for pattern in ("+:(a+)+b", "("):
        with pytest.raises(CheckpointError, match="regular expression"):
            gptq_weight(parts, dynamic={pattern: {"sym": False}})


@pytest.mark.parametrize(
    ("fields", "bits"),
    [
        ({}, 4),
        ({"dynamic": {r"+:.*experts.*": {"bits": 8}}}, 8),
        ({"dynamic": {r".*attn.*": {"bits": 8}}}, 4),
        ({"dynamic": {r"-:.*experts.*": {}, r".*": {"bits": 8}}}, None),
        ({"dynamic": {r".*": {"bits": 8}, r"-:.*experts.*": {}}}, 8),
        ({"extra_config": {MODULE: {"bits": 2}}}, 2),
        ({"extra_config": {r".*\.experts\..*": {"bits": 16}}}, None),
    ],
)
def test_plans_count_what_is_said_of_the_module(fields: dict[str, Any], bits: int | None) -> None:
    """A scale of 16 bits and a zero for each group, if it is quantised."""
    names = [MODULE.replace("up_proj", "gate_proj"), MODULE]
    found = stated_bits(gptq(4, **fields), names)
    assert found == (None if bits is None else bits + (16 + bits) / GROUP)
    assert (stated_integers(gptq(4, **fields), names) is None) == (bits != 4)
