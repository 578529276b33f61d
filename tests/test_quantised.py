"""Checkpoints with quantised experts, end to end: the answers of the model that Transformers dequantises when it loads."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from packed_weights import FORMS
from quantised_checkpoints import write_fp8, write_mxfp4, write_mxfp8, write_packed, write_stacked_fp8
from served import PROMPTS, LinkOver, close, config, greedy, load_stock, plain_link
from transformers import CompressedTensorsConfig

import promoe
from promoe.model.opening import open_headers
from promoe.transfer.links import FileLink

COMPARABLE = Version(transformers.__version__) >= Version("5.23")
PER_EXPERT_FAMILIES = ("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "olmoe", "glm4_moe")
WRITERS = {"fp8": write_fp8, "mxfp8": write_mxfp8, "mxfp4": write_mxfp4}


@pytest.mark.parametrize("mode", ["page_cache", "direct"])
@pytest.mark.parametrize("method", WRITERS)
def test_the_same_bits_as_the_model_dequantised_at_loading(method: str, mode: Any, tmp_path: Path) -> None:
    """Experts stay quantised in the files; the model and its slots are bf16."""
    if method == "mxfp8" and not COMPARABLE:
        pytest.skip("Transformers does not know it")
    folder = WRITERS[method](tmp_path, top_k=3)
    expected = greedy(load_stock(folder), PROMPTS["one"])
    link = LinkOver(lambda store: FileLink(store, mode))
    model = promoe.from_pretrained(folder, cache="40%", link=link, config=config())
    try:
        assert model.dtype == torch.bfloat16
        greedy(model, PROMPTS["one"]).assert_equals(expected)
        stats = model.promoe.stats()
        assert stats.evictions > 0
        promoe.unpatch(model)
        greedy(model, PROMPTS["one"]).assert_equals(expected)
    finally:
        if hasattr(model, "promoe"):
            close(model)


@pytest.mark.parametrize("mode", ["page_cache", "direct"])
@pytest.mark.parametrize("name", FORMS)
def test_the_same_bits_as_the_model_of_decoded_weights(name: str, mode: Any, tmp_path: Path) -> None:
    """Attention, shared experts and experts are all in this form; the other model has them in bf16."""
    quantised, plain = write_packed(tmp_path, FORMS[name], top_k=3)
    answers_alike(quantised, plain, LinkOver(lambda store: FileLink(store, mode)))


@pytest.mark.skipif(not COMPARABLE, reason="compared with Transformers 5.23")
@pytest.mark.parametrize("name", ["W4A16 in groups", "W4A16 by channel", "W8A16 by channel", "FP8 by channel"])
def test_the_same_bits_as_compressed_tensors_dequantised_at_loading(name: str, tmp_path: Path) -> None:
    """In these forms. Transformers 5.23 cannot open experts with zeros, in int8, or in the order of activations."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed (pip install promoe[dev])")
    quantised, plain = write_packed(tmp_path, FORMS[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it takes the checkpoint's configuration
        stock = load_stock(quantised, quantization_config=CompressedTensorsConfig(dequantize=True))
    decoded = load_stock(plain).state_dict()
    assert all(torch.equal(tensor, decoded[key]) for key, tensor in stock.state_dict().items())


@pytest.mark.parametrize("name", ["W4A16 in groups", "AWQ gemm", "GPTQ 4 bits, v2, desc_act", "FP8 by channel"])
@pytest.mark.parametrize("family", PER_EXPERT_FAMILIES)
def test_families_with_a_tensor_for_each_expert(family: str, name: str, tmp_path: Path) -> None:
    answers_alike(*write_packed(tmp_path, FORMS[name], family), LinkOver(plain_link))


class TestMixed:
    """Layers in several forms: which one each is in can be seen from its tensors."""

    def test_attention_in_fp8_and_experts_in_4_bits(self, tmp_path: Path) -> None:
        four, eight = FORMS["W4A16 in groups"], FORMS["FP8 by channel"]
        groups = {}
        for name, form, target in (("a", four, r"re:.*experts\..*"), ("b", eight, r"re:.*attn.*")):
            (scheme,) = form.config["config_groups"].values()
            groups[name] = {**scheme, "targets": [target], "format": form.config["format"]}
        mixed = replace(four, config={**four.config, "format": "mixed-precision", "config_groups": groups})
        answers_alike(*write_packed(tmp_path, mixed, others={"self_attn": eight}), LinkOver(plain_link))

    def test_more_bits_for_a_layer_and_for_a_projection(self, tmp_path: Path) -> None:
        """As `dynamic` of GPTQ says it."""
        four, eight, two = FORMS["GPTQ 4 bits"], FORMS["GPTQ 8 bits"], FORMS["GPTQ 2 bits"]
        others = {r"layers\.1\.": eight, "gate_proj": two, "o_proj": None}
        answers_alike(*write_packed(tmp_path, four, others=others), LinkOver(plain_link))

    def test_experts_of_a_layer_in_several_forms_are_refused(self, tmp_path: Path) -> None:
        others = {r"experts\.3\.down_proj": FORMS["GPTQ 8 bits"], r"experts\.4\.down_proj": None}
        quantised, _ = write_packed(tmp_path, FORMS["GPTQ 4 bits"], others=others)
        with pytest.raises(
            promoe.CheckpointError, match=r"down_proj .*not all in the same form.*BF16.*GPTQ \(4 bits.*GPTQ \(8 bits"
        ):
            promoe.from_pretrained(quantised)


def answers_alike(quantised: Path, plain: Path, link: LinkOver) -> None:
    """Assert that a checkpoint gives the logits and greedy tokens of another one, with slots for few experts."""
    expected = greedy(load_stock(plain), PROMPTS["one"])
    model = promoe.from_pretrained(quantised, experts="checkpoint", cache="40%", link=link, config=config())
    try:
        assert model.dtype == torch.bfloat16
        greedy(model, PROMPTS["one"]).assert_equals(expected)
        assert model.promoe.stats().evictions > 0
        promoe.unpatch(model)
        greedy(model, PROMPTS["one"]).assert_equals(expected)
    finally:
        if hasattr(model, "promoe"):
            close(model)


def test_fp8_experts_without_scales_are_refused(tmp_path: Path) -> None:
    what = r"has dtype F8_E4M3.*quantised in a way that cannot be read: open another one"
    with pytest.raises(promoe.CheckpointError, match=what):
        promoe.from_pretrained(write_stacked_fp8(tmp_path))


def test_another_dtype_is_what_the_experts_are_dequantised_to(tmp_path: Path) -> None:
    """Of MXFP4 checkpoints. (Of FP8 ones Transformers leaves the other weights in bf16, and then cannot run them.)

    Transformers 5.17 ignores the dtype for the experts and leaves them in bf16, in a model that is otherwise fp32. Here,
    as in later versions, they are fp32, so that the model to compare with is that one with all of its weights in fp32.
    """
    folder = write_mxfp4(tmp_path, top_k=3)
    expected = greedy(load_stock(folder, dtype=torch.float32).float(), PROMPTS["short"])
    model = promoe.from_pretrained(folder, dtype=torch.float32, cache="40%", link=LinkOver(plain_link), config=config())
    try:
        greedy(model, PROMPTS["short"]).assert_equals(expected)
    finally:
        close(model)


def test_arguments_that_are_fields_of_the_configuration(tmp_path: Path) -> None:
    """With a model class, Transformers does not read the configuration itself if the checkpoint is quantised."""
    quantised, plain = write_packed(tmp_path, FORMS["AWQ gemm"], top_k=3)
    fields: dict[str, Any] = {"num_experts_per_tok": 1, "attn_implementation": "eager"}
    expected = greedy(load_stock(plain, **fields), PROMPTS["one"])
    model = promoe.from_pretrained(
        quantised, experts="checkpoint", auto_class=transformers.Qwen3MoeForCausalLM, config=config(), **fields
    )
    try:
        assert model.config._attn_implementation == "eager"
        greedy(model, PROMPTS["one"]).assert_equals(expected)
    finally:
        close(model)


def test_a_configuration_can_be_used_twice(tmp_path: Path) -> None:
    quantised, _ = write_packed(tmp_path, FORMS["AWQ gemm"])
    given = transformers.AutoConfig.from_pretrained(quantised)
    for _ in range(2):
        open_headers(quantised, config=given).store.close()
    assert given.quantization_config


def test_an_adapter_with_a_model_class(tmp_path: Path) -> None:
    """The adapter's folder has no config.json."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed (pip install promoe[dev])")
    quantised, plain = write_packed(tmp_path, FORMS["AWQ gemm"])
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"])
    peft.get_peft_model(load_stock(plain), lora).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": str(quantised)}))
    open_headers(path.parent, auto_class=transformers.Qwen3MoeForCausalLM).store.close()
