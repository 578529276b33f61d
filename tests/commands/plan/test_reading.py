"""What a plan says a model takes is what the opened model has: equal, not about equal."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.utils
from gguf_checkpoints import write_gguf
from packed_weights import FORMS, Form
from quantised_checkpoints import write_fp8, write_mxfp4, write_packed
from tiny_models import build
from transformers import PreTrainedModel
from zoo import families

import promoe
from promoe.commands.plan.kv_cache import _tensors
from promoe.commands.plan.reading import read_model
from promoe.commands.plan.sizes import ModelSizes, Slots, cache_argument
from promoe.errors import CheckpointError, PromoeError, UnsupportedModelError
from promoe.model.placement import other_bytes
from promoe.stores.encodings.schemes import SCHEMES
from promoe.stores.tensor_files import TensorFile

CONTEXT = 40
# One like Mixtral, one with shared experts, two with MLA and dense layers (one of them keeps buffers in fp32), one whose layers
# take turns at a sliding window, one with tied embeddings.
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {"tie_word_embeddings": True},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "gpt_oss": {},
}


def cache_bytes(model: PreTrainedModel, num_tokens: int) -> int:
    """Of the cache that the model really fills."""
    ids = torch.arange(num_tokens)[None] % 50 + 2
    with torch.inference_mode():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def assert_is_what_is_opened(sizes: ModelSizes, folder: Path) -> None:
    for rate in (0.3, 0.5):
        model: Any = promoe.from_pretrained(folder, cache=cache_argument(rate), predictor=None)
        with closing(model.promoe) as handle:
            stats, runtime = handle.stats(), handle.runtime
            store = runtime.engine.store
            assert sizes.expert_bytes == store.expert_bytes
            assert [layer.layout for layer in sizes.layers] == list(store.layouts)
            assert [layer.num_experts for layer in sizes.layers] == list(store.num_experts)
            assert [layer.top_k for layer in sizes.layers] == [layer.top_k for layer in runtime.layers]
            assert sizes.other_bytes == other_bytes(model, runtime.layers)
            assert sizes.slots(rate) == Slots(stats.cache_slots, stats.cache_bytes)
            assert sizes.kv.nbytes(CONTEXT) == cache_bytes(model, CONTEXT)
            assert sizes.dtype == str(model.dtype).removeprefix("torch.")


@pytest.mark.parametrize("family", FAMILIES)
def test_headers_and_the_configuration_alone_say_what_the_model_takes(family: str, tmp_path: Path) -> None:
    build(family, dtype=torch.bfloat16, **FAMILIES[family]).save_pretrained(tmp_path)
    read = read_model(str(tmp_path))
    assert read.store is not None
    with closing(read.store) as store:
        assert "headers of 1 safetensors file" in read.sizes.found_in
        assert_is_what_is_opened(read.sizes, tmp_path)
        assert [layer.chunk_bytes for layer in read.sizes.layers] == [
            store.chunk_bytes(idx) for idx in range(len(read.layers))
        ]
        assert read.sizes.stored_bytes == read.sizes.expert_bytes
    weights = tmp_path / "model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    alone = read_model(str(tmp_path))
    assert alone.store is None
    assert "config.json alone; bfloat16, as it says" in alone.sizes.found_in
    (tmp_path / "elsewhere").rename(weights)
    assert_is_what_is_opened(alone.sizes, tmp_path)


@pytest.mark.parametrize("write", [write_fp8, write_mxfp4])
def test_quantised_checkpoints_take_less_in_files_than_in_slots(write: Any, tmp_path: Path) -> None:
    write(tmp_path)
    read = read_model(str(tmp_path))
    assert read.store is not None
    with closing(read.store) as store:
        assert_is_what_is_opened(read.sizes, tmp_path)
        named = [tensor for file in store.files for tensor in file.tensors.values() if ".experts." in tensor.name]
        quantised = sum(tensor.nbytes for tensor in named)
    assert read.sizes.stored_bytes == quantised < read.sizes.expert_bytes
    (tmp_path / "model.safetensors").unlink()
    alone = read_model(str(tmp_path)).sizes
    assert alone.expert_bytes == read.sizes.expert_bytes
    assert alone.other_bytes == read.sizes.other_bytes
    # Scales are assumed as they are in large models: of these small matrices they are more.
    assert alone.stored_bytes == pytest.approx(quantised, rel=0.03)


@pytest.mark.parametrize(
    "name",
    [
        *("AWQ gemm", "W4A16 in groups", "W4A16 in groups with zeros", "W4A16 with actorder", "W8A16 by channel"),
        "FP8 by channel",
    ],
)
def test_packed_checkpoints_take_as_much_as_their_tensors(name: str, tmp_path: Path) -> None:
    quantised, _ = write_packed(tmp_path, FORMS[name], hidden=128, intermediate=128)
    read = read_model(str(quantised))
    assert read.store is not None
    with closing(read.store) as store:
        named = [tensor for file in store.files for tensor in file.tensors.values() if ".experts." in tensor.name]
        parts = sum(tensor.nbytes for tensor in named if not tensor.name.endswith("weight_shape"))
    assert read.sizes.stored_bytes == parts
    for path in quantised.glob("*.safetensors*"):
        path.unlink()
    alone = read_model(str(quantised)).sizes
    # The group of each input is 5% of these small matrices, and next to nothing of large ones.
    assert alone.stored_bytes == pytest.approx(parts, rel=0.06 if "actorder" in name else 0.03)
    assert alone.expert_bytes == read.sizes.expert_bytes
    dense = read_model(str(quantised), experts="checkpoint").sizes
    assert (dense.expert_bytes > alone.expert_bytes) == (
        SCHEMES[FORMS[name].config["quant_method"]].integers(FORMS[name].config, ["layer"]) is not None
    )


EXPERTS, EXPERTS_AND_REST = r"re:.*mlp\.experts\..*", "re:.*mlp.*"


@pytest.mark.parametrize(
    ("experts", "targets", "ignore"),
    [
        ("W4A16 in groups", {"W8A16 by channel": "re:.*self_attn.*", "W4A16 in groups": EXPERTS}, []),
        ("W4A16 in groups", {"W8A16 by channel": "re:.*self_attn.*", "W4A16 in groups": EXPERTS_AND_REST}, []),
        ("W4A16 in groups", {"W8A16 by channel": "re:.*self_attn.*", "W4A16 in groups": "Linear"}, ["lm_head"]),
        ("W8A16 by channel", {"W4A16 in groups": "Linear", "W8A16 by channel": EXPERTS}, []),
        ("W8A16 by channel", {"W4A16 in groups": "re:.*self_attn.*", "W8A16 by channel": EXPERTS}, ["re:.*gate$"]),
    ],
)
def test_experts_are_of_the_group_that_names_them(
    experts: str, targets: dict[str, str], ignore: list[str], tmp_path: Path
) -> None:
    form = FORMS[experts]
    groups = {
        f"group_{idx}": {**FORMS[name].config["config_groups"]["group_0"], "targets": [target]}
        for idx, (name, target) in enumerate(targets.items())
    }
    (other,) = set(targets) - {experts}
    named = Form({**form.config, "config_groups": groups, "ignore": ignore}, form.make, form.read)
    quantised, _ = write_packed(tmp_path, named, others={"self_attn": FORMS[other]}, hidden=128, intermediate=128)
    read = read_model(str(quantised))
    assert read.store is not None
    with closing(read.store):
        assert_is_what_is_opened(read.sizes, quantised)
    for path in quantised.glob("*.safetensors*"):
        path.unlink()
    alone = read_model(str(quantised)).sizes
    assert [layer.layout for layer in alone.layers] == [layer.layout for layer in read.sizes.layers]
    assert alone.stored_bytes == pytest.approx(read.sizes.stored_bytes, rel=0.03)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("GPTQ 4 bits", {"dynamic": {r"+:.*\.experts\..*": {"bits": 8}}}),
        ("AutoRound auto_gptq", {"extra_config": {r".*\.experts\..*": {"bits": 8}}}),
    ],
)
def test_experts_with_bits_of_their_own(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    form = FORMS[name]
    named = Form({**form.config, **fields}, form.make, form.read)
    others = {r"\.experts\.": FORMS["GPTQ 8 bits"]}
    quantised, _ = write_packed(tmp_path, named, others=others, hidden=128, intermediate=128)
    read = read_model(str(quantised))
    assert read.store is not None
    read.store.close()
    for path in quantised.glob("*.safetensors*"):
        path.unlink()
    alone = read_model(str(quantised)).sizes
    assert [layer.layout for layer in alone.layers] == [layer.layout for layer in read.sizes.layers]
    assert alone.stored_bytes == pytest.approx(read.sizes.stored_bytes, rel=0.03)


def test_experts_that_are_not_quantised_are_planned_in_16_bits(tmp_path: Path) -> None:
    form = FORMS["W4A16 in groups"]
    config = {**form.config, "ignore": [r"re:.*\.experts\..*"]}
    model = build("qwen3_moe", dtype=torch.bfloat16, hidden=128, intermediate=128)
    model.save_pretrained(tmp_path)
    plain = read_model(str(tmp_path))
    assert plain.store is not None
    plain.store.close()
    (tmp_path / "model.safetensors").unlink()
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "quantization_config": config}))
    alone = read_model(str(tmp_path)).sizes
    assert (alone.expert_bytes, alone.stored_bytes) == (plain.sizes.expert_bytes, plain.sizes.stored_bytes)


def test_a_quantised_checkpoint_that_cannot_be_read_is_refused_by_its_configuration(tmp_path: Path) -> None:
    build("qwen3_moe", dtype=torch.bfloat16).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    for quantization, what in (
        ({"quant_method": "bitsandbytes"}, "quant_method bitsandbytes"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized'"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
        with pytest.raises(CheckpointError, match=what):
            read_model(str(tmp_path))


def test_no_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("qwen2_moe", dtype=torch.bfloat16).save_pretrained(tmp_path, max_shard_size="60KB")

    def read_into(*args: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(TensorFile, "read_into", read_into)
    read = read_model(str(tmp_path))
    assert read.store is not None
    with closing(read.store) as store:
        assert len(store.files) > 1
        assert all(tensor.is_meta for tensor in (*read.model.parameters(), *read.model.buffers()))


# The last one is not in every version.
@pytest.mark.parametrize("family", sorted({"jamba", "llama4", "unlimited_ocr"} & set(families.names())))
def test_caches_of_other_kinds(family: str, tmp_path: Path) -> None:
    """A state, a window in chunks, and a family's own."""
    model = families.build(family)
    ids = torch.arange(CONTEXT)[None] % 50 + 2
    with torch.inference_mode():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    expected = sum(
        tensor.nbytes for layer in cache.layers for tensor in _tensors(vars(layer).values()) if tensor.numel() > 1
    )
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert read_model(str(tmp_path), "float32").sizes.kv.nbytes(CONTEXT) == expected


def test_what_cannot_be_known_is_said(tmp_path: Path) -> None:
    families.build("switch_transformers").save_pretrained(tmp_path)
    read = read_model(str(tmp_path))
    assert read.store is not None
    read.store.close()
    assert read.sizes.kv.nbytes(CONTEXT) is None
    assert "encoder-decoder" in read.sizes.kv.assumed
    families.build("jetmoe").save_pretrained(tmp_path / "jetmoe")
    read = read_model(str(tmp_path / "jetmoe"))
    assert read.store is not None
    read.store.close()
    assert "does not run without weights" in read.sizes.kv.assumed


def test_a_dtype_that_is_asked_for(tmp_path: Path) -> None:
    build("mixtral", dtype=torch.bfloat16).save_pretrained(tmp_path)
    half, whole = read_model(str(tmp_path)), read_model(str(tmp_path), "float32")
    assert half.store is not None
    assert whole.store is not None
    half.store.close()
    whole.store.close()
    assert whole.sizes.expert_bytes == 2 * half.sizes.expert_bytes
    assert whole.sizes.stored_bytes == half.sizes.stored_bytes
    (tmp_path / "model.safetensors").unlink()
    assert read_model(str(tmp_path), "float32").sizes.expert_bytes == whole.sizes.expert_bytes


def test_where_there_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="There is no folder"):
        read_model(str(tmp_path / "missing"))
    with pytest.raises(CheckpointError, match=r"has no config\.json, so it is not a checkpoint"):
        read_model(str(tmp_path))
    with pytest.raises(PromoeError, match="no folder 'no-such-organisation/model', and nothing of that name"):
        read_model("no-such-organisation/model")
    build("llama").config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="no MoE layers"):
        read_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", "num_attention_heads": 0}))
    with pytest.raises(PromoeError, match="No model can be made"):
        read_model(str(tmp_path))


@pytest.mark.parametrize(("kind", "parts"), [("Q8_0", 1), ("BF16", 3)])
def test_gguf_files(tmp_path: Path, kind: str, parts: int) -> None:
    """Sizes are from the header; experts are stored in their blocks."""
    path = write_gguf(tmp_path, "qwen3_moe", weight_type=kind, parts=parts)
    for name in (str(path), str(tmp_path)):
        read = read_model(name)
        with closing(read.store or pytest.fail("no files")):
            assert read.sizes.found_in.startswith(
                "the headers of 3 GGUF files" if parts == 3 else "the headers of 1 GGUF file"
            )
            assert read.folder == tmp_path
            assert (read.sizes.model_type, read.sizes.dtype, read.sizes.name) == ("qwen3_moe", "bfloat16", name)
            elements = 3 * 64 * 32
            nbytes = elements // 32 * 34 if kind == "Q8_0" else 2 * elements
            assert [one.stored_bytes for one in read.sizes.layers] == 3 * [nbytes]
    assert_is_what_is_opened(read.sizes, path)


def test_a_plan_downloads_no_gguf_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def cached_file(repository: str, file: str, **options: Any) -> str:
        assert (repository, file, options) == ("org/name", "m.gguf", {"local_files_only": True})
        raise OSError("not in the cache")

    monkeypatch.setattr(transformers.utils, "cached_file", cached_file)
    with pytest.raises(CheckpointError, match=r"'org/name/m\.gguf' on this machine.*A plan downloads nothing"):
        read_model("org/name/m.gguf")
    with pytest.raises(CheckpointError, match=r"There is no file 'none\.gguf'"):
        read_model("none.gguf")
