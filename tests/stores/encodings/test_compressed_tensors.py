"""compressed-tensors: the bits of its own package, and config.json is asked only for what tensors do not say."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from packed_weights import (
    FORMS,
    Form,
    compressed,
    make_fp8,
    make_int8,
    make_mx,
    make_packed,
    read_int8,
    read_packed,
    zero_words,
)

from promoe.errors import CheckpointError
from promoe.stores.encodings.base import EncodedTensor
from promoe.stores.encodings.compressed_tensors import find_compressed_tensors
from promoe.stores.encodings.compressed_tensors_schemes import module_bits, module_integers
from stores.encodings.ranges import decoded, ranges


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def the_weight(parts: dict[str, torch.Tensor], config: dict[str, Any], module: str = "layer") -> EncodedTensor:
    (weight,) = find_compressed_tensors(ranges(parts, module), config).values()
    assert isinstance(weight, EncodedTensor)
    return weight


MORE = {
    "2 bits": Form(compressed("pack-quantized", 2, 32), partial(make_packed, bits=2), partial(read_packed, bits=2)),
    "8 bits in groups": Form(
        compressed("pack-quantized", 8, 32, zeros=True),
        partial(make_packed, bits=8, zeros=True),
        partial(read_packed, bits=8),
    ),
    "one scale for all": Form(
        compressed("int-quantized", 8, None, strategy="tensor"),
        lambda *sizes: {**make_int8(*sizes), "weight_scale": torch.tensor([0.01]).bfloat16()},
        lambda parts: read_int8({**parts, "weight_scale": parts["weight_scale"].expand(len(parts["weight"]), 1)}),
    ),
    "FP8 in blocks that are cut off": Form(
        compressed("float-quantized", 8, None, kind="float", strategy="block", block_structure=[24, 40]),
        lambda *sizes: {**make_fp8(*sizes), "weight_scale": torch.linspace(0.1, 2, 9).view(3, 3).bfloat16()},
        lambda parts: (
            parts["weight"].float()
            * parts["weight_scale"].float().repeat_interleave(24, 0).repeat_interleave(40, 1)[:64, :96]
        ),
    ),
    "int8 in groups": Form(
        compressed("naive-quantized", 8, 24, zeros=True), partial(make_int8, groups=4, zeros=True), read_int8
    ),
}
OWN = {name: form for name, form in FORMS.items() if form.config["quant_method"] == "compressed-tensors"}


@pytest.mark.parametrize("name", [*OWN, *MORE])
def test_the_bits_of_its_own_package(name: str) -> None:
    if name == "W4A16 with actorder":
        pytest.skip("the package has given up the order of activations")
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed (pip install promoe[dev])")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    form = (OWN | MORE)[name]
    parts = form.make(64, 96, seeded())
    (scheme,) = QuantizationConfig.model_validate(form.config).config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(form.config["format"])
    expected = compressor.decompress(parts, scheme)["weight"]
    assert torch.equal(decoded(the_weight(parts, form.config), parts), expected.bfloat16())


@pytest.mark.parametrize("name", MORE)
def test_decoded_as_the_formula_says(name: str) -> None:
    form = MORE[name]
    parts = form.make(64, 96, seeded())
    assert torch.equal(decoded(the_weight(parts, form.config), parts, torch.float32), form.read(parts))


def test_inputs_that_do_not_fill_the_last_word() -> None:
    """As many as the groups say. (Without groups, only `weight_shape` says it, which is not read.)"""
    parts = make_packed(16, 36, seeded(), bits=4, group=12)
    assert parts["weight_packed"].shape == (16, 5)
    weight = the_weight(parts, compressed("pack-quantized", 4, 12))
    assert weight.shape == (16, 36)
    assert torch.equal(decoded(weight, parts, torch.float32), read_packed(parts, 4))


def test_outputs_that_do_not_fill_the_last_word_of_zeros() -> None:
    parts = make_packed(20, 64, seeded(), bits=4, zeros=True)
    parts["weight_zero_point"] = zero_words((3, 2), 4, seeded())
    weight = the_weight(parts, compressed("pack-quantized", 4, 32, zeros=True))
    assert torch.equal(decoded(weight, parts, torch.float32), read_packed(parts, 4))


def test_zeros_that_are_not_packed() -> None:
    parts = make_packed(16, 64, seeded(), bits=4)
    zeros = torch.randint(-8, 8, (16, 2), generator=seeded()).to(torch.int8)
    expected = read_packed(parts, 4) - zeros.repeat_interleave(32, 1) * parts["weight_scale"].float().repeat_interleave(
        32, 1
    )
    parts["weight_zero_point"] = zeros
    weight = the_weight(parts, compressed("pack-quantized", 4, 32, zeros=True))
    assert torch.equal(decoded(weight, parts, torch.float32), expected)


def test_an_order_that_was_never_filled_is_none() -> None:
    parts = make_packed(16, 64, seeded(), bits=4)
    expected = read_packed(parts, 4)
    parts["weight_g_idx"] = torch.full((64,), -1, dtype=torch.int32)
    assert torch.equal(decoded(the_weight(parts, compressed("pack-quantized", 4, 32)), parts, torch.float32), expected)


def test_an_order_with_a_group_that_does_not_exist() -> None:
    parts = make_packed(16, 64, seeded(), bits=4, ordered=True)
    parts["weight_g_idx"][5] = 2
    weight = the_weight(parts, compressed("pack-quantized", 4, 32))
    with pytest.raises(CheckpointError, match=r"groups 0 to 2 \(g_idx\), of 2"):
        decoded(weight, parts)


def test_tensors_of_activations_are_left_out() -> None:
    parts = {**make_int8(8, 32, seeded()), "input_zero_point": torch.zeros(1), "output_scale": torch.ones(1)}
    plain = ranges({"weight": torch.zeros(4, 4), "bias": torch.zeros(4), "input_scale": torch.ones(1)}, "other")
    found = find_compressed_tensors(ranges(parts) | plain, compressed("int-quantized", 8, None))
    assert set(found) == {"layer.weight", *plain}


class TestSeveralGroups:
    """A module's form is that of the groups which its tensors fit; if these differ, the name decides."""

    def config(self, four: list[str], eight: list[str], eight_group: int = 16) -> dict[str, Any]:
        groups = {}
        for number, (bits, size, targets) in enumerate(((4, 32, four), (8, eight_group, eight))):
            (scheme,) = compressed("pack-quantized", bits, size)["config_groups"].values()
            groups[f"group_{number}"] = {**scheme, "targets": targets}
        return {**compressed("pack-quantized", 4, 32), "config_groups": groups}

    def shape(self, module: str, four: list[str], eight: list[str], **fields: Any) -> tuple[int, ...]:
        """The shape of a module with 16 words and 4 groups: 4 bits of 128 inputs, or 8 bits of 64."""
        parts = make_packed(16, 128, seeded(), bits=4) | fields
        return the_weight(parts, self.config(four, eight), module).shape

    @pytest.mark.parametrize(
        ("four", "eight", "inputs"),
        [
            (["a.experts.0.up"], ["Linear"], 128),
            (["Linear"], ["a.experts.0.up"], 64),
            ([r"re:.*experts\.\d+"], ["Linear"], 128),
            (["Linear"], [r"re:.*\.up$"], 64),
            ([r"re:experts"], ["Linear"], 64),  # expressions match from the beginning
            (["Linear"], ["re:.*attention"], 128),
        ],
    )
    def test_by_name(self, four: list[str], eight: list[str], inputs: int) -> None:
        assert self.shape("a.experts.0.up", four, eight) == (16, inputs)

    def test_by_what_fits(self) -> None:
        """In 4 bits, groups of 32 would be half as many words."""
        parts = make_packed(16, 64, seeded(), bits=8, group=32)
        assert the_weight(parts, self.config(["layer"], ["other"], eight_group=32)).shape == (16, 64)

    @pytest.mark.parametrize("targets", [["Linear"], ["re:.*up", "Linear"]])
    def test_ambiguous(self, targets: list[str]) -> None:
        with pytest.raises(
            CheckpointError, match=r"'a.up' can be read in 4 bits or 8 bits.*Remove it from the targets"
        ):
            self.shape("a.up", targets, targets)

    def test_none_by_name(self) -> None:
        with pytest.raises(CheckpointError, match=r"'a.up' has weight_packed \[16, 16\] I32"):
            self.shape("a.up", ["re:b"], ["re:c"])

    @pytest.mark.parametrize(
        ("four", "eight", "bits"),
        [
            (["Linear"], ["re:.*experts.*"], 8 + 16 / 16),
            (["re:.*experts.*"], ["Linear"], 4 + 16 / 32),
            (["re:.*self_attn.*"], ["re:.*mlp.*"], 8 + 16 / 16),
            (["re:.*self_attn.*"], [r"re:.*layers\.\d+\.mlp\..*\.(gate|up|down)_proj$"], 8 + 16 / 16),
            (["re:.*self_attn.*"], ["a.mlp.experts.0.up_proj"], 8 + 16 / 16),
            (["re:.*self_attn.*"], ["re:.*block_sparse_moe.experts.*"], 8 + 16 / 16),
            (["re:.*self_attn.*"], ["re:.*shared.*"], None),
        ],
    )
    def test_bits_are_those_of_the_module(self, four: list[str], eight: list[str], bits: float | None) -> None:
        modules = ["layers.1.mlp.experts.0.up_proj", "a.mlp.experts.0.up_proj"]
        config = self.config(four, eight)
        assert module_bits(config, modules) == bits
        assert module_bits({**config, "ignore": ["lm_head", "re:.*up_proj"]}, modules) is None
        assert module_bits({**config, "ignore": ["lm_head", "re:.*down_proj"]}, modules) == bits

    @pytest.mark.parametrize(("actorder", "kept"), [(None, True), ("weight", True), ("static", True), ("group", False)])
    def test_an_order_of_activations_that_files_have(self, actorder: str | None, kept: bool) -> None:
        config = compressed("pack-quantized", 4, 32, actorder=actorder)
        assert (module_integers(config, ["a"]) is not None) == kept


class TestRefused:
    @pytest.mark.parametrize(
        ("fields", "what"),
        [
            ({"format": "nvfp4-pack-quantized"}, r"'nvfp4-pack-quantized'.*Transformers 5\.23 dequantises it wrongly"),
            ({"format": "marlin-24"}, "'marlin-24'.*Open a checkpoint of the model in pack-quantized"),
            ({"format": "mxfp6-pack-quantized"}, "'mxfp6-pack-quantized'"),
            ({"format": ["odd"]}, "'odd'"),
            ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask'"),
            ({"transform_config": {"config_groups": {"R1": {}}}}, r"'rotated \(transform_config\)'"),
            ({"config_groups": {"group_0": {"targets": ["Linear"], "format": "nvfp4-pack-quantized"}}}, "nvfp4"),
            (
                {"config_groups": {"W4A16 in groups": ["Linear"]}},
                r"config_groups \[\['Linear'\]\], which do not say how",
            ),
            ({"config_groups": {"group_0": {"targets": ["Linear"]}}}, "do not say how weights are quantised"),
            (
                {"config_groups": {"group_0": {"targets": ["re:(a+)+b"], "weights": {"num_bits": 4}}}},
                r"the regular expression '\(a\+\)\+b' .* repeats a group in parentheses",
            ),
            (
                {"config_groups": {"group_0": {"targets": ["re:("], "weights": {"num_bits": 4}}}},
                r"'\(' as a regular expression for modules' names, which it is not",
            ),
            (
                {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": "many"}}}},
                "do not say how weights are quantised",
            ),
        ],
    )
    def test_formats(self, fields: dict[str, Any], what: str) -> None:
        config = {**compressed("pack-quantized", 4, 32), **fields}
        with pytest.raises(CheckpointError, match=what):
            find_compressed_tensors({}, config)
        with pytest.raises(CheckpointError, match=what):
            module_bits(config, ["layer"])

    @pytest.mark.parametrize("words", ["ignore", "targets"])
    def test_expressions_with_too_many_ways_to_match(self, words: str) -> None:
        (group,) = compressed("pack-quantized", 4, 32)["config_groups"].values()
        group["targets"] = ["Linear"]
        config = {**compressed("pack-quantized", 4, 32), "config_groups": {"group_0": group}}
        (config if words == "ignore" else group)[words] = [f"re:{'.*' * 6}b"]
        with pytest.raises(CheckpointError, match=r"'\.\*\.\*\.\*\.\*\.\*\.\*b' .* could share out .* ways"):
            module_bits(config, ["model.layers.0.mlp.experts.0.up_proj"])

    def test_dense_parts_are_allowed(self) -> None:
        fields = {"sparsity_config": {"format": "dense"}, "transform_config": {}, "config_groups": 3}
        assert find_compressed_tensors({}, {**compressed("pack-quantized", 4, 32), **fields}) == {}

    def test_nvfp4_by_its_tensors(self) -> None:
        parts = {**make_mx(16, 64, seeded(), fp4=True), "weight_global_scale": torch.ones(1)}
        with pytest.raises(CheckpointError, match="nvfp4-pack-quantized"):
            find_compressed_tensors(ranges(parts), {"format": "mixed-precision"})

    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("W4A16 in groups", {"weight_scale": None}),
            ("W4A16 in groups", {"weight_packed": None}),
            ("W4A16 in groups", {"weight": torch.zeros(64, 96)}),
            ("W4A16 in groups", {"weight_packed": torch.zeros(64, 12, dtype=torch.int64)}),
            ("W4A16 in groups", {"weight_packed": torch.zeros(64, 0, dtype=torch.int32)}),
            ("W4A16 in groups", {"weight_packed": torch.zeros(64, 13, dtype=torch.int32)}),
            ("W4A16 in groups", {"weight_packed": torch.zeros(63, 12, dtype=torch.int32)}),
            ("W4A16 in groups", {"weight_packed": torch.zeros(2, 32, 12, dtype=torch.int32)}),
            ("W4A16 in groups", {"weight_scale": torch.zeros(64, 2)}),
            ("W4A16 in groups", {"weight_scale": torch.zeros(64, 3, dtype=torch.int32)}),
            ("W4A16 in groups", {"weight_scale": torch.zeros(3, 64)}),
            ("W4A16 in groups", {"weight_zero_point": torch.zeros(64, 3)}),
            ("W4A16 in groups", {"weight_zero_point": torch.zeros(64, 3, dtype=torch.int32)}),
            ("W4A16 in groups", {"weight_g_idx": torch.zeros(95, dtype=torch.int32)}),
            ("W4A16 in groups", {"weight_g_idx": torch.zeros(96, dtype=torch.int64)}),
            ("W4A16 in groups with zeros", {"weight_zero_point": None}),
            ("W4A16 by channel", {"weight_scale": torch.zeros(64, 3)}),
            ("W8A8 by channel", {"weight_scale": torch.zeros(64, 5)}),
            ("W8A8 by channel", {"weight": torch.zeros(64, 96).bfloat16()}),
            ("W8A8 by channel", {"weight_zero_point": torch.zeros(64, 1, dtype=torch.int32)}),
            ("W8A8 by channel with zeros", {"weight_zero_point": None}),
            ("FP8 by channel", {"weight_scale": torch.zeros(63, 1)}),
            ("FP8 by channel", {"weight_scale": torch.zeros(64)}),
            ("FP8 by channel", {"weight_scale": torch.zeros(64, 1).to(torch.float8_e5m2)}),
            ("FP8 by channel", {"weight_zero_point": torch.zeros(64, 1)}),
            ("MXFP4", {"weight_scale": torch.zeros(64, 3)}),
            ("MXFP4", {"weight_scale": torch.zeros(64, 6).to(torch.float8_e4m3fn)}),
            ("MXFP8", {"weight": torch.zeros(64, 96, dtype=torch.uint8)}),
        ],
    )
    def test_parts_that_do_not_belong_together(self, name: str, change: dict[str, torch.Tensor | None]) -> None:
        parts = FORMS[name].make(64, 96, seeded()) | change
        present = {key: part for key, part in parts.items() if part is not None}
        with pytest.raises(
            CheckpointError, match=r"'layer' has weight.*expected are weight_packed I32.*compare the files"
        ):
            find_compressed_tensors(ranges(present), FORMS[name].config)


@pytest.mark.parametrize(
    ("layout", "bits", "make"), [("pack-quantized", 4, partial(make_packed, bits=4)), ("int-quantized", 8, make_int8)]
)
def test_zeros_of_a_symmetric_scheme_are_not_used(layout: str, bits: int, make: Any) -> None:
    group = 32 if bits == 4 else None
    parts = make(64, 96, seeded())
    expected = decoded(the_weight(parts, compressed(layout, bits, group)), parts, torch.float32)
    with_zeros = make(64, 96, seeded(), zeros=True)
    with pytest.raises(CheckpointError, match=r"config\.json says that codes are symmetric"):
        decoded(the_weight(with_zeros, compressed(layout, bits, group)), with_zeros, torch.float32)
    for stored in (0, 5):
        with_zeros["weight_zero_point"][:] = stored * 0x11111111 if bits == 4 else stored
        weight = the_weight(with_zeros, compressed(layout, bits, group))
        assert torch.equal(decoded(weight, with_zeros, torch.float32), expected)
        assert weight.encoding.integers is not None


class TestWhatConfigGroupsState:
    """Scales, zeros and orders that differ from it belong to something else, even where they could be read."""

    def config(self, *schemes: dict[str, Any], **targets: list[str]) -> dict[str, Any]:
        groups = {}
        for number, (scheme, target) in enumerate(zip(schemes, targets.values(), strict=True)):
            (group,) = scheme["config_groups"].values()
            groups[f"group_{number}"] = {**group, "targets": target}
        return {**schemes[0], "config_groups": groups}

    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            ("W4A16 in groups", (64, 1)),
            ("W4A16 by channel", (1,)),
            ("W8A16 by channel", (1, 1)),
            ("W8A8 by channel", (64, 3)),
            ("W8A8 by channel", (1,)),
            ("FP8 by channel", (1,)),
            ("FP8 by channel", (64, 3)),
            ("FP8 in blocks", (3, 4)),  # transposed, where both would fit
            ("FP8 in blocks", (1,)),
            ("FP8 with one scale", (64, 1)),
            ("MXFP4", (64, 1)),
            ("MXFP4", (1,)),
            ("MXFP8", (64, 6)),
        ],
    )
    def test_shapes_of_scales(self, name: str, shape: tuple[int, ...]) -> None:
        parts = FORMS[name].make(64, 96, seeded())
        parts["weight_scale"] = torch.ones(shape).to(parts["weight_scale"].dtype)
        with pytest.raises(CheckpointError, match=r"'layer' has .*as config_groups in config\.json say"):
            the_weight(parts, FORMS[name].config)

    @pytest.mark.parametrize("stated", [[16, 32], "16x32"])
    def test_blocks_in_both_notations(self, stated: Any) -> None:
        config = compressed("float-quantized", 8, None, kind="float", strategy=None, block_structure=stated)
        parts = FORMS["FP8 in blocks"].make(64, 96, seeded())
        assert the_weight(parts, config).shape == (64, 96)
        with pytest.raises(CheckpointError, match="weight_scale"):
            the_weight({**parts, "weight_scale": torch.ones(2, 3)}, config)

    @pytest.mark.parametrize("module", ["a.attn.q", "a.experts.0.up"])
    def test_zeros_of_one_group_of_modules(self, module: str) -> None:
        """That those of another group have none does not make them needless."""
        plain, zeros = compressed("pack-quantized", 4, 32), compressed("pack-quantized", 4, 32, zeros=True)
        config = self.config(plain, zeros, first=["Linear"], second=[r"re:.*attn\..*"])
        parts = make_packed(16, 64, seeded(), bits=4)
        if "attn" not in module:
            assert the_weight(parts, config, module).shape == (16, 64)
            return
        with pytest.raises(CheckpointError, match=rf"'{module}' has weight_packed .*weight_zero_point"):
            the_weight(parts, config, module)
        parts["weight_zero_point"] = zero_words((2, 2), 4, seeded())
        assert the_weight(parts, config, module).shape == (16, 64)

    @pytest.mark.parametrize("actorder", ["group", "dynamic", True])
    def test_an_order_that_is_missing(self, actorder: Any) -> None:
        config = compressed("pack-quantized", 4, 32, actorder=actorder)
        with pytest.raises(CheckpointError, match="with actorder group: a weight_g_idx"):
            the_weight(make_packed(16, 64, seeded(), bits=4), config)
        assert the_weight(make_packed(16, 32, seeded(), bits=4), config).shape == (16, 32)  # one group has no order

    @pytest.mark.parametrize("actorder", [None, False, "weight", "static"])
    def test_no_order_is_stored(self, actorder: Any) -> None:
        config = compressed("pack-quantized", 4, 32, actorder=actorder)
        assert the_weight(make_packed(16, 64, seeded(), bits=4), config).shape == (16, 64)

    @pytest.mark.parametrize("shape", [torch.tensor([16]), torch.tensor([16, 64, 1]), torch.tensor([16.0, 64.0])])
    def test_weight_shape(self, shape: torch.Tensor) -> None:
        parts = {**make_packed(16, 64, seeded(), bits=4), "weight_shape": shape}
        with pytest.raises(CheckpointError, match=r"'layer' has .*weight_shape"):
            the_weight(parts, compressed("pack-quantized", 4, 32))

    def test_values_of_another_kind(self) -> None:
        """FP8 where config.json knows whole numbers only, and the other way round."""
        with pytest.raises(CheckpointError, match="weight_scale"):
            the_weight(FORMS["FP8 by channel"].make(64, 96, seeded()), FORMS["W8A8 by channel"].config)
        with pytest.raises(CheckpointError, match="weight_scale"):
            the_weight(FORMS["W8A8 by channel"].make(64, 96, seeded()), FORMS["FP8 by channel"].config)
