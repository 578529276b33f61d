"""Checkpoints in fewer bits whose weights stay so in memory: no bit depends on the cache, the predictor or the timing.

The reference is the same model with all experts in slots. How near its weights are to the checkpoint's is checked one by
one; `experts="checkpoint"` decodes them, with the bits of the model that is decoded when it is loaded.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from gguf import GGUFReader
from gguf_checkpoints import dequantised_model, write_gguf
from served import PREDICTORS, PROMPTS, check_integrity, close, config, delayed, greedy
from tiny_models import token_ids
from torch import nn

import promoe
from promoe.errors import CheckpointError, ConfigError, PatchStateError
from promoe.experts.kernels.formats import form_in_words
from promoe.model.quantized_linear import QuantizedLinear, linears_to_keep
from promoe.runtime import checking
from promoe.scheduler import ExpertKey
from promoe.stores.base import layout_counts, read_expert
from promoe.stores.encodings.base import EncodedTensor
from promoe.stores.encodings.gguf_blocks import block_encoding

FAMILY = "qwen3_moe"
SIZES = {"hidden": 64, "intermediate": 64}
# The linear layers of attention that have multiples of 64 outputs in any tiny model, and in those of K types only.
WIDE, NARROW = {"q_proj", "o_proj"}, {"k_proj", "v_proj"}
# What a checkpoint of this type can be opened as, and what its experts are then.
KEPT = {
    ("Q4_0", "auto"): "int4, 5 bits per weight",
    ("Q4_0", "int4"): "int4, 5 bits per weight",
    ("Q4_1", "auto"): "int4, 5 bits per weight",
    ("Q4_K", "auto"): "int4, 5 bits per weight",
    ("Q8_0", "int8"): "int8, 8.25 bits per weight",
    ("Q6_K", "int8"): "int8, 8.06 bits per weight",
    ("Q4_K", "int8"): "int4, 5 bits per weight",
}


@functools.cache
def checkpoint(kind: str) -> Path:
    sizes = {} if kind.endswith("_K") else SIZES
    return write_gguf(Path(_scratch().name), FAMILY, weight_type=kind, **sizes)


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@contextmanager
def served_until_left(model: Any) -> Iterator[Any]:
    try:
        yield model
    finally:
        if hasattr(model, "promoe"):
            close(model)


@contextmanager
def opened(kind: str, **arguments: Any) -> Iterator[Any]:
    settings = {"cache": "100%", "predictor": None, "link": delayed(7), "config": config(), **arguments}
    with served_until_left(promoe.from_pretrained(checkpoint(kind), **settings)) as model:
        yield model


@functools.cache
def reference(kind: str, form: str, prompt: str) -> Any:
    with opened(kind, experts=form) as model:
        return greedy(model, PROMPTS[prompt])


def linears(model: nn.Module) -> dict[str, QuantizedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


@pytest.mark.parametrize(("kind", "form"), KEPT)
def test_every_cache_size(kind: str, form: str) -> None:
    for cache, prompt in ((1, "padded"), ("30%", "one"), ("60%", "padded")):
        with opened(kind, experts=form, cache="1 per layer" if cache == 1 else cache, predictor="gate") as model:
            store = model.promoe.runtime.engine.store
            assert form_in_words(layout_counts(store)) == KEPT[kind, form]
            greedy(model, PROMPTS[prompt]).assert_equals(reference(kind, form, prompt))
            check_integrity(model)
            assert model.promoe.stats().evictions > 0


@pytest.mark.parametrize("predictor", ["gate", "previous", "popularity", "random"])
def test_every_prediction(predictor: str) -> None:
    assert predictor in PREDICTORS
    with opened("Q4_0", cache="40%", predictor=predictor) as model:
        greedy(model, PROMPTS["short"]).assert_equals(reference("Q4_0", "auto", "short"))
        check_integrity(model)


@pytest.mark.parametrize(("kind", "form"), [("Q4_0", "auto"), ("Q8_0", "int8")])
def test_prompts_of_any_length_and_number_of_threads(kind: str, form: str) -> None:
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with opened(kind, experts=form) as full, opened(kind, experts=form, cache="30%") as few, torch.no_grad():
            for batch, length in ((1, 1), (3, 17), (2, 250)):
                ids = token_ids(batch, length, seed=length)
                assert torch.equal(few(ids).logits, full(ids).logits), (threads, batch, length)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_weights_are_the_checkpoints_up_to_bf16(kind: str) -> None:
    """Scales and zeros are rounded to bf16: by 2^-9 of themselves, of which a weight is at most 8 and 1."""
    stock: Any = dequantised_model(checkpoint(kind), FAMILY, torch.float32, **({} if kind.endswith("_K") else SIZES))
    with opened(kind) as model:
        found = linears(model)
        assert {name.rpartition(".")[2] for name in found} == WIDE | (NARROW if kind.endswith("_K") else set())
        for name, linear in found.items():
            expected = stock.get_submodule(name).weight
            assert linear.weight.shape == expected.shape
            assert (linear.weight.float() - expected).abs().max() <= 2**-6 * expected.abs().max(), name


def test_rows_in_two_encodings_of_which_one_has_zeros(tmp_path: Path) -> None:
    """The gate and the up projection of an expert are rows of one matrix."""
    path = write_gguf(tmp_path, FAMILY, weight_type="Q4_0", types={"ffn_up_exps": "Q4_1"}, **SIZES)
    answers = []
    for cache in ("30%", "100%"):
        with served_until_left(promoe.from_pretrained(path, cache=cache, predictor="gate", config=config())) as model:
            store = model.promoe.runtime.engine.store
            assert form_in_words(layout_counts(store)) == "int4, 5 bits per weight"
            slot = memoryview(bytearray(store.layouts[0].slot_bytes))
            read_expert(store, ExpertKey(0, 1), slot)
            answers.append(greedy(model, PROMPTS["one"]))
    answers[0].assert_equals(answers[1])
    spec = store.layouts[0]["gate_up_proj"]
    assert spec.format is not None
    found = spec.format.view(torch.frombuffer(slot, dtype=torch.uint8)[: spec.nbytes]).dense().float()
    stock: Any = dequantised_model(path, FAMILY, torch.float32, **SIZES)
    expected = stock.model.layers[0].mlp.experts.gate_up_proj[1]
    assert (found - expected).abs().max() <= 2**-6 * expected.abs().max()


def test_decoded_when_asked_in_another_dtype_and_where_nothing_can_stay() -> None:
    expected = greedy(dequantised_model(checkpoint("Q4_0"), FAMILY, torch.bfloat16, **SIZES), PROMPTS["one"])
    with opened("Q4_0", experts="checkpoint", cache="30%") as model:
        assert not linears(model)
        greedy(model, PROMPTS["one"]).assert_equals(expected)
    expected = greedy(dequantised_model(checkpoint("Q4_0"), FAMILY, torch.float32, **SIZES), PROMPTS["one"])
    with opened("Q4_0", dtype=torch.float32, cache="30%") as model:
        greedy(model, PROMPTS["one"]).assert_equals(expected)
    expected = greedy(dequantised_model(checkpoint("Q8_0"), FAMILY, torch.bfloat16, **SIZES), PROMPTS["one"])
    with opened("Q8_0", cache="30%") as model:
        assert not linears(model)
        greedy(model, PROMPTS["one"]).assert_equals(expected)


def test_eight_bits_change_little() -> None:
    stock: Any = dequantised_model(checkpoint("Q8_0"), FAMILY, torch.bfloat16, **SIZES)
    with opened("Q8_0", experts="int8") as model, torch.no_grad():
        for name, linear in linears(model).items():
            expected = stock.get_submodule(name).weight.float()
            steps = expected.abs().amax(1, keepdim=True) / 127
            assert ((linear.weight.float() - expected).abs() <= 0.51 * steps + expected.abs() / 128).all(), name
        assert {name.rpartition(".")[2] for name in linears(model)} == WIDE


def test_four_bits_cannot_be_had_of_eight() -> None:
    with pytest.raises(ConfigError, match=r'experts="?.int4.*promoe quantize MODEL --bits 4.*experts="checkpoint"'):
        promoe.from_pretrained(checkpoint("Q8_0"), experts="int4")


def test_unpatching_decodes_the_experts() -> None:
    stock: Any = dequantised_model(checkpoint("Q4_0"), FAMILY, torch.bfloat16, **SIZES)
    with opened("Q4_0", cache="30%") as model:
        greedy(model, PROMPTS["one"])
        promoe.unpatch(model)
        for layer, expected in zip(model.model.layers, stock.model.layers, strict=True):
            assert torch.equal(layer.mlp.experts.gate_up_proj, expected.mlp.experts.gate_up_proj)
        with pytest.raises(PatchStateError, match=r"cannot be saved.*in fewer bits.*experts=\"checkpoint\""):
            model.state_dict()
        with pytest.raises(PatchStateError, match=r"cannot be copied"):
            copy.deepcopy(model)


def test_on_a_device_experts_stay_in_fewer_bits_and_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    monkeypatch.setattr(checking, "open_device", lambda name: device if str(name) == "cuda" else None)
    answers = []
    for cache in ("30%", "100%"):
        with opened("Q4_0", cache=cache, device="cuda", link="auto") as model:
            assert not linears(model)
            assert form_in_words(layout_counts(model.promoe.runtime.engine.store)) == "int4, 5 bits per weight"
            answers.append(greedy(model, PROMPTS["one"]))
    answers[0].assert_equals(answers[1])


def test_a_model_can_be_converted_moved_and_differentiated_afterwards() -> None:
    """Its linear layers then expand their weights: the kernels know bf16 and no gradients."""
    ids = token_ids(1, 140)
    with opened("Q4_0") as model:
        promoe.unpatch(model)
        expected = model.half()(ids).logits  # outside of no_grad
        expected.sum().backward()
        gradient = model.model.embed_tokens.weight.grad
        assert gradient is not None
        assert torch.isfinite(gradient).all()
        assert gradient.abs().sum() > 0
        layer = next(iter(linears(model).values()))
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=torch.bfloat16)
        plain.weight.data = layer.weight
        for dtype in (torch.float32, torch.bfloat16):
            hidden = torch.randn(200, layer.in_features, dtype=dtype, generator=torch.Generator().manual_seed(0))
            hidden.requires_grad_()
            assert torch.equal(layer(hidden), plain.to(dtype)(hidden))
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            assert layer(hidden.float()).dtype == torch.bfloat16
        layer.memory = torch.zeros_like(layer.memory)  # as moving a model does
        assert not layer.weight.any()


def test_numbers_that_have_no_code_are_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path, FAMILY, weight_type="Q8_0", **SIZES)
    tensor = next(one for one in GGUFReader(path, "r+").tensors if one.name == "blk.1.attn_q.weight")
    tensor.data[0, :2] = (0, 0x7E)  # the first scale is NaN
    tensor.data.flush()
    with pytest.raises(CheckpointError, match=r"blk\.1\.attn_q\.weight: A matrix .* NaN .*\"auto\" or \"checkpoint\""):
        promoe.from_pretrained(path, experts="int8")


def test_linear_layers_that_are_tied_or_computed_in_fp32_are_decoded() -> None:
    """A tied weight is the parameter of another module, too."""
    encoding = block_encoding(2)
    assert encoding is not None
    kept = []
    for tied in ({}, {"1.weight": "0.weight"}):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
        model.all_tied_weights_keys = tied  # type: ignore[assignment]
        tensors = {name: EncodedTensor(name, (64, 64), (), encoding) for name in model.state_dict() if "weight" in name}
        found = linears_to_keep(
            model, tensors, "integers", lambda name: torch.float32 if name == "2.weight" else torch.bfloat16
        )
        kept.append([linear.name for linear in found])
    assert kept == [["0", "1"], []]
