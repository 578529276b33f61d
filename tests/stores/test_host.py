from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import build

from promoe.errors import ConfigError, UnsupportedModelError
from promoe.experts.moe_layers import find_moe_layers
from promoe.scheduler import ExpertKey
from promoe.stores import HostStore, Store
from stores.checkpoints import expert_tensors


def bank(num_experts: int = 4, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {
        "gate_up_proj": torch.randn(num_experts, 96, 64).to(dtype),
        "bias": torch.randn(num_experts, 5).to(dtype),
        "down_proj": torch.randn(num_experts, 64, 48).to(dtype),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("chunk_bytes", [4096, 8192, 4 << 20])
def test_every_expert_reads_back_equal(dtype: torch.dtype, chunk_bytes: int) -> None:
    banks = [bank(4, dtype), {"w": torch.randn(3, 7, 7).to(dtype)}]
    store = HostStore(banks, chunk_bytes)
    assert isinstance(store, Store)
    assert list(store.num_experts) == [4, 3]
    assert store.expert_bytes == sum(tensor.nbytes for one in banks for tensor in one.values())
    for layer_idx, tensors in enumerate(banks):
        for expert_idx in range(store.num_experts[layer_idx]):
            key = ExpertKey(layer_idx, expert_idx)
            assert tuple(chunk.nbytes for chunk in store.chunks(key)) == store.chunk_bytes(layer_idx)
            assert max(store.chunk_bytes(layer_idx)) <= chunk_bytes
            read = expert_tensors(store, key)
            assert read.keys() == tensors.keys()
            assert all(torch.equal(read[name], tensors[name][expert_idx]) for name in read)


def test_a_models_parameters_are_served_without_a_copy() -> None:
    model = build("gpt_oss", dtype=torch.bfloat16)
    banks = [{n: getattr(layer.experts, n) for n in layer.paths} for layer in find_moe_layers(model)]
    store = HostStore(banks)
    parameter = banks[1]["down_proj"]
    chunk = store.chunks(ExpertKey(1, 5))[2]
    view = torch.frombuffer(bytearray(store.view(chunk)), dtype=torch.bfloat16)
    assert torch.equal(view, parameter[5].flatten())
    assert store.view(chunk).readonly
    assert store.files == ()
    assert any(tensor is parameter for tensor in store.tensors)
    with torch.no_grad():
        parameter[5].fill_(3.0)  # seen through the store: no second copy
    assert (expert_tensors(store, ExpertKey(1, 5))["down_proj"] == 3.0).all()


def test_rows_may_lie_apart() -> None:
    whole = torch.randn(4, 10, 8)
    store = HostStore([{"w": whole[:, 2:6]}])  # contiguous rows, gaps between them, an offset before them
    for expert_idx in range(4):
        assert torch.equal(expert_tensors(store, ExpertKey(0, expert_idx))["w"], whole[expert_idx, 2:6])


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (torch.randn(4, 8, 8).transpose(1, 2), r"not contiguous.*\(64, 1, 8\)"),
        (torch.randn(1, 8, 8).expand(4, 8, 8), r"not contiguous.*\(0, 8, 1\)"),
        (torch.empty(4, 8, 8, device="meta"), "is on meta"),
        (torch.randn(4, 8, 8).to_sparse(), "sparse"),
        (torch.randn(3, 8, 8), "3 rows.*4 experts"),
    ],
)
def test_other_tensors_are_refused(tensor: torch.Tensor, what: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"tensor w of MoE layer 1.*{what}"):
        HostStore([bank(), {"first": torch.randn(4, 2, 2), "w": tensor}])


def test_subclasses_are_refused() -> None:
    class Quantised(torch.Tensor):
        pass

    tensor: Any = torch.randn(4, 8, 8).as_subclass(Quantised)
    with pytest.raises(UnsupportedModelError, match="w of MoE layer 0 is a Quantised"):
        HostStore([{"w": tensor}])


def test_chunk_bytes_is_checked() -> None:
    with pytest.raises(ConfigError, match="chunk_bytes"):
        HostStore([bank()], chunk_bytes=1000)


def test_reading_after_close_is_an_error() -> None:
    store = HostStore([bank()])
    chunk = store.chunks(ExpertKey(0, 1))[0]
    store.close()
    store.close()
    with pytest.raises(OSError, match="gate_up_proj of MoE layer 0 in RAM, offset 24576: the store was closed"):
        store.read(chunk, memoryview(bytearray(chunk.nbytes)))
