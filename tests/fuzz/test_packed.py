"""Checkpoints in AWQ, GPTQ and compressed-tensors: what config.json says, and tensors of any shapes, dtypes and values."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_weights import FORMS

from promoe.model.opening_checks import take_quantization
from promoe.stores.encodings.base import EncodedTensor
from promoe.stores.encodings.schemes import SCHEMES, find_weights
from promoe.stores.safetensors_header import TORCH_DTYPES, TensorRange

from .inputs import fuzzed, outcome
from .mutations import mutated

# A weight that is larger would take long to decode, and so many bytes are never in a small file.
MOST_BYTES = 2**20
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
NUMBERS = st.integers(-3, 70) | st.sampled_from((0, 1, 2, 3, 8, 16, 24, 32, 48, 64, 96, 128, 2**31, 2**40, 2**62))
TEXTS = st.sampled_from(
    (
        *NAMES.values(),
        *("F4", "gemv", "marlin", "gptq_v2", "re:.*", "re:(", "re:" + "(" * 2000, "Linear", "nvfp4-pack-quantized"),
        *("float", "int", "group", "channel", "dense", "mixed-precision", "pack-quantized"),
    )
)
VALUES = NUMBERS | TEXTS | st.none() | st.booleans() | st.floats() | st.lists(NUMBERS, max_size=4)


def tree_of(name: str) -> dict[str, Any]:
    """A checkpoint with one weight in a form: its configuration and its tensors' headers."""
    form = FORMS[name]
    parts = form.make(32, 64, torch.Generator().manual_seed(0))
    headers = {part: [list(tensor.shape), NAMES[tensor.dtype]] for part, tensor in parts.items()}
    return {"config": form.config, "headers": headers}


def ranges(headers: Any) -> dict[str, TensorRange]:
    """The tensors whose headers a safetensors file could have."""
    found = {}
    for name, header in headers.items() if isinstance(headers, dict) else ():
        match header:
            case [[*shape], str(dtype)] if all(type(size) is int and size >= 0 for size in shape):
                nbytes = math.prod(shape) * (TORCH_DTYPES[dtype].itemsize if dtype in TORCH_DTYPES else 1)
                found[f"a.{name}"] = TensorRange(f"a.{name}", 0, 0, nbytes, tuple(shape), dtype)
    return found


def decoded(tensors: dict[str, TensorRange], config: Any, seed: int) -> list[torch.Tensor]:
    """All weights of a checkpoint whose tensors have random bytes."""
    taken = take_quantization("folder", SimpleNamespace(quantization_config=config))
    if taken is None:
        return []
    method = SCHEMES[taken["quant_method"]]
    method.bits(taken, ["layer"])
    method.integers(taken, ["layer"])
    generator = torch.Generator().manual_seed(seed)
    weights = []
    for weight in find_weights(tensors, taken).values():
        if isinstance(weight, EncodedTensor) and weight.nbytes <= MOST_BYTES:
            parts = [part_of(part, generator) for part in weight.parts]
            out = torch.empty(weight.shape, dtype=torch.bfloat16)
            weight.encoding.decode(parts, out)
            if weight.encoding.integers is not None:
                weight.encoding.unpack(parts)
            weights.append(out)
    return weights


def part_of(where: TensorRange, generator: torch.Generator) -> torch.Tensor:
    assert where.dtype is not None, where
    if where.name.endswith("g_idx") and int(torch.randint(3, (1,), generator=generator)):
        return torch.arange(math.prod(where.shape), dtype=where.dtype).view(where.shape) // 32
    values = torch.randint(0, 256, (where.nbytes,), dtype=torch.uint8, generator=generator)
    return values.view(where.dtype).view(where.shape)


@fuzzed(150)
@given(data=st.data())
def test_configurations_and_headers(data: st.DataObject) -> None:
    tree = data.draw(mutated(tree_of(data.draw(st.sampled_from(list(FORMS)))), VALUES))
    if isinstance(tree, dict) and isinstance(config := tree.get("config"), dict):
        tensors, seed = ranges(tree.get("headers")), data.draw(st.integers(0, 99))
        outcome("checkpoint: packed weights", lambda: decoded(tensors, config, seed))


@fuzzed(150)
@given(data=st.data())
def test_headers(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(FORMS)))
    tree = tree_of(name)
    headers = data.draw(mutated(tree["headers"], VALUES, most=2))
    outcome("checkpoint: packed headers", lambda: decoded(ranges(headers), tree["config"], 0))
