from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
)

from promoe.errors import CheckpointError
from promoe.stores.checkpoint_names import BankSpec
from promoe.stores.checkpoint_plan import CheckpointPlan, plan_experts
from promoe.stores.safetensors_header import TensorRange

EXPERTS = "model.layers.0.mlp.experts"
BANK = BankSpec("gate_up_proj", (f"{EXPERTS}.gate_up_proj",), 4, (32, 16), torch.bfloat16, (4, 32, 16))


def in_files(shapes: dict[str, tuple[int, ...]], dtype_name: str = "BF16") -> dict[str, TensorRange]:
    """Return tensors that lie one after the other in file 3."""
    ranges, offset_bytes = {}, 128
    for name, shape in shapes.items():
        nbytes = 2 * torch.Size(shape).numel()
        ranges[name] = TensorRange(name, 3, offset_bytes, nbytes, shape, dtype_name)
        offset_bytes += nbytes
    return ranges


def plan(tensors: dict[str, TensorRange], conversions: list[Any]) -> CheckpointPlan:
    return plan_experts([[BANK]], tensors, conversions, [BANK.full_name, "lm_head.weight"], "model", 4096)


def converter(sources: list[str], operations: list[ConversionOps]) -> WeightConverter:
    return WeightConverter(sources, "experts.gate_up_proj", operations)


def test_stacked_parts_that_are_concatenated() -> None:
    """As in step3p7: all experts' gates, then all experts' ups."""
    tensors = in_files({f"{EXPERTS}.gate": (4, 12, 16), f"{EXPERTS}.up": (4, 20, 16), "lm_head.weight": (9, 2)})
    found = plan(tensors, [converter(["experts.gate", "experts.up"], [Concatenate(dim=1)])])
    assert found.expert_tensors == {f"{EXPERTS}.gate", f"{EXPERTS}.up"}
    gate, up = found.layers[0].chunks(2)
    assert (gate.slot_offset_bytes, gate.nbytes, gate.source_offset_bytes) == (0, 384, 128 + 2 * 384)
    assert (up.slot_offset_bytes, up.nbytes, up.source_offset_bytes) == (384, 640, 128 + 4 * 384 + 2 * 640)
    assert gate.source_idx == up.source_idx == 3


def test_experts_are_in_order_of_their_numbers() -> None:
    bank = BankSpec("w", (f"{EXPERTS}.w",), 12, (4, 4), torch.bfloat16, (12, 4, 4))
    tensors = in_files({f"{EXPERTS}.{expert_idx}.v": (4, 4) for expert_idx in sorted(range(12), key=str)})
    conversions = [WeightConverter("experts.*.v", "experts.w", [MergeModulelist(dim=0)])]
    found = plan_experts([[bank]], tensors, conversions, [bank.full_name], "model", 4096)
    for expert_idx in range(12):
        (chunk,) = found.layers[0].chunks(expert_idx)
        assert chunk.source_offset_bytes == tensors[f"{EXPERTS}.{expert_idx}.v"].offset_bytes


def test_a_transposition_that_would_not_happen_is_none() -> None:
    tensors = in_files({f"{EXPERTS}.packed": (4, 32, 16)})
    found = plan(tensors, [converter(["experts.packed"], [Transpose(1, 2, check_dims=True)])])
    assert [chunk.source_offset_bytes for chunk in found.layers[0].chunks(1)] == [128 + 1024]


@pytest.mark.parametrize(
    ("shapes", "operations", "named"),
    [
        ({"packed": (4, 32, 16)}, [Transpose(0, 1)], "Transpose"),
        ({f"{e}.packed": (32, 16) for e in range(4)}, [MergeModulelist(dim=1)], r"MergeModulelist\(dim=1\)"),
        ({f"{e}.packed": (16, 32) for e in range(4)}, [MergeModulelist(dim=0), Transpose(0, 2)], "Transpose"),
    ],
)
def test_operations_across_experts_are_named(
    shapes: dict[str, tuple[int, ...]], operations: list[ConversionOps], named: str
) -> None:
    tensors = in_files({f"{EXPERTS}.{name}": shape for name, shape in shapes.items()})
    source = "experts.*.packed" if "packed" not in shapes else "experts.packed"
    with pytest.raises(CheckpointError, match=rf"gate_up_proj.* computed .*by {named}.*save_original_format=False"):
        plan(tensors, [converter([source], operations)])


@pytest.mark.parametrize(
    ("shapes", "operations"),
    [
        ({"packed": (4, 16, 32)}, [Transpose(1, 2)]),
        ({"packed": (4, 16, 32)}, [Transpose(1, 2, check_dims=True)]),
        ({"packed": (4, 32, 16)}, [Interleave(dim=1)]),
        ({f"{e}.packed": (16, 32) for e in range(4)}, [MergeModulelist(dim=0), Transpose(1, 2)]),
    ],
)
def test_operations_within_an_expert_are_left_to_the_arrival(
    shapes: dict[str, tuple[int, ...]], operations: list[ConversionOps]
) -> None:
    """One chunk per tensor, from the bytes of that expert alone."""
    tensors = in_files({f"{EXPERTS}.{name}": shape for name, shape in shapes.items()})
    source = "experts.*.packed" if "packed" not in shapes else "experts.packed"
    (layer,) = plan(tensors, [converter([source], operations)]).layers
    row_bytes = 2 * 32 * 16
    for expert_idx in range(4):
        (chunk,) = layer.chunks(expert_idx)
        assert (chunk.nbytes, chunk.source_nbytes, chunk.dtype) == (row_bytes, row_bytes, torch.bfloat16)
        (part,) = chunk.parts
        stack = tensors.get(f"{EXPERTS}.packed")
        start = (
            stack.offset_bytes + expert_idx * row_bytes
            if stack
            else tensors[f"{EXPERTS}.{expert_idx}.packed"].offset_bytes
        )
        assert part.source_offset_bytes == chunk.source_offset_bytes == start
        assert chunk.compute is not None


@pytest.mark.parametrize(
    ("dim", "named"), [(0, r"by Concatenate\(dim=0\)"), (2, r"do not become \[32, 16\].*\[1, 16, 32\]")]
)
def test_concatenation_along_another_dimension_is_an_error(dim: int, named: str) -> None:
    tensors = in_files({f"{EXPERTS}.{e}.{part}": (16, 16) for e in range(4) for part in ("gate", "up")})
    operations = [MergeModulelist(dim=0), Concatenate(dim=dim)]
    with pytest.raises(CheckpointError, match=named):
        plan(tensors, [converter(["experts.*.gate", "experts.*.up"], operations)])


@pytest.mark.parametrize("dtype_name", ["F8_E4M3", "U8", "I32", "F4"])
def test_quantised_formats_are_named(dtype_name: str) -> None:
    tensors = in_files({BANK.full_name: (4, 32, 16)}, dtype_name)
    with pytest.raises(CheckpointError, match=f"{EXPERTS}.gate_up_proj' has dtype {dtype_name}.*unquantised"):
        plan(tensors, [])


def test_renamed_stacked_experts() -> None:
    tensors = in_files({"transformer.blocks.0.mlp.experts.gate_up_proj": (4, 32, 16)})
    found = plan(tensors, [WeightRenaming(r"^transformer\.blocks\.", "model.layers.")])
    assert [chunk.source_offset_bytes for chunk in found.layers[0].chunks(3)] == [128 + 3 * 1024]


def test_parts_that_do_not_add_up() -> None:
    tensors = in_files({f"{EXPERTS}.{e}.{part}": (12, 16) for e in range(4) for part in ("gate", "up")})
    operations: list[ConversionOps] = [MergeModulelist(dim=0), Concatenate(dim=1)]
    with pytest.raises(CheckpointError, match=r"'.*0.gate' has shape \[12, 16\], but \[16, 16\] was expected"):
        plan(tensors, [converter(["experts.*.gate", "experts.*.up"], operations)])


@pytest.mark.parametrize("dtype_name", ["F8_E4M3", "I8", "U8", "I32", "F4"])
def test_codes_are_not_taken_for_weights_where_experts_are_computed(dtype_name: str) -> None:
    """As in Inkling: rows are interleaved. In 16 bits the same tensors are read."""
    operations = [Interleave(dim=1)]
    tensors = in_files({f"{EXPERTS}.w13_weight": (4, 32, 16), f"{EXPERTS}.w13_weight_scale": (4, 1, 1)})
    assert plan(tensors, [converter(["experts.w13_weight$"], operations)]).layers
    tensors = in_files({f"{EXPERTS}.w13_weight": (4, 32, 16), f"{EXPERTS}.w13_weight_scale": (4, 1, 1)}, dtype_name)
    with pytest.raises(
        CheckpointError, match=rf"'{EXPERTS}.w13_weight' has dtype {dtype_name}.*w13_weight_scale \[4, 1, 1\]"
    ):
        plan(tensors, [converter(["experts.w13_weight$"], operations)])


def test_other_tensors_that_are_no_floats_are_known_by_their_parameter() -> None:
    tensors = in_files({f"{EXPERTS}.gate_up_proj": (4, 32, 16)}) | in_files(
        {"lm_head.weight": (9, 2), "x": (2,)}, "F8_E4M3"
    )
    assert plan(tensors, []).not_floats == {"lm_head.weight": tensors["lm_head.weight"]}
