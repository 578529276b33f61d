"""Random weights in the forms that AWQ, GPTQ and compressed-tensors have, and the numbers that they stand for.

Each reader is the format's formula, number by number of each word: nothing of it is shared with the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

Parts = Mapping[str, torch.Tensor]
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# The values of the low three bits of FP4; the fourth is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# What one more in each code of a word is.
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True)
class Form:
    """One form of weights.

    Attributes:
        config: the `quantization_config` of checkpoints with such weights.
        make: returns random tensors of a weight `[out, in]`, by the names they have after the module's.
        read: returns the weight of such tensors, fp32.
    """

    config: dict[str, Any]
    make: Callable[[int, int, torch.Generator], dict[str, torch.Tensor]]
    read: Callable[[Parts], torch.Tensor]


def words(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Random words."""
    return torch.randint(-(2**31), 2**31, shape, generator=generator).int()


def zero_words(shape: tuple[int, ...], bits: int, generator: torch.Generator) -> torch.Tensor:
    """Words of random codes around the middle (any, if they have two bits)."""
    found = words(shape, generator).numpy().view(np.uint32)
    if bits > 2:
        found = (found & np.uint32(3 * ONES[bits])) + np.uint32(ONES[bits] * ((1 << bits - 1) - 2))
    return torch.from_numpy(found.view(np.int32).copy())


def scales(shape: tuple[int, ...], inputs: int, bits: int, generator: torch.Generator) -> torch.Tensor:
    """Random scales with which weights have a size that keeps activations near one."""
    spread = (1 << bits) * 0.29
    return (0.7 + 0.6 * torch.rand(shape, generator=generator)) / (spread * inputs**0.5)


def code(found: torch.Tensor, row: np.ndarray, column: np.ndarray, position: np.ndarray, bits: int) -> torch.Tensor:
    """The codes at some positions of words, int64."""
    unsigned = found.numpy().view(np.uint32).astype(np.int64)
    return torch.from_numpy(unsigned[row, column] >> (bits * position) & ((1 << bits) - 1))


def weight(codes: torch.Tensor, zeros: torch.Tensor, scale: torch.Tensor, group_of_input: Any) -> torch.Tensor:
    """The weight `[out, in]` of codes `[out, in]`, and zeros and scales `[out, groups]`."""
    return (codes - zeros[:, group_of_input]).float() * scale.float()[:, group_of_input]


def make_awq(outputs: int, inputs: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """An AWQ weight."""
    groups = inputs // GROUP
    return {
        "qweight": words((inputs, outputs // 8), generator),
        "qzeros": zero_words((groups, outputs // 8), 4, generator),
        "scales": scales((groups, outputs), inputs, 4, generator).half(),
    }


def read_awq(parts: Parts) -> torch.Tensor:
    """An AWQ weight's numbers."""
    groups, outputs = parts["scales"].shape
    inputs = len(parts["qweight"])
    position = np.array([AWQ_ORDER.index(number) for number in range(8)])
    out, into, group = np.arange(outputs)[:, None], np.arange(inputs)[None], np.arange(groups)[None]
    codes = code(parts["qweight"], into, out // 8, position[out % 8], 4)
    zeros = code(parts["qzeros"], group, out // 8, position[out % 8], 4)
    return weight(codes, zeros, parts["scales"].t(), np.arange(inputs) // (inputs // groups))


def make_gptq(
    outputs: int, inputs: int, generator: torch.Generator, bits: int, group: int = GROUP, ordered: bool = False
) -> dict[str, torch.Tensor]:
    """A GPTQ weight; if `ordered`, its inputs are quantised in a random order."""
    groups = -(-inputs // group)
    g_idx = torch.arange(inputs, dtype=torch.int32) // group
    return {
        "qweight": words((inputs * bits // 32, outputs), generator),
        "qzeros": zero_words((groups, outputs * bits // 32), bits, generator),
        "scales": scales((groups, outputs), inputs, bits, generator).half(),
        "g_idx": g_idx[torch.randperm(inputs, generator=generator)] if ordered else g_idx,
    }


def read_gptq(parts: Parts, bits: int, plus_one: bool) -> torch.Tensor:
    """A GPTQ weight's numbers."""
    groups, outputs = parts["scales"].shape
    per_word = 32 // bits
    out, group = np.arange(outputs)[:, None], np.arange(groups)[None]
    into = np.arange(len(parts["qweight"]) * per_word)[None]
    stored = parts["qzeros"].numpy().view(np.uint32) + np.uint32(ONES[bits] * plus_one)
    codes = code(parts["qweight"], into // per_word, out, into % per_word, bits)
    zeros = code(torch.from_numpy(stored.view(np.int32)), group, out // per_word, out % per_word, bits)
    return weight(codes, zeros, parts["scales"].t(), parts["g_idx"].numpy())


def make_packed(
    outputs: int,
    inputs: int,
    generator: torch.Generator,
    bits: int,
    group: int | None = GROUP,
    zeros: bool = False,
    ordered: bool = False,
) -> dict[str, torch.Tensor]:
    """A weight in the form "pack-quantized" of compressed-tensors; with None, all inputs are one group."""
    groups = 1 if group is None else inputs // group
    parts = {
        "weight_packed": words((outputs, -(-inputs * bits // 32)), generator),
        "weight_scale": scales((outputs, groups), inputs, bits, generator).bfloat16(),
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    if zeros:
        parts["weight_zero_point"] = zero_words((-(-outputs * bits // 32), groups), bits, generator)
    if ordered:
        order = torch.randperm(inputs, generator=generator)
        parts["weight_g_idx"] = (torch.arange(inputs, dtype=torch.int32) // (inputs // groups))[order]
    return parts


def read_packed(parts: Parts, bits: int) -> torch.Tensor:
    """The numbers of a weight in the form "pack-quantized"."""
    outputs, inputs = parts["weight_shape"].tolist()
    scale, per_word = parts["weight_scale"], 32 // bits
    groups = scale.shape[1]
    out, into, group = np.arange(outputs)[:, None], np.arange(inputs)[None], np.arange(groups)[None]
    codes = code(parts["weight_packed"], out, into // per_word, into % per_word, bits)
    zeros = torch.full((outputs, groups), 1 << bits - 1)
    if "weight_zero_point" in parts:
        zeros = code(parts["weight_zero_point"], out // per_word, group, out % per_word, bits)
    order = parts["weight_g_idx"].numpy() if "weight_g_idx" in parts else np.arange(inputs) // (inputs // groups)
    return weight(codes, zeros, scale, order)


def make_int8(
    outputs: int, inputs: int, generator: torch.Generator, groups: int = 1, zeros: bool = False
) -> dict[str, torch.Tensor]:
    """A weight in the form "int-quantized" of compressed-tensors, whose activations would be quantised, too."""
    parts = {
        "weight": torch.randint(-128, 128, (outputs, inputs), generator=generator).to(torch.int8),
        "weight_scale": scales((outputs, groups), inputs, 8, generator).bfloat16(),
        "input_scale": torch.ones(1),
    }
    if zeros:
        parts["weight_zero_point"] = torch.randint(-9, 9, (outputs, groups), generator=generator).to(torch.int8)
    return parts


def read_int8(parts: Parts) -> torch.Tensor:
    """The numbers of a weight in the form "int-quantized"."""
    codes, scale = parts["weight"].long(), parts["weight_scale"]
    zeros = parts.get("weight_zero_point", torch.zeros(scale.shape))
    return weight(codes, zeros, scale, np.arange(codes.shape[1]) // (codes.shape[1] // scale.shape[1]))


def make_fp8(
    outputs: int, inputs: int, generator: torch.Generator, block: tuple[int, int] | None = None
) -> dict[str, torch.Tensor]:
    """A weight in the form "float-quantized" of compressed-tensors: a scale for each block, or with None, for all."""
    values = torch.randn((outputs, inputs), generator=generator) * 100
    counts = (1,) if block is None else (outputs // block[0], inputs // (block[1] or inputs))
    scale = scales(counts, inputs, 8, generator)
    return {"weight": values.to(torch.float8_e4m3fn), "weight_scale": scale.bfloat16()}


def make_mx(outputs: int, inputs: int, generator: torch.Generator, fp4: bool) -> dict[str, torch.Tensor]:
    """A weight in one of the MX forms of compressed-tensors: an exponent for each 32 values of 4 or 8 bits."""
    around = 127 - round(math.log2((3 if fp4 else 100) * inputs**0.5))
    exponents = torch.randint(around - 1, around + 2, (outputs, inputs // 32), dtype=torch.uint8, generator=generator)
    if not fp4:
        return {"weight": make_fp8(outputs, inputs, generator)["weight"], "weight_scale": exponents}
    pairs = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, generator=generator)
    return {"weight_packed": pairs, "weight_scale": exponents}


def read_mx(parts: Parts) -> torch.Tensor:
    """The numbers of a weight in one of the MX forms."""
    exponents = parts["weight_scale"].int() - 127
    if "weight" in parts:
        return torch.ldexp(parts["weight"].float(), exponents.repeat_interleave(32, 1))
    pairs = parts["weight_packed"].int()
    values = [torch.tensor(E2M1)[pairs >> shift & 7] * (1 - 2 * (pairs >> shift + 3 & 1)) for shift in (0, 4)]
    return torch.ldexp(torch.stack(values, 2).flatten(1), exponents.repeat_interleave(32, 1))


def read_fp8(parts: Parts) -> torch.Tensor:
    """The numbers of a weight in the form "float-quantized"."""
    values, scale = parts["weight"].float(), parts["weight_scale"].float()
    if scale.numel() == 1:
        return values * scale
    times = [size // count for size, count in zip(values.shape, scale.shape, strict=True)]
    return values * scale.repeat_interleave(times[0], 0).repeat_interleave(times[1], 1)


def compressed(
    layout: str, bits: int, group: int | None, zeros: bool = False, kind: str = "int", **fields: Any
) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors with one scheme for all linear layers; `fields` of its weights."""
    weights = {
        "num_bits": bits,
        "type": kind,
        "symmetric": not zeros,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "dynamic": False,
        **fields,
    }
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }


def gptq(bits: int, layout: str = "gptq", **fields: Any) -> dict[str, Any]:
    """The `quantization_config` of GPTQ."""
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": False, "sym": False}
    return {**config, "checkpoint_format": layout, **fields}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
FORMS: dict[str, Form] = {
    "AWQ gemm": Form(AWQ, make_awq, read_awq),
    "GPTQ 4 bits": Form(gptq(4), partial(make_gptq, bits=4), partial(read_gptq, bits=4, plus_one=True)),
    "GPTQ 8 bits": Form(gptq(8), partial(make_gptq, bits=8), partial(read_gptq, bits=8, plus_one=True)),
    "GPTQ 2 bits": Form(gptq(2), partial(make_gptq, bits=2), partial(read_gptq, bits=2, plus_one=True)),
    "GPTQ 4 bits, v2, desc_act": Form(
        gptq(4, "gptq_v2", desc_act=True),
        partial(make_gptq, bits=4, ordered=True),
        partial(read_gptq, bits=4, plus_one=False),
    ),
    "AutoRound auto_gptq": Form(
        {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "packing_format": "auto_round:auto_gptq"},
        partial(make_gptq, bits=4),
        partial(read_gptq, bits=4, plus_one=True),
    ),
    "AutoRound auto_awq": Form(
        {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "packing_format": "auto_round:auto_awq"},
        make_awq,
        read_awq,
    ),
    "W4A16 in groups": Form(
        compressed("pack-quantized", 4, GROUP), partial(make_packed, bits=4), partial(read_packed, bits=4)
    ),
    "W4A16 in groups with zeros": Form(
        compressed("pack-quantized", 4, GROUP, zeros=True),
        partial(make_packed, bits=4, zeros=True),
        partial(read_packed, bits=4),
    ),
    "W4A16 by channel": Form(
        compressed("pack-quantized", 4, None), partial(make_packed, bits=4, group=None), partial(read_packed, bits=4)
    ),
    "W4A16 with actorder": Form(
        compressed("pack-quantized", 4, GROUP, zeros=True, actorder="group"),
        partial(make_packed, bits=4, zeros=True, ordered=True),
        partial(read_packed, bits=4),
    ),
    "W8A16 by channel": Form(
        compressed("pack-quantized", 8, None), partial(make_packed, bits=8, group=None), partial(read_packed, bits=8)
    ),
    "W8A8 by channel": Form(compressed("int-quantized", 8, None), make_int8, read_int8),
    "W8A8 by channel with zeros": Form(
        compressed("int-quantized", 8, None, zeros=True), partial(make_int8, zeros=True), read_int8
    ),
    "FP8 by channel": Form(
        compressed("float-quantized", 8, None, kind="float"), partial(make_fp8, block=(1, 0)), read_fp8
    ),
    "FP8 in blocks": Form(
        compressed("float-quantized", 8, None, kind="float", strategy="block", block_structure=[16, 32]),
        partial(make_fp8, block=(16, 32)),
        read_fp8,
    ),
    "FP8 with one scale": Form(
        compressed("float-quantized", 8, None, kind="float", strategy="tensor"), make_fp8, read_fp8
    ),
    "MXFP4": Form(
        compressed("mxfp4-pack-quantized", 4, 32, kind="float", scale_dtype="torch.uint8"),
        partial(make_mx, fp4=True),
        read_mx,
    ),
    "MXFP8": Form(
        compressed("mxfp8-quantized", 8, 32, kind="float", scale_dtype="torch.uint8"),
        partial(make_mx, fp4=False),
        read_mx,
    ),
}
