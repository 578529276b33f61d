"""GPTQ: each number of each word by the written formula, orders of activations, and tensors that do not belong together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packed_weights import GROUP, gptq, make_gptq, read_gptq

from promoe.errors import CheckpointError
from promoe.stores.encodings import slices
from promoe.stores.encodings.auto_round import find_auto_round
from promoe.stores.encodings.base import EncodedTensor, Integers
from promoe.stores.encodings.gptq import find_gptq
from stores.encodings.ranges import decoded, in_order, ranges


def made(outputs: int = 16, inputs: int = 64, bits: int = 4, **fields: Any) -> dict[str, torch.Tensor]:
    return make_gptq(outputs, inputs, torch.Generator().manual_seed(5), bits, **fields)


def the_weight(parts: dict[str, torch.Tensor], bits: int = 4, **fields: Any) -> EncodedTensor:
    weight = find_gptq(ranges(parts), gptq(bits, **fields))["layer.weight"]
    assert isinstance(weight, EncodedTensor)
    return weight


def symmetric(parts: dict[str, torch.Tensor], bits: int) -> dict[str, torch.Tensor]:
    """With zeros in the middle, of which one is missing in the file."""
    stored = torch.tensor({4: 0x77777777, 8: 0x7F7F7F7F}[bits], dtype=torch.int32)
    return {**parts, "qzeros": stored.expand(parts["qzeros"].shape).contiguous()}


@pytest.mark.parametrize(("bits", "outputs"), [(2, 16), (4, 16), (8, 4)])
@pytest.mark.parametrize(("layout", "missing"), [("gptq", 1), ("gptq_v2", 0)])
def test_number_by_number(bits: int, outputs: int, layout: str, missing: int) -> None:
    parts = made(outputs, 64, bits, ordered=True)
    parts["qzeros"] &= {2: 0x2AAAAAAA, 4: 0x6EEEEEEE, 8: 0x7EFEFEFE}[bits]  # none is the largest: nothing carries
    weight = decoded(the_weight(parts, bits, layout=layout, desc_act=True), parts, torch.float32)
    words, zeros, scales, groups = (parts[name].tolist() for name in ("qweight", "qzeros", "scales", "g_idx"))
    per_word, most = 32 // bits, (1 << bits) - 1
    for row in range(outputs):
        for column, group in enumerate(groups):
            code = (words[column // per_word][row] >> bits * (column % per_word)) & most
            zero = ((zeros[group][row // per_word] >> bits * (row % per_word)) & most) + missing
            assert weight[row, column].item() == (code - zero) * scales[group][row]


def test_a_zero_of_zero_carries_as_in_gptqmodel() -> None:
    """It subtracts 0x11111111 from a word when it writes, and adds it when it reads."""
    parts = made(8, 32)
    parts["qzeros"][:] = 0x50505050 - 0x11111111
    weight = decoded(the_weight(parts), parts, torch.float32)
    codes = torch.stack([(parts["qweight"] >> 4 * number) & 15 for number in range(8)], 1).flatten(0, 1).t()
    zeros = torch.tensor([0, 5] * 4)
    assert torch.equal(weight, (codes - zeros[:, None]) * parts["scales"].t().float())


def test_groups_that_do_not_divide_the_inputs() -> None:
    parts = made(16, 80)
    assert parts["scales"].shape == (3, 16)
    expected = read_gptq(parts, 4, plus_one=True)
    for given in (parts, {name: part for name, part in parts.items() if name != "g_idx"}):
        weight = the_weight(given)
        assert torch.equal(decoded(weight, parts, torch.float32), expected)
        assert weight.encoding.integers is None


def test_modules_with_other_bits_and_groups() -> None:
    """Where `dynamic` gives some modules others than config.json says for all."""
    for bits, group in ((8, 32), (4, 16), (2, 64)):
        parts = made(16, 64, bits, group=group)
        expected = read_gptq(parts, bits, plus_one=True)
        assert torch.equal(decoded(the_weight(parts), parts, torch.float32), expected)


def test_an_order_that_config_json_does_not_speak_of() -> None:
    """Is decoded, but its codes are not moved to slots as they are."""
    parts = made(ordered=True)
    weight = the_weight(parts)
    assert torch.equal(decoded(weight, parts, torch.float32), read_gptq(parts, 4, plus_one=True))
    assert weight.encoding.integers == Integers(4, GROUP)
    with pytest.raises(CheckpointError, match=r"another order \(g_idx\), and not desc_act"):
        weight.encoding.unpack(in_order(weight, parts))


@pytest.mark.parametrize(("group", "message"), [(2, "0 to 2"), (-1, "-1 to 1")])
def test_groups_that_do_not_exist(group: int, message: str) -> None:
    parts = made()
    parts["g_idx"][7] = group
    with pytest.raises(CheckpointError, match=rf"groups {message} \(g_idx\), of 2"):
        decoded(the_weight(parts), parts)


class TestCodesOf8Bits:
    """They go to slots as they are if there is one scale for an output, and no zero."""

    def test_symmetric(self) -> None:
        parts = symmetric(made(16, 64, 8, group=64), 8)
        weight = the_weight(parts, 8, sym=True, group_size=-1)
        assert weight.encoding.integers == Integers(8, None)
        codes, scales, zeros = weight.encoding.unpack(in_order(weight, parts))
        assert zeros is None
        assert torch.equal(codes * scales, read_gptq(parts, 8, plus_one=True))

    def test_others(self) -> None:
        assert the_weight(made(16, 64, 8), 8, sym=True).encoding.integers is None
        assert the_weight(made(16, 64, 8, group=64), 8, sym=False).encoding.integers is None


class TestSymmetric:
    """With `sym`, the code in the middle means zero, whatever is stored: writers differ, symmetric kernels do not read it."""

    @pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
    @pytest.mark.parametrize("bits", [2, 4, 8])
    def test_one_stored_zero(self, bits: int, layout: str) -> None:
        middle = 1 << bits - 1
        parts = made(32, 64, bits)
        per_word = 32 // bits
        codes = torch.stack(
            [(parts["qweight"] >> bits * place) & ((1 << bits) - 1) for place in range(per_word)], 1
        ).flatten(0, 1)
        expected = (codes.t() - middle) * parts["scales"].t().float().repeat_interleave(GROUP, 1)
        # Right in the first format, right in the second (or without the missing one), never filled, and any other.
        for stored in (middle - 1, middle, 0, 1):
            word = sum(stored << bits * place for place in range(per_word))
            parts["qzeros"][:] = torch.tensor([word]).to(torch.int32)
            weight = the_weight(parts, bits, layout=layout, sym=True)
            assert torch.equal(decoded(weight, parts, torch.float32), expected), stored
            if weight.encoding.integers is not None:
                found, scales, zeros = weight.encoding.unpack(in_order(weight, parts))
                assert zeros is None
                assert torch.equal(found, codes.t().to(torch.uint8))
                assert torch.equal(scales, parts["scales"].t().float())

    @pytest.mark.parametrize("bits", [2, 4, 8])
    def test_zeros_that_differ_contradict_it(self, bits: int) -> None:
        parts = made(32, 64, bits, group=64)
        weight = the_weight(parts, bits, sym=True)
        with pytest.raises(
            CheckpointError, match=r"config\.json says that codes are symmetric .* correct config\.json"
        ):
            decoded(weight, parts, torch.float32)
        if weight.encoding.integers is not None:
            with pytest.raises(CheckpointError, match=r"config\.json says that codes are symmetric"):
                weight.encoding.unpack(in_order(weight, parts))

    @pytest.mark.parametrize("slice_elements", [1, 10**6])
    def test_zeros_that_differ_far_apart_contradict_it(
        self, slice_elements: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Wherever slices of outputs end: within each of them, zeros are alike."""
        monkeypatch.setattr(slices, "SLICE_ELEMENTS", slice_elements)
        parts = symmetric(made(96, 64, 4), 4)
        parts["qzeros"][:, 64 // 8 :] += 0x11111111
        weight = the_weight(parts, 4, sym=True)
        with pytest.raises(
            CheckpointError, match=r"with zeros from 8 to 9, but its config\.json says that codes are sym"
        ):
            decoded(weight, parts, torch.float32)

    def test_auto_round(self) -> None:
        parts = made(32, 64)
        parts["qzeros"][:] = torch.tensor([0x88888888]).to(torch.int32)
        config = {"packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": GROUP, "sym": True}
        weight = find_auto_round(ranges(parts), config)["layer.weight"]
        assert isinstance(weight, EncodedTensor)
        right = the_weight(symmetric(parts, 4), sym=False)
        assert torch.equal(decoded(weight, parts), decoded(right, symmetric(parts, 4)))


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"checkpoint_format": "marlin"}, "marlin"),
        ({"format": "bitblas"}, "bitblas"),
        ({"is_marlin_format": True}, "marlin"),
        ({"checkpoint_format": ["gptq"]}, "gptq"),
    ],
)
def test_other_formats_are_refused(config: dict[str, Any], found: str) -> None:
    with pytest.raises(CheckpointError, match=rf"format .*{found}.* of GPTQ. Only gptq and gptq_v2 can be read"):
        find_gptq({}, config)


@pytest.mark.parametrize("packing", ["auto_round", "auto_round:gptqmodel", "auto_round:fp8", None])
def test_other_packings_of_auto_round_are_refused(packing: str | None) -> None:
    with pytest.raises(CheckpointError, match=r"of AutoRound. Only auto_round:auto_gptq, .*auto_round:awq can be read"):
        find_auto_round({}, {"packing_format": packing})


@pytest.mark.parametrize(
    "change",
    [
        {"qweight": None},
        {"qzeros": None},
        {"scales": None},
        {"qweight": torch.zeros(8, 16)},
        {"qweight": torch.zeros(7, 16, dtype=torch.int32)},
        {"qweight": torch.zeros(8, 24, dtype=torch.int32)},
        {"qweight": torch.zeros(8, 0, dtype=torch.int32)},
        {"qweight": torch.zeros(1, 8, 16, dtype=torch.int32)},
        {"qzeros": torch.zeros(2, 2)},
        {"qzeros": torch.zeros(2, 3, dtype=torch.int32)},
        {"qzeros": torch.zeros(3, 2, dtype=torch.int32)},
        {"scales": torch.zeros(2, 16, dtype=torch.int32)},
        {"scales": torch.zeros(2, 15)},
        {"scales": torch.zeros(2)},
        {"scales": torch.zeros(65, 16), "qzeros": torch.zeros(65, 2, dtype=torch.int32)},
        {"g_idx": torch.zeros(63, dtype=torch.int32)},
        {"g_idx": torch.zeros(64)},
        {"g_idx": torch.zeros(64, 1, dtype=torch.int32)},
    ],
)
def test_parts_that_do_not_belong_together(change: dict[str, torch.Tensor | None]) -> None:
    parts = {name: part for name, part in (made() | change).items() if part is not None}
    with pytest.raises(CheckpointError, match=r"'layer' has .*expected are qweight \[in \* bits / 32, out\] I32"):
        the_weight(parts)


def test_an_order_of_activations_that_is_missing() -> None:
    parts = {name: part for name, part in made().items() if name != "g_idx"}
    assert the_weight(parts).shape == (16, 64)
    with pytest.raises(CheckpointError, match=r"g_idx \[in\] I32 if desc_act is set"):
        the_weight(parts, desc_act=True)
