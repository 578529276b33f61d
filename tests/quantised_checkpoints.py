"""Tiny checkpoints in the quantised formats that hubs have: written here, since Transformers writes them on a GPU only."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from packed_weights import Form
from safetensors.torch import load_file, save_file
from tiny_models import MOE_FAMILIES, build
from transformers import PreTrainedModel
from zoo.families import build as build_zoo

FP8_BLOCK = 32
MXFP4_BLOCK = 32
# The weights of linear layers that are quantised: not those of gates.
_LINEAR = re.compile(r"(_proj|_proj_with_mqa|\.experts\.\w+\.\w+|\.w[123])\.weight$")


def write_fp8(folder: Path, family: str = "qwen3_moe", **fields: Any) -> Path:
    """DeepSeek-V3's format: every projection in E4M3, with an fp32 scale for each 32 x 32 block."""
    build(family, dtype=torch.bfloat16, **fields).save_pretrained(folder)
    _rewrite(folder, _to_fp8)
    config = {"quant_method": "fp8", "weight_block_size": [FP8_BLOCK] * 2, "activation_scheme": "dynamic"}
    return _say(folder, config)


def write_mxfp8(folder: Path, family: str = "qwen3_moe", **fields: Any) -> Path:
    """Every projection in E4M3, with an exponent in a byte for each 32 values of a row."""
    build(family, dtype=torch.bfloat16, **fields).save_pretrained(folder)
    _rewrite(folder, _to_mxfp8)
    return _say(folder, {"quant_method": "mxfp8", "weight_block_size": [1, 32], "activation_scheme": "dynamic"})


def write_stacked_fp8(folder: Path, family: str = "qwen3_moe", **fields: Any) -> Path:
    """Experts stacked in one E4M3 tensor, as no loading code of Transformers' reads them."""
    build(family, dtype=torch.bfloat16, **fields).save_pretrained(folder, save_original_format=False)
    _rewrite(folder, lambda name, tensor: {name: tensor.to(torch.float8_e4m3fn) if ".experts." in name else tensor})
    return _say(folder, {"quant_method": "fp8", "weight_block_size": [FP8_BLOCK] * 2, "activation_scheme": "dynamic"})


def write_mxfp4(folder: Path, **fields: Any) -> Path:
    """gpt-oss's format: random four-bit values, two in a byte, and an exponent for every 32 of them."""
    build("gpt_oss", dtype=torch.bfloat16, **fields).save_pretrained(folder)
    _rewrite(folder, _to_mxfp4)
    return _say(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]})


def write_packed(
    folder: Path,
    form: Form,
    family: str = "qwen3_moe",
    others: Mapping[str, Form | None] | None = None,
    **fields: Any,
) -> tuple[Path, Path]:
    """A checkpoint whose linear layers have random weights in a form of `packed_weights`, and one with these in bf16.

    Names are those of the hub's checkpoints, with a tensor for each expert. `others` has the forms (None: 16 bits) of
    layers whose names match an expression.
    """

    def form_of(name: str) -> Form | None:
        matching = [other for pattern, other in (others or {}).items() if re.search(pattern, name)]
        return matching[0] if matching else form

    quantised, plain = folder / "quantised", folder / "plain"
    _bf16_model(family, **fields).save_pretrained(quantised, max_shard_size="200KB")
    shutil.copytree(quantised, plain)
    _rewrite(plain, lambda name, tensor: {name: _in_form(name, tensor, form_of(name))[1]})
    _rewrite(quantised, lambda name, tensor: _in_form(name, tensor, form_of(name))[0])
    names = _reindex(quantised)
    assert {name for name in names if ".experts." in name} - {*_reindex(plain)}, "no expert is quantised"
    return _say(quantised, form.config), plain


def _bf16_model(family: str, **fields: Any) -> PreTrainedModel:
    if family in MOE_FAMILIES:
        return build(family, dtype=torch.bfloat16, **fields)
    return build_zoo(family, dtype=torch.bfloat16)


def _in_form(name: str, tensor: torch.Tensor, form: Form | None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors in this form, and what they stand for, in place of a weight; the tensor itself if it is not quantised."""
    if form is None or not _LINEAR.search(name) or tensor.dim() != 2:
        return {name: tensor}, tensor
    parts = form.make(*tensor.shape, torch.Generator().manual_seed(zlib.crc32(name.encode())))
    module = name.removesuffix("weight")
    return {module + part: found for part, found in parts.items()}, form.read(parts).to(tensor.dtype)


def _to_fp8(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if not name.endswith("_proj.weight"):
        return {name: tensor}
    rows, columns = tensor.shape
    blocks = tensor.float().reshape(rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK)
    scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    scaled = (blocks / scales[:, None, :, None]).reshape(rows, columns)
    return {name: scaled.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


def _to_mxfp8(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if not name.endswith("_proj.weight"):
        return {name: tensor}
    groups = tensor.float().unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(2) / 448).log2().ceil().int()
    scaled = torch.ldexp(groups, -exponents.unsqueeze(2)).flatten(1)
    return {name: scaled.to(torch.float8_e4m3fn), f"{name}_scale_inv": (exponents + 127).to(torch.uint8)}


def _to_mxfp4(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: tensor}
    experts, inputs, outputs = tensor.shape
    generator = torch.Generator().manual_seed(len(name))
    shape = (experts, outputs, inputs // MXFP4_BLOCK)
    # Exponents of 2**-7 to 2**-1 keep products near one.
    return {
        f"{name}_blocks": torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8),
        f"{name}_scales": torch.randint(120, 127, shape, generator=generator, dtype=torch.uint8),
    }


def _rewrite(folder: Path, change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]) -> None:
    for path in folder.glob("*.safetensors"):
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(path).items():
            tensors |= change(name, tensor)
        save_file(tensors, path, metadata={"format": "pt"})


def _reindex(folder: Path) -> list[str]:
    """Write the index of a checkpoint's files anew; return the names of its tensors."""
    names = {name: path.name for path in sorted(folder.glob("*.safetensors")) for name in load_file(path)}
    path = folder / "model.safetensors.index.json"
    if path.exists():
        path.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return list(names)


def _say(folder: Path, quantisation: dict[str, Any]) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": quantisation}))
    return folder
