"""Experts that are computed on arrival: each tensor equals the one that Transformers' own loading gives."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_checkpoints import write_fp8, write_mxfp4
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Concatenate, Interleave, MergeModulelist, Transpose
from zoo.families import build as build_family
from zoo.families import names

from promoe.errors import CheckpointError
from promoe.model.opening import OpenedModel, open_without_experts
from promoe.scheduler import ExpertKey
from promoe.stores.checkpoint_names import BankSpec
from promoe.stores.expert_conversion import ConversionSource, ExpertConversion
from stores.checkpoints import expert_tensors, rewrite, shards

BANK = BankSpec("w", ("experts.w",), 4, (6, 8), torch.float32, (4, 6, 8))


def assert_all_experts_equal(opened: OpenedModel, stock: torch.nn.Module) -> int:
    """Check that every tensor of every expert, read from the files, equals the stock model's. Returns their number."""
    compared = 0
    for layer in opened.layers:
        experts: Any = stock.get_submodule(layer.name)
        for expert_idx in range(layer.num_experts):
            for name, tensor in expert_tensors(opened.store, ExpertKey(layer.layer_idx, expert_idx)).items():
                assert torch.equal(tensor, getattr(experts, name)[expert_idx]), (layer.name, expert_idx, name)
                compared += 1
    return compared


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "olmoe"])
def test_fp8_experts_are_dequantised_as_from_pretrained_does(family: str, tmp_path: Path) -> None:
    """Per expert and projection, with the scales of its blocks; half of the bytes are read."""
    write_fp8(tmp_path, family)
    stock, opened = AutoModelForCausalLM.from_pretrained(tmp_path), open_without_experts(tmp_path)
    assert assert_all_experts_equal(opened, stock) > 0
    chunks = opened.store.chunks(ExpertKey(0, 0))
    assert {chunk.dtype for chunk in chunks} == {torch.bfloat16}
    assert sum(chunk.source_nbytes for chunk in chunks) < 0.6 * sum(chunk.nbytes for chunk in chunks)
    opened.store.close()


def test_mxfp4_experts_are_dequantised_as_from_pretrained_does(tmp_path: Path) -> None:
    """All experts of a layer in one tensor of four-bit values, and one of exponents; a third of the bytes are read."""
    write_mxfp4(tmp_path)
    stock, opened = AutoModelForCausalLM.from_pretrained(tmp_path), open_without_experts(tmp_path)
    assert assert_all_experts_equal(opened, stock) > 0
    chunks = opened.store.chunks(ExpertKey(0, 3))
    assert sum(chunk.source_nbytes for chunk in chunks) < 0.34 * sum(chunk.nbytes for chunk in chunks)
    opened.store.close()


def leave_unquantised(folder: Path, part: str) -> None:
    """Write the tensors with `part` in their name in bf16, without scales."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if part in name and name.endswith("_scale_inv")]:
            weight = name.removesuffix("_scale_inv")
            tensors[weight] = torch.rand(tensors[weight].shape).bfloat16()
            del tensors[name]

    (shard,) = shards(folder)
    rewrite(shard, change)


def test_a_layer_that_was_left_unquantised_is_read_as_it_is(tmp_path: Path) -> None:
    leave_unquantised(write_fp8(tmp_path), "layers.1.mlp.experts.")
    stock, opened = AutoModelForCausalLM.from_pretrained(tmp_path), open_without_experts(tmp_path)
    assert assert_all_experts_equal(opened, stock) > 0
    opened.store.close()


def test_scales_of_some_experts_only_are_an_error(tmp_path: Path) -> None:
    leave_unquantised(write_fp8(tmp_path), "layers.1.mlp.experts.3.")
    with pytest.raises(CheckpointError, match=r"not all in the same form: .*3.*weight' is BF16.*weight' is fp8"):
        open_without_experts(tmp_path)


@pytest.mark.parametrize("name", [name for name in ("inkling2", "ernie4_5_vl_moe whole") if name in names()])
def test_other_arrangements(name: str, tmp_path: Path) -> None:
    """Interleaved rows; experts for text and for images in one list."""
    model = build_family(name)
    model.save_pretrained(tmp_path)
    opened = open_without_experts(tmp_path, auto_class=type(model))
    assert assert_all_experts_equal(opened, model) > 0
    opened.store.close()


def conversion(*operations: Any, stacked: bool = True, patterns: tuple[str, ...] = ("w",)) -> ExpertConversion:
    return ExpertConversion(BANK, [ConversionSource(pattern, stacked) for pattern in patterns], operations)


def converted(convert: ExpertConversion, *tensors: torch.Tensor) -> torch.Tensor:
    out = torch.empty(math.prod(BANK.row_shape))
    convert(tensors, out)
    return out.view(BANK.row_shape)


def test_one_expert_comes_out_as_it_would_with_all_of_them() -> None:
    """Against the operations on the whole stack."""
    stack = torch.arange(4 * 8 * 6.0).view(4, 8, 6)
    operations = [Transpose(1, 2), Interleave(dim=1)]
    values: Any = {"w": stack}
    for operation in operations:
        values = operation.convert(values, source_patterns=["w"], target_patterns=["w"])
    convert = conversion(*operations)
    for expert_idx in range(4):
        assert torch.equal(converted(convert, stack[expert_idx]), values["w"][expert_idx])


def test_lists_of_experts_are_put_side_by_side() -> None:
    gate, up = torch.rand(3, 8), torch.rand(3, 8)
    convert = conversion(MergeModulelist(0), Concatenate(1), stacked=False, patterns=("a.*", "b.*"))
    assert torch.equal(converted(convert, gate, up), torch.cat([gate, up]))


@pytest.mark.parametrize("operation", [Concatenate(0), Transpose(0, 1), Interleave(0), MergeModulelist(1), "Unknown"])
def test_operations_across_experts_are_refused(operation: Any) -> None:
    with pytest.raises(CheckpointError, match=r"does not treat one expert at a time.*save_original_format=False"):
        conversion(operation)


def test_a_result_of_another_shape_is_an_error_before_anything_is_read() -> None:
    with pytest.raises(CheckpointError, match=r"\[5, 8\] torch.float32\) do not become \[6, 8\]"):
        conversion(Interleave(dim=1)).check([((5, 8), torch.float32)])
