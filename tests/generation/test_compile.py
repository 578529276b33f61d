"""torch.compile works around promoe, also of a model that was compiled before; what cannot work says so."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from served import TOP_K, close, config, slots_of
from tiny_models import build, token_ids
from torch import nn
from transformers import CompileConfig, PreTrainedModel

import promoe
from generation.compared import FAMILY, assert_served, patched, seeded
from promoe.errors import UnsupportedModelError

IDS = token_ids(2, 6)
# Compiles, but leaves every operation to torch's own kernels; inductor's fused ones have other bits, patched or not.
compiled = functools.partial(torch.compile, backend="eager")


@pytest.fixture(autouse=True)
def _no_compiled_code_left() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def model() -> PreTrainedModel:
    """One layer: its eight experts do not fit into four slots."""
    return build(FAMILY, layers=1, top_k=TOP_K)


@torch.no_grad()
def logits(model: Callable[..., Any]) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


class OneBlock(nn.Module):
    """The MoE block of a model and nothing else: a whole one takes the compiler many times as long."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.block = model.model.layers[0].mlp

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.block(hidden) + hidden
        return result


def test_what_was_compiled_may_be_patched_and_unpatched(model: PreTrainedModel) -> None:
    """The code that was compiled before is not what runs afterwards."""
    one = OneBlock(model).eval()
    assert_works_before_and_after(one, lambda run: run(torch.randn(2, 6, 64)))


@pytest.mark.slow
def test_a_compiled_model_may_be_patched_and_unpatched(model: PreTrainedModel) -> None:
    assert_works_before_and_after(model, logits)


def assert_works_before_and_after(model: Any, call: Callable[[Any], torch.Tensor]) -> None:
    with torch.no_grad():
        wanted = seeded(call, model)
        by_compiler = compiled(model)
        assert torch.equal(seeded(call, by_compiler), wanted)
        with patched(model, cache=4):
            for _ in range(2):
                assert torch.equal(seeded(call, by_compiler), wanted)
            assert_served(model.promoe.stats())
            assert model.promoe.stats().prefill.passes == 2
        assert torch.equal(seeded(call, by_compiler), wanted)


@pytest.mark.parametrize("store", ["host", "file"])
def test_layers_compiled_one_by_one(store: str, model: PreTrainedModel, tmp_path: Path) -> None:
    """Experts that lie in files are not looked at by the compiler either."""
    wanted = logits(model)
    if store == "host":
        with patched(model, cache=4):
            assert_works_layer_by_layer(model, wanted)
        return
    model.save_pretrained(tmp_path)
    opened = promoe.from_pretrained(tmp_path, cache=slots_of(model, 4), config=config())
    try:
        assert_works_layer_by_layer(opened, wanted)
    finally:
        close(opened)


def assert_works_layer_by_layer(model: PreTrainedModel, wanted: torch.Tensor) -> None:
    for layer in model.model.layers:
        layer.compile(backend="eager")
    for _ in range(2):
        assert torch.equal(logits(model), wanted)
    assert_served(model.promoe.stats())


@pytest.mark.slow
def test_generate_with_a_compiled_forward_and_a_static_cache(model: PreTrainedModel) -> None:
    def generate(model: PreTrainedModel) -> torch.Tensor:
        asked = CompileConfig(backend="eager", mode=None, fullgraph=False)
        asked._compile_all_devices = True
        kwargs = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": "static"}
        tokens: torch.Tensor = model.generate(IDS, **kwargs, compile_config=asked)
        return tokens

    wanted = seeded(generate, model)
    with patched(model, cache=4):
        assert torch.equal(seeded(generate, model), wanted)
        assert model.promoe.stats().decode.passes == 2


def test_a_full_graph_is_refused_and_the_model_goes_on_without(model: PreTrainedModel) -> None:
    wanted = logits(model)
    with patched(model, cache=4):
        with pytest.raises(Exception, match=r"promoe serves this model's experts.* compile it without fullgraph=True"):
            logits(compiled(model, fullgraph=True))
        assert torch.equal(logits(model), wanted)
        assert_served(model.promoe.stats())


def trace(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    torch.jit.trace(module, inputs, check_trace=False)


def export(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    torch.export.export(module, inputs, strict=False)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("part", ["", "model", "model.layers.0.mlp", "model.layers.0.mlp.experts"])
@pytest.mark.parametrize("record", [trace, export])
def test_recording_a_forward_is_refused(
    record: Callable[..., None], part: str, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record would hold on to slots, whose experts change."""
    wanted, hidden = logits(model), torch.randn(1, 3, 64)
    inputs: tuple[torch.Tensor, ...] = (IDS,) if part in ("", "model") else (hidden,)
    if part.endswith("experts"):
        inputs = (hidden[0], torch.tensor([[0, 1, 2]] * 3), torch.ones(3, 3))
    with patched(model, cache=4), torch.no_grad():
        with pytest.raises(UnsupportedModelError, match=r"cannot be traced or exported.*Unpatch it first"):
            record(model.get_submodule(part), inputs)
        assert torch.equal(logits(model), wanted)
