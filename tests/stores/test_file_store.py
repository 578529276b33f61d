from __future__ import annotations

import concurrent.futures
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import build
from transformers import AutoModelForCausalLM, PreTrainedModel

from promoe.errors import CheckpointError, ConfigError
from promoe.experts.moe_layers import find_moe_layers
from promoe.model.meta_model import bank_specs
from promoe.scheduler import ExpertKey
from promoe.stores import FileStore, Store
from stores.checkpoints import expert_tensors, plain_tensors, read_header, rewrite, save, shards


def open_store(folder: Path, model: PreTrainedModel | None = None, **kwargs: Any) -> FileStore:
    """Return the store of a checkpoint for a model that was loaded from it in full."""
    model = AutoModelForCausalLM.from_pretrained(folder) if model is None else model
    return FileStore.open(folder, model, [bank_specs(layer) for layer in find_moe_layers(model)], **kwargs)


def assert_equal_experts(store: FileStore, model: PreTrainedModel) -> None:
    layers = find_moe_layers(model)
    assert [layer.num_experts for layer in layers] == list(store.num_experts)
    assert [layer.layout for layer in layers] == list(store.layouts)
    for layer in layers:
        for expert_idx in range(layer.num_experts):
            key = ExpertKey(layer.layer_idx, expert_idx)
            assert tuple(chunk.nbytes for chunk in store.chunks(key)) == store.chunk_bytes(layer.layer_idx)
            for name, tensor in expert_tensors(store, key).items():
                expected = getattr(layer.experts, name)[expert_idx]
                assert torch.equal(tensor, expected), f"{layer.name}.{name}[{expert_idx}]"


@pytest.mark.parametrize("fused", [False, True], ids=["per_expert", "fused"])
@pytest.mark.parametrize("shard_size", ["60KB", "10GB"], ids=["sharded", "one_file"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v2", "gpt_oss"])
def test_every_expert_is_what_a_plain_load_makes_of_it(
    tmp_path: Path, family: str, shard_size: str, fused: bool
) -> None:
    save(tmp_path, family, shard_size=shard_size, fused=fused, dtype=torch.bfloat16)
    assert (len(shards(tmp_path)) > 1) == (shard_size == "60KB")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    store = open_store(tmp_path, model, chunk_bytes=4096)
    assert isinstance(store, Store)
    assert [file.path.parent for file in store.files] == [tmp_path] * len(shards(tmp_path))
    assert store.tensors == ()
    with pytest.raises(OSError, match=r"Not in RAM: tensor .*, file model.*safetensors, offset \d+"):
        store.tensor(store.chunks(ExpertKey(0, 0))[0])
    assert_equal_experts(store, model)
    assert store.expert_bytes == sum(
        getattr(layer.experts, name).nbytes for layer in find_moe_layers(model) for name in layer.paths
    )
    store.close()


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_dtypes_are_converted_on_arrival(tmp_path: Path, family: str, saved: torch.dtype, wanted: torch.dtype) -> None:
    save(tmp_path, family, dtype=saved, layers=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=wanted)
    store = open_store(tmp_path, model, chunk_bytes=4096)
    chunks = store.chunks(ExpertKey(0, 0))
    if saved == wanted:
        assert all(chunk.dtype is None and chunk.source_nbytes == chunk.nbytes for chunk in chunks)
    else:
        ratio = saved.itemsize / wanted.itemsize
        assert all((chunk.source_dtype, chunk.dtype) == (saved, wanted) for chunk in chunks)
        assert all(chunk.source_nbytes == chunk.nbytes * ratio for chunk in chunks)
    assert_equal_experts(store, model)
    store.close()


def test_one_chunk_per_linear_in_slot_order(tmp_path: Path) -> None:
    save(tmp_path, intermediate=64)  # the file has down before gate and up, per expert
    store = open_store(tmp_path, chunk_bytes=16384)
    gate_up, down = store.layouts[0].tensors
    assert [(chunk.slot_offset_bytes, chunk.nbytes) for chunk in store.chunks(ExpertKey(0, 3))] == [
        (0, 16384),
        (16384, 16384),
        (down.offset_bytes, 16384),
    ]
    assert gate_up.nbytes == 32768
    entry = read_header(shards(tmp_path)[0])["model.layers.0.mlp.experts.3.up_proj.weight"]
    header_bytes = shards(tmp_path)[0].stat().st_size - max(
        value["data_offsets"][1] for name, value in read_header(shards(tmp_path)[0]).items() if name != "__metadata__"
    )
    up = store.chunks(ExpertKey(0, 3))[1]
    assert store.source(up) == (shards(tmp_path)[0], header_bytes + entry["data_offsets"][0])
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    assert store.describe(up) == f"tensor {name}, file model.safetensors, offset {up.source_offset_bytes}"
    assert store.chunks(ExpertKey(0, 3)) is store.chunks(ExpertKey(0, 3))
    store.close()


def test_small_neighbours_are_read_together_long_linears_in_parts(tmp_path: Path) -> None:
    save(tmp_path, intermediate=64)
    together = open_store(tmp_path)  # gate and up are neighbours in this file, down lies before them
    assert together.chunk_bytes(0) == (32768, 16384)
    parts = open_store(tmp_path, chunk_bytes=12288)
    assert parts.chunk_bytes(0) == (8192, 8192) * 3
    together.close()
    parts.close()


def test_neighbours_of_some_experts_only_stay_apart(tmp_path: Path) -> None:
    save(tmp_path, intermediate=64, shard_size="100KB")  # some shard ends between gate and up
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    store = open_store(tmp_path, model)
    for layer_idx in range(3):
        for expert_idx in range(8):
            for chunk in store.chunks(ExpertKey(layer_idx, expert_idx)):
                assert chunk.source_offset_bytes + chunk.source_nbytes <= store.files[chunk.source_idx].size_bytes
    assert (16384, 16384, 16384) in [store.chunk_bytes(layer_idx) for layer_idx in range(3)]
    assert_equal_experts(store, model)
    store.close()


def test_many_threads_read_what_one_reads(tmp_path: Path) -> None:
    save(tmp_path, shard_size="60KB")
    store = open_store(tmp_path)
    keys = [ExpertKey(layer_idx, expert_idx) for layer_idx in range(3) for expert_idx in range(8)] * 4
    expected = [expert_tensors(store, key) for key in keys]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda key: expert_tensors(store, key), keys))
    for one, other in zip(expected, found, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    store.close()


def test_reading_a_closed_or_truncated_checkpoint(tmp_path: Path) -> None:
    save(tmp_path)
    store = open_store(tmp_path)
    chunk = store.chunks(ExpertKey(2, 7))[-1]
    os.truncate(shards(tmp_path)[0], chunk.source_offset_bytes + 10)
    destination = memoryview(bytearray(chunk.source_nbytes))
    with pytest.raises(OSError, match=f"expected {chunk.nbytes} bytes at offset {chunk.source_offset_bytes}, found 10"):
        store.read(chunk, destination)
    store.close()
    store.close()
    with pytest.raises(OSError, match="closed"):
        store.read(chunk, destination)


class TestMismatches:
    """Each damage of a qwen2_moe checkpoint is refused at open, naming tensor, expected and found."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return save(tmp_path)

    @pytest.fixture
    def model(self) -> PreTrainedModel:
        return build("qwen2_moe")

    def refused(self, folder: Path, model: PreTrainedModel, match: str) -> None:
        with pytest.raises(CheckpointError, match=match):
            open_store(folder, model)

    def test_wrong_shape(self, folder: Path, model: PreTrainedModel) -> None:
        name = "model.layers.1.mlp.experts.5.up_proj.weight"
        rewrite(shards(folder)[0], lambda tensors: tensors.update({name: torch.zeros(33, 64)}))
        self.refused(folder, model, rf"'{name}' has shape \[33, 64\], but \[32, 64\] was expected for .*gate_up_proj")

    def test_model_of_another_size(self, folder: Path) -> None:
        model = build("qwen2_moe", intermediate=64)
        self.refused(folder, model, r"gate_proj.weight' has shape \[32, 64\], but \[64, 64\] was expected")

    def test_wrong_shape_of_stacked_experts(self, tmp_path: Path) -> None:
        save(tmp_path, "gpt_oss")
        model = build("gpt_oss", num_experts=4)
        self.refused(tmp_path, model, r"gate_up_proj' has shape \[8, 64, 64\], but \[4, 64, 64\] was expected")

    def test_a_missing_expert(self, folder: Path, model: PreTrainedModel) -> None:
        rewrite(shards(folder)[0], lambda tensors: tensors.pop("model.layers.1.mlp.experts.5.down_proj.weight"))
        self.refused(folder, model, "7 tensors like .*layers.1.mlp.experts.0.down_proj.*needs 8: missing expert 5")

    def test_too_many_experts(self, folder: Path) -> None:
        model = build("qwen2_moe", num_experts=4)
        self.refused(folder, model, "8 tensors like .*needs 4: there are too many")

    def test_all_up_projections_missing(self, folder: Path, model: PreTrainedModel) -> None:
        def edit(tensors: dict[str, torch.Tensor]) -> None:
            for expert_idx in range(8):
                tensors.pop(f"model.layers.2.mlp.experts.{expert_idx}.up_proj.weight")

        rewrite(shards(folder)[0], edit)
        self.refused(
            folder, model, r"no tensors 'mlp.experts.\*.up_proj.weight' for model.layers.2.mlp.experts.gate_up"
        )

    def test_a_layer_without_experts(self, folder: Path) -> None:
        self.refused(
            folder, build("qwen2_moe", layers=4), r"no tensors for model.layers.3.mlp.experts.gate_up_proj \[8"
        )

    def test_quantised_dtype(self, folder: Path, model: PreTrainedModel) -> None:
        name = "model.layers.0.mlp.experts.2.gate_proj.weight"
        rewrite(shards(folder)[0], lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))
        self.refused(
            folder, model, f"'{name}' has dtype F8_E4M3 in .*, but .*gate_up_proj .*torch.float32 was expected"
        )

    def test_other_tensors_in_place_of_the_experts(self, tmp_path: Path) -> None:
        def quantise(tensors: dict[str, torch.Tensor]) -> None:
            name = "model.layers.0.mlp.experts.gate_up_proj"
            tensors[name + "_blocks"] = tensors.pop(name).to(torch.uint8)

        save(tmp_path, "gpt_oss")
        rewrite(shards(tmp_path)[0], quantise)
        self.refused(tmp_path, build("gpt_oss"), r"no tensors for .*gate_up_proj .*Found .*gate_up_proj_blocks \(U8\)")

    def test_experts_stored_twice(self, folder: Path, model: PreTrainedModel) -> None:
        name = "model.layers.0.mlp.experts.down_proj"
        rewrite(shards(folder)[0], lambda tensors: tensors.update({name: torch.zeros(8, 64, 32)}))
        self.refused(folder, model, f"in two ways: .*'{name}'")

    def test_truncated_file(self, folder: Path, model: PreTrainedModel) -> None:
        size_bytes = shards(folder)[0].stat().st_size
        os.truncate(shards(folder)[0], size_bytes - 4096)
        self.refused(folder, model, f"expected {size_bytes} bytes by its header, found {size_bytes - 4096}")

    def test_chunk_bytes(self, folder: Path, model: PreTrainedModel) -> None:
        with pytest.raises(ConfigError, match="chunk_bytes"):
            open_store(folder, model, chunk_bytes=3000)

    def test_files_are_closed_after_a_failure(self, folder: Path) -> None:
        model = build("qwen2_moe", num_experts=4)
        before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        self.refused(folder, model, "too many")
        after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        assert after == before


def test_the_names_of_a_base_model_are_understood(tmp_path: Path) -> None:
    model = build("qwen3_moe")
    model.model.save_pretrained(tmp_path)  # "layers.0..." instead of "model.layers.0..."
    store = open_store(tmp_path, model)
    assert_equal_experts(store, model)
    store.close()
    assert "layers.0.mlp.experts.0.up_proj.weight" in read_header(shards(tmp_path)[0])


def test_plain_tensors_covers_every_expert(tmp_path: Path) -> None:
    names = plain_tensors(save(tmp_path, "mixtral"))
    assert sum(name.endswith(("experts.gate_up_proj", "experts.down_proj")) for name in names) == 6
