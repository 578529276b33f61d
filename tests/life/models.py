"""Tiny models whose experts are kept in different forms, served for as long as a context lasts."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from served import LinkOver, close, config, plain_link
from tiny_models import MOE_FAMILIES
from tiny_models import build as build_tiny
from torch import nn
from transformers import PreTrainedModel
from zoo.exactness import assert_equal, cache_bytes, outputs
from zoo.families import build as build_zoo
from zoo.families import inputs

import promoe
from promoe.experts.moe_layers import find_moe_layers

# Stacked; stacked with biases; flat in a submodule; one module per expert.
FAMILIES = ("qwen2_moe", "gpt_oss", "dbrx", "switch_transformers")
# Where what is tested has little to do with the form.
SOME_FAMILIES = ("qwen2_moe", "dbrx")
SLOTS = 3
Answer = list[torch.Tensor]


def build(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A tiny random model of its own, in eval mode, three experts per token."""
    return copy.deepcopy(_built(family, dtype, seed))


@functools.cache
def _built(family: str, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    if family in MOE_FAMILIES:
        return build_tiny(family, dtype=dtype, seed=seed, top_k=3)
    return build_zoo(family, dtype, seed)


def ask(model: nn.Module) -> Answer:
    """All that a model answers to a fixed prompt and to one more token."""
    return outputs(model, prompt(model))  # type: ignore[arg-type]


def prompt(model: Any) -> dict[str, torch.Tensor]:
    """What a model is asked."""
    return inputs(model.config.model_type, model)


def differs(found: Answer, other: Answer) -> bool:
    """Whether any of the answers is another: for tests of what must have an effect."""
    return any(not torch.equal(one, two) for one, two in zip(found, other, strict=True))


def with_families(cases: Iterable[str], with_all: Collection[str] = ()) -> list[Any]:
    """Parameters `(family, case)`: every case with some families, those of `with_all` with every family."""
    return [
        pytest.param(family, case, id=f"{family}-{case}")
        for case in cases
        for family in (FAMILIES if case in with_all else SOME_FAMILIES)
    ]


def patch(model: Any, **arguments: Any) -> Any:
    """Serve a model from three slots, which hold NaN without an expert."""
    defaults: dict[str, Any] = {
        "cache": cache_bytes(find_moe_layers(model), SLOTS),
        "predictor": "gate",
        "link": LinkOver(plain_link),
        "config": config(),
    }
    promoe.patch(model, **(defaults | arguments))
    return model


@contextmanager
def patched(model: Any, **arguments: Any) -> Iterator[Any]:
    """The same until the context ends or the model is unpatched."""
    try:
        yield patch(model, **arguments)
    finally:
        if hasattr(model, "promoe"):
            promoe.unpatch(model)


def open_tiny(family: str, **arguments: Any) -> Any:
    """Open a family's tiny model with its experts left in files."""
    defaults = {"cache": "40%", "link": LinkOver(plain_link), "config": config()}
    return promoe.from_pretrained(checkpoint(family), **(defaults | arguments))


@contextmanager
def opened(family: str, **arguments: Any) -> Iterator[Any]:
    """The same until the context ends or the model is unpatched."""
    model = open_tiny(family, **arguments)
    try:
        yield model
    finally:
        if hasattr(model, "promoe"):
            close(model)


@functools.cache
def checkpoint(family: str) -> Path:
    """Folder of a family's tiny model."""
    folder = Path(_scratch().name) / family
    build(family).save_pretrained(folder)
    return folder


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def loaded(family: str, folder: Path | None = None, **arguments: Any) -> PreTrainedModel:
    """What Transformers loads from a folder, by default the family's checkpoint, out of the mapped files: there, tensors
    are not aligned as ours are."""
    model: PreTrainedModel = type(build(family)).from_pretrained(folder or checkpoint(family), **arguments).eval()
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            tensor.data = tensor.data.clone()
    return model


def assert_unharmed(model: nn.Module, expected: Answer) -> None:
    """It answers as it did, bit for bit."""
    assert_equal(ask(model), expected)


def parts_with_experts(model: nn.Module) -> list[nn.Module]:
    """The model, the stack of its layers, a block, its experts, and, where they have parts, such a part."""
    layer = find_moe_layers(model)[0]
    names = layer.name.split(".")
    inside = layer.paths[0].rpartition(".")[0]
    parts = [model, model.get_submodule(names[0]), layer.block, layer.experts]
    return [*parts, layer.experts.get_submodule(inside)] if inside else parts
