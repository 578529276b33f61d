"""Every form that can be read is decoded to the bits of its formula."""

from __future__ import annotations

import pytest
import torch
from packed_weights import FORMS

from promoe.errors import CheckpointError
from promoe.stores.encodings.base import EncodedTensor
from promoe.stores.encodings.schemes import SCHEMES, find_weights
from stores.encodings.ranges import decoded, in_order, ranges

# Forms whose codes no slot format can hold.
DECODED = (
    *("GPTQ 8 bits", "GPTQ 2 bits", "GPTQ 4 bits, v2, desc_act", "W4A16 with actorder", "W8A8 by channel with zeros"),
    *("FP8 by channel", "FP8 in blocks", "FP8 with one scale", "MXFP4", "MXFP8"),
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("name", FORMS)
def test_decoded_as_the_formula_says(name: str, dtype: torch.dtype) -> None:
    form = FORMS[name]
    for outputs, inputs in ((64, 96), (32, 32)):
        parts = form.make(outputs, inputs, torch.Generator().manual_seed(outputs))
        found = find_weights(ranges(parts), form.config)
        assert list(found) == ["layer.weight"]
        weight = found["layer.weight"]
        assert isinstance(weight, EncodedTensor)
        assert weight.shape == (outputs, inputs)
        assert torch.equal(decoded(weight, parts, dtype), form.read(parts).to(dtype))


@pytest.mark.parametrize("name", FORMS)
def test_a_large_weight_is_decoded_in_slices(name: str) -> None:
    form = FORMS[name]
    parts = form.make(480, 2048, torch.Generator().manual_seed(0))
    weight = find_weights(ranges(parts), form.config)["layer.weight"]
    assert isinstance(weight, EncodedTensor)
    assert torch.equal(decoded(weight, parts), form.read(parts).bfloat16())


@pytest.mark.parametrize("name", FORMS)
def test_codes_scales_and_zeros_make_the_same_weight(name: str) -> None:
    form = FORMS[name]
    parts = form.make(64, 96, torch.Generator().manual_seed(1))
    weight = find_weights(ranges(parts), form.config)["layer.weight"]
    assert isinstance(weight, EncodedTensor)
    integers = weight.encoding.integers
    if integers is None:
        assert name in DECODED
        return
    assert name not in DECODED
    codes, scales, zeros = weight.encoding.unpack(in_order(weight, parts))
    assert codes.is_contiguous()
    assert (codes.shape, codes.dtype) == ((64, 96), torch.uint8 if integers.bits == 4 else torch.int8)
    assert (scales.shape, scales.dtype) == ((64, 96 // (integers.group or 96)), torch.float32)
    times = integers.group or 96
    middle = 8 if integers.bits == 4 else 0
    again = (codes.float() - middle) * scales.repeat_interleave(times, 1)
    if zeros is not None:
        again += zeros.repeat_interleave(times, 1)
    assert torch.equal(again, form.read(parts))  # exact: scales have few bits


@pytest.mark.parametrize("name", FORMS)
def test_weights_of_one_form_have_equal_encodings(name: str) -> None:
    form = FORMS[name]
    found = {
        find_weights(ranges(form.make(64, 96, torch.Generator().manual_seed(seed))), form.config)["layer.weight"]
        for seed in range(2)
    }
    encodings = {weight.encoding for weight in found if isinstance(weight, EncodedTensor)}
    assert len(encodings) == 1


def test_other_tensors_stay_as_they_are() -> None:
    plain = ranges({"weight": torch.zeros(3, 4), "bias": torch.zeros(3), "scales": torch.zeros(2)}, "norm")
    for method in SCHEMES:
        assert find_weights(plain, {"quant_method": method, "packing_format": "auto_round:awq"}) == plain


@pytest.mark.parametrize("name", FORMS)
def test_config_json_says_of_most_weights_what_they_are(name: str) -> None:
    form = FORMS[name]
    weight = find_weights(ranges(form.make(64, 96, torch.Generator())), form.config)["layer.weight"]
    assert isinstance(weight, EncodedTensor)
    assert SCHEMES[form.config["quant_method"]].integers(form.config, ["layer"]) == weight.encoding.integers


def test_bits_per_weight() -> None:
    bits = {name: SCHEMES[form.config["quant_method"]].bits(form.config, ["layer"]) for name, form in FORMS.items()}
    assert bits["AWQ gemm"] == 4 + 20 / 32
    assert bits["GPTQ 8 bits"] == 8 + 24 / 32
    assert bits["W4A16 in groups"] == 4.5
    assert bits["W4A16 in groups with zeros"] == 4 + 20 / 32
    assert bits["W4A16 by channel"] == 4
    assert bits["W8A8 by channel"] == bits["FP8 by channel"] == 8
    assert SCHEMES["gptq"].bits({"bits": "four"}) is None
    assert SCHEMES["compressed-tensors"].bits({}, ["layer"]) is None


@pytest.mark.parametrize(
    ("name", "part"), [("AWQ gemm", "scales"), ("GPTQ 4 bits", "qzeros"), ("MXFP4", "weight_scale")]
)
def test_what_stands_beside_incomplete_weights_is_named(name: str, part: str) -> None:
    parts = FORMS[name].make(64, 96, torch.Generator().manual_seed(1))
    parts[f"{part}_2"] = parts.pop(part)
    with pytest.raises(CheckpointError, match=rf"'layer' has .*Found beside them: layer\.{part}_2 \[") as caught:
        find_weights(ranges(parts), FORMS[name].config)
    assert type(caught.value) is CheckpointError
