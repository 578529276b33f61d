"""PEFT's adapters: beside the experts they work as ever; on the experts they are refused, with a remedy that works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from untouched import leaving_untouched

import promoe
from life.models import FAMILIES, SOME_FAMILIES, ask, assert_unharmed, build, differs, loaded, opened, patched, prompt
from promoe import EmulatedLink
from promoe.errors import PatchStateError, UnsupportedModelError
from promoe.experts.guard import is_guard

FAST = EmulatedLink(bandwidth_bytes_per_s=1e12)
ATTENTION = {
    "qwen2_moe": ["q_proj", "v_proj"],
    "gpt_oss": ["q_proj", "v_proj"],
    "dbrx": ["Wqkv"],
    "switch_transformers": ["q", "v"],
}
ON_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    "gpt_oss": {"target_parameters": ["mlp.experts.down_proj"]},
    "dbrx": {"target_parameters": ["experts.mlp.w1"]},
    "switch_transformers": {"target_modules": ["wi"]},
}
AFTERWARDS = r"After patching, something .*adapter.*Unpatch the model, merge the adapter.*merge_and_unload\(\)"
MERGE = (
    r"has an adapter on its experts.*Merge it \(PeftModel\.merge_and_unload\(\)\) and patch the model that this returns"
)


def adapted(model: Any, **fields: Any) -> Any:
    """The model with an adapter whose weights have an effect."""
    torch.manual_seed(5)
    config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **fields)
    return get_peft_model(model, config).eval()


def on_attention(family: str) -> Any:
    """A model with an adapter on its attention."""
    model = build(family)
    plain = ask(model)
    model = adapted(model, target_modules=ATTENTION[family])
    assert differs(ask(model), plain)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_beside_the_experts(family: str) -> None:
    """Whether the wrapped model is patched or what is in it."""
    model = on_attention(family)
    expected = ask(model)
    for whole_or_inner in (model, model.get_base_model()):
        with leaving_untouched(model), patched(whole_or_inner):
            assert_unharmed(model, expected)
            stats = model.promoe.stats()
            assert stats.bytes_demand > 0
            assert stats.prefill.passes + stats.decode.passes == (1 if family == "switch_transformers" else 2)
            with model.disable_adapter():
                plain = ask(model)
        assert differs(plain, expected)
        with model.disable_adapter():
            assert_unharmed(model, plain)


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "dbrx"])
def test_an_adapted_model_generates(family: str) -> None:
    """Around its wrapper, but not around the observer of its passes."""
    model = on_attention(family)
    arguments = {"input_ids": prompt(model)["input_ids"], "max_new_tokens": 4, "do_sample": False}
    expected = model.generate(**arguments)
    with patched(model):
        assert torch.equal(model.generate(**arguments), expected)
        stats = model.promoe.stats()
        assert (stats.prefill.passes, stats.decode.passes) == (1, 3)


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_an_adapter_that_comes_and_goes_while_the_model_is_patched(family: str) -> None:
    """It is added, merged and unloaded; what is left knows that it is patched."""
    model = build(family)
    plain = ask(model)
    with patched(model):
        model = adapted(model, target_modules=ATTENTION[family])
        expected = ask(model)
        assert differs(expected, plain)
        promoe.unpatch(model)
    assert_unharmed(model, expected)
    with patched(model):
        merged = model.merge_and_unload()
        expected = ask(merged)
        assert differs(expected, plain)
        with pytest.raises(PatchStateError, match="patched already"):
            promoe.patch(merged, link=FAST)
        promoe.unpatch(merged)
        assert not hasattr(model, "promoe")
    assert_unharmed(merged, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_on_experts_is_refused_and_the_remedy_works(family: str) -> None:
    """Its share of the weights is not in what the slots are filled from."""
    model = build(family)
    plain = ask(model)
    model = adapted(model, target_modules=ATTENTION[family] + ON_EXPERTS[family].get("target_modules", []))
    if "target_parameters" in ON_EXPERTS[family]:
        model = adapted(build(family), target_modules=ATTENTION[family], **ON_EXPERTS[family])
    for whole_or_inner in (model, model.get_base_model()):
        for link in ("auto", FAST):
            with leaving_untouched(model), pytest.raises(UnsupportedModelError, match=MERGE):
                promoe.patch(whole_or_inner, link=link)
    merged = model.merge_and_unload()
    expected = ask(merged)
    assert differs(expected, plain)
    with leaving_untouched(merged), patched(merged):
        assert_unharmed(merged, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_put_on_experts_that_are_served_is_noticed(family: str) -> None:
    """By the next forward: it would run without the adapter's share."""
    model = build(family)
    plain = ask(model)
    with patched(model):
        wrapped = adapted(model, **ON_EXPERTS[family])
        for _ in range(2):
            with pytest.raises(PatchStateError, match=AFTERWARDS):
                ask(wrapped)
    merged = wrapped.merge_and_unload()
    expected = ask(merged)
    assert differs(expected, plain)
    with patched(merged):
        assert_unharmed(merged, expected)


def test_experts_saved_as_modules_of_an_adapter_are_refused() -> None:
    """Two copies of them are in the model then."""
    model = adapted(build("qwen2_moe"), target_modules=["q_proj"], modules_to_save=["experts"])
    with leaving_untouched(model), pytest.raises(UnsupportedModelError, match=MERGE):
        promoe.patch(model, link=FAST)


# -- experts in files -------------------------------------------------------------------------------------------


@pytest.fixture(params=["qwen2_moe", "switch_transformers"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, Any]:
    """A family, the folder of an adapter for its model, and what the model answers with it."""
    model = adapted(loaded(request.param), target_modules=ATTENTION[request.param])
    model.save_pretrained(tmp_path / "adapter")
    return request.param, tmp_path / "adapter", ask(model)


def test_an_adapter_is_loaded_beside_experts_in_files(saved: tuple[str, Path, Any], tmp_path: Path) -> None:
    """It needs no expert's weights; nor does saving it."""
    family, folder, expected = saved
    with opened(family) as model:
        wrapped = PeftModel.from_pretrained(model, folder).eval()
        assert_unharmed(wrapped, expected)
        assert any(map(is_guard, model.parameters()))
        wrapped.save_pretrained(tmp_path / "again")
        weights = "adapter_model.safetensors"
        assert (tmp_path / "again" / weights).read_bytes() == (folder / weights).read_bytes()
        merged = wrapped.merge_and_unload()
        expected = ask(merged)
        promoe.unpatch(merged)
        assert_unharmed(merged, expected)


def test_an_adapter_of_transformers_beside_experts_in_files(saved: tuple[str, Path, Any], tmp_path: Path) -> None:
    """The same without a wrapper."""
    family, folder, expected = saved
    with opened(family) as model:
        plain = ask(model)
        model.load_adapter(folder)
        assert_unharmed(model, expected)
        assert any(map(is_guard, model.parameters()))
        model.save_pretrained(tmp_path / "again")
        assert "model.safetensors" not in {path.name for path in (tmp_path / "again").iterdir()}
        model.disable_adapters()
        assert_unharmed(model, plain)
        model.enable_adapters()
        promoe.unpatch(model)
        assert_unharmed(model, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_adapter_on_experts_in_files_is_noticed(family: str) -> None:
    """As on those in memory."""
    with opened(family) as model:
        wrapped = adapted(model, **ON_EXPERTS[family])
        with pytest.raises(PatchStateError, match=AFTERWARDS):
            ask(wrapped)
