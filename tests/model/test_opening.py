from __future__ import annotations

import copy
import gc
import importlib.util
import inspect
import json
import os
import re
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from served import config
from stores.checkpoints import expert_tensors, plain_tensors, rewrite, save, shards
from tiny_models import IMPLEMENTATIONS, MOE_FAMILIES, build, token_ids
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    Qwen2MoeForCausalLM,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)
from zoo.families import build as build_zoo

import promoe
from promoe.errors import CheckpointError, ConfigError, PromoeError, UnsupportedModelError
from promoe.experts.guard import is_guard
from promoe.model.opening import OpenedModel, _Opening, open_without_experts
from promoe.scheduler import ExpertKey
from promoe.stores.encodings.refused import REFUSED, refusal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "qwen", shard_size="60KB")


@pytest.fixture
def opened(folder: Path) -> Iterator[OpenedModel]:
    opened = open_without_experts(folder)
    yield opened
    opened.store.close()


def named_tensors(opened: OpenedModel) -> dict[str, torch.Tensor]:
    return {
        **dict(opened.model.named_parameters(remove_duplicate=False)),
        **dict(opened.model.named_buffers(remove_duplicate=False)),
    }


def assert_equal_to_plain(opened: OpenedModel, plain: dict[str, torch.Tensor]) -> None:
    """Every tensor and every expert is what a plain load gives, the rest in aligned memory of its own."""
    tensors = named_tensors(opened)
    assert tensors.keys() == plain.keys()
    experts = {f"{layer.name}.{name}": layer for layer in opened.layers for name in layer.paths}
    assert experts.keys() == {name for name, tensor in tensors.items() if is_guard(tensor)}
    for name, tensor in tensors.items():
        assert (tensor.shape, tensor.dtype) == (plain[name].shape, plain[name].dtype), name
        if name not in experts:
            assert torch.equal(tensor, plain[name]), name
            assert tensor.data_ptr() % 64 == 0, name
    for layer in opened.layers:
        for expert_idx in range(layer.num_experts):
            found = expert_tensors(opened.store, ExpertKey(layer.layer_idx, expert_idx))
            assert tuple(found) == layer.paths
            for name, tensor in found.items():
                assert torch.equal(tensor, plain[f"{layer.name}.{name}"][expert_idx]), f"{layer.name}.{name}"


@pytest.mark.parametrize("layout", ["per_expert-sharded", "per_expert-one_file", "fused-sharded", "fused-one_file"])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_opened_is_plain_load_plus_store(tmp_path: Path, family: str, layout: str) -> None:
    kind, files = layout.split("-")
    save(tmp_path, family, shard_size="60KB" if files == "sharded" else "10GB", fused=kind == "fused")
    opened = open_without_experts(tmp_path, chunk_bytes=4096)
    assert_equal_to_plain(opened, plain_tensors(tmp_path))
    opened.store.close()


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [None, torch.bfloat16, "float32"])
def test_dtypes(tmp_path: Path, saved: torch.dtype, wanted: torch.dtype | str | None) -> None:
    save(tmp_path, "deepseek_v3", dtype=saved, layers=2)
    opened = open_without_experts(tmp_path, dtype=wanted)
    assert_equal_to_plain(opened, plain_tensors(tmp_path, **({} if wanted is None else {"dtype": wanted})))
    opened.store.close()


def test_experts_that_stay_in_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, dtype=torch.float32)
    monkeypatch.setattr(Qwen2MoeForCausalLM, "_keep_in_fp32_modules_strict", {"experts.down_proj", "norm"})
    opened = open_without_experts(tmp_path, dtype=torch.bfloat16)
    plain = plain_tensors(tmp_path, dtype=torch.bfloat16)
    assert plain["model.layers.0.mlp.experts.down_proj"].dtype == torch.float32
    assert opened.layers[0].layout["down_proj"].dtype == torch.float32
    assert_equal_to_plain(opened, plain)
    opened.store.close()


def test_the_attached_experts_give_the_plain_models_logits(folder: Path, opened: OpenedModel) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    for layer in opened.layers:
        rows = [expert_tensors(opened.store, ExpertKey(layer.layer_idx, e)) for e in range(layer.num_experts)]
        for name in layer.paths:
            stacked = torch.stack([row[name] for row in rows])
            layer.experts._parameters[name] = torch.nn.Parameter(stacked, requires_grad=False)
    with torch.no_grad():
        found, expected = (model(input_ids=token_ids()).logits for model in (opened.model, plain))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # alignment may change bits


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    save(tmp_path, tie_word_embeddings=True)
    opened = open_without_experts(tmp_path)
    assert opened.model.lm_head.weight is opened.model.model.embed_tokens.weight
    assert_equal_to_plain(opened, plain_tensors(tmp_path))
    opened.store.close()


def test_a_subfolder_and_overrides_are_passed_on(tmp_path: Path) -> None:
    save(tmp_path / "inner")
    opened = open_without_experts(tmp_path, subfolder="inner", attn_implementation="eager", output_router_logits=True)
    assert opened.model.config._attn_implementation == "eager"
    assert opened.model.config.output_router_logits is True
    opened.store.close()


def test_progress_ends_at_the_bytes_of_the_rest(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    opened = open_without_experts(folder, progress=lambda done, total: seen.append((done, total)))
    rest = {id(tensor): tensor.nbytes for tensor in opened.model.parameters() if not is_guard(tensor)}
    assert seen[-1] == (sum(rest.values()), sum(rest.values()))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) == len(rest)
    opened.store.close()


class TestNothingGlobalChanges:
    def test_class_hooks_and_flags_are_as_after_a_plain_load(self, folder: Path, opened: OpenedModel) -> None:
        plain = AutoModelForCausalLM.from_pretrained(folder)
        assert type(opened.model) is Qwen2MoeForCausalLM
        assert not opened.model.training
        for (name, module), (_, other) in zip(opened.model.named_modules(), plain.named_modules(), strict=True):
            assert type(module) is type(other), name
            assert module.__dict__.keys() == other.__dict__.keys(), name
            assert not module._state_dict_hooks, name
            assert getattr(module, "_is_hf_initialized", None) == getattr(other, "_is_hf_initialized", None), name
        assert opened.model._keys_to_ignore_on_load_unexpected == plain._keys_to_ignore_on_load_unexpected
        assert [str(c) for c in opened.model._weight_conversions] == [str(c) for c in plain._weight_conversions]
        assert opened.model.generation_config.to_dict() == plain.generation_config.to_dict()
        assert opened.model.config.to_dict() == plain.config.to_dict()
        assert opened.model.name_or_path == plain.name_or_path

    def test_transformers_still_loads_as_before(self, folder: Path) -> None:
        mapping, subclasses = AutoModelForCausalLM._model_mapping, set(Qwen2MoeForCausalLM.__subclasses__())
        open_without_experts(folder).store.close()
        assert AutoModelForCausalLM._model_mapping is mapping
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert type(model) is Qwen2MoeForCausalLM
        assert not any(parameter.is_meta for parameter in model.parameters())
        gc.collect()
        assert set(Qwen2MoeForCausalLM.__subclasses__()) == subclasses  # the temporary class is gone

    def test_the_model_can_be_collected(self, folder: Path) -> None:
        opened = open_without_experts(folder)
        opened.store.close()
        model = weakref.ref(opened.model)
        del opened
        gc.collect()
        assert model() is None

    def test_several_threads_open_at_once(self, folder: Path) -> None:
        """Nor do they leave Transformers without a function that it replaces while it loads."""
        replaced_while_loading = PreTrainedModel.tie_weights
        found: list[OpenedModel] = []
        threads = [threading.Thread(target=lambda: found.append(open_without_experts(folder))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [type(opened.model) for opened in found] == [Qwen2MoeForCausalLM] * 3
        assert PreTrainedModel.tie_weights is replaced_while_loading
        for opened in found:
            opened.store.close()


class TestGuards:
    """What would compute with, write or copy missing experts raises; what only looks works."""

    @pytest.mark.parametrize(
        "use",
        [
            lambda model: model.generate(token_ids(), max_new_tokens=2),
            lambda model: model.to("cpu"),
            lambda model: model.to(torch.bfloat16),
            lambda model: model.float(),
            copy.deepcopy,
            lambda model: model.load_state_dict(dict(model.named_parameters())),
        ],
    )
    def test_uses_raise(self, opened: OpenedModel, use: Callable[[Any], object]) -> None:
        with pytest.raises((PromoeError, RuntimeError), match=r"experts of 'model\.layers\.\d\.mlp\.experts\.\w+'"):
            use(opened.model)

    def test_a_state_dict_has_names_and_shapes_and_no_weights(self, opened: OpenedModel) -> None:
        (name, *_) = [name for name in opened.model.state_dict() if ".experts." in name]
        found = opened.model.state_dict()[name]
        assert found.shape == opened.model.get_parameter(name).shape
        with pytest.raises(PromoeError, match="are in files, not in memory"):
            _ = found + 1

    @pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
    def test_forwards_raise(self, tmp_path: Path, family: str) -> None:
        opened = open_without_experts(save(tmp_path, family))
        for implementation in IMPLEMENTATIONS:
            opened.model.set_experts_implementation(implementation)
            with pytest.raises(PromoeError, match="are in files, not in memory"):
                opened.model(input_ids=token_ids())
        opened.store.close()

    def test_saving_writes_no_weights(self, opened: OpenedModel, tmp_path: Path) -> None:
        with pytest.raises(PromoeError, match="are in files, not in memory"):
            opened.model.save_pretrained(tmp_path / "saved")
        assert not list((tmp_path / "saved").glob("*.safetensors"))
        with pytest.raises(PromoeError, match="cannot be pickled"):
            torch.save(opened.model, tmp_path / "model.pt")

    def test_looking_works(self, folder: Path, opened: OpenedModel) -> None:
        plain = AutoModelForCausalLM.from_pretrained(folder)
        assert repr(opened.model) == repr(plain)
        assert opened.model.num_parameters() == plain.num_parameters()
        assert opened.model.get_memory_footprint() == plain.get_memory_footprint()
        assert (opened.model.dtype, opened.model.device) == (plain.dtype, plain.device)
        opened.model.requires_grad_(False)
        opened.model.train().eval()
        opened.model.zero_grad()


class TestRefusedArguments:
    @pytest.mark.parametrize(
        "kwargs",
        [
            {"trust_remote_code": True},
            {"quantization_config": {"quant_method": "fp8"}},
            {"device_map": "auto"},
            {"device_map": 0},
            {"device_map": "cpu"},
            {"max_memory": {0: "1GB"}},
            {"state_dict": {}},
            {"tp_plan": "auto"},
            {"use_kernels": True},
            {"use_safetensors": False},
            {"output_loading_info": True},
            {"chunk_bytes": 1000},
            {"dtype": "bf16"},
            {"dtype": torch.int8},
            {"dtype": "float8_e4m3fn"},
            {"dtype": 16},
            {"store": "disk"},
        ],
    )
    def test_each_is_named_with_a_remedy(self, folder: Path, kwargs: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=rf"The '{next(iter(kwargs))}' argument .*Got .*\."):
            open_without_experts(folder, **kwargs)

    @pytest.mark.parametrize(
        ("device", "remedy"), [("meta", "Open it outside of that context"), ("cuda", "device='cuda'")]
    )
    def test_where_new_tensors_go_elsewhere(
        self, folder: Path, device: str, remedy: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if device != "meta" and not torch.cuda.is_available():
            monkeypatch.setattr(torch, "get_default_device", lambda: torch.device(device))
        with torch.device("meta"), pytest.raises(ConfigError, match=rf"new tensors on the device '{device}'.*{remedy}"):
            open_without_experts(folder)

    def test_their_neutral_values_are_accepted(self, folder: Path) -> None:
        opened = open_without_experts(
            folder, trust_remote_code=False, device_map=None, use_kernels=False, use_safetensors=True
        )
        opened.store.close()

    def test_a_dtype_for_each_part_of_a_configuration(self, folder: Path) -> None:
        for dtype in ("bfloat16", torch.bfloat16, {"": "bfloat16"}):
            opened = open_without_experts(folder, dtype=dtype)
            assert opened.model.dtype == torch.bfloat16
            opened.store.close()
        with pytest.raises(ConfigError, match="'dtype' argument"):
            open_without_experts(folder, dtype={"": "bf16"})


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


class TestAdapters:
    """Checkpoints beside which PEFT wrote an adapter, and adapters without a checkpoint."""

    @staticmethod
    def write_adapter(base: Path, folder: Path, **fields: Any) -> None:
        """On the attention, of random weights, so that it changes what the model answers."""
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(base),
            LoraConfig(**({"target_modules": ["q_proj"], "init_lora_weights": False} | fields)),
        )
        model.save_pretrained(folder)

    @staticmethod
    def assert_like_stock(folder: Path, plain: Path, adapted: bool = True) -> None:
        ids = token_ids(1, 6, seed=0)
        with torch.no_grad():
            logits = []
            for path in (folder, plain):
                stock = AutoModelForCausalLM.from_pretrained(path).eval()
                for parameter in stock.parameters():
                    # Mapped files begin anywhere, and some fp32 products depend on that (docs/limits.md).
                    parameter.data = parameter.data.clone()
                logits.append(stock(ids).logits)
            wanted, without = logits
            assert torch.equal(wanted, without) != adapted
            model = promoe.from_pretrained(folder, cache="50%", config=config())
            assert torch.equal(model(ids).logits, wanted)
        model.promoe.close()

    def test_in_the_folder_of_the_model(self, folder: Path, tmp_path: Path) -> None:
        plain = Path(shutil.copytree(folder, tmp_path / "plain"))
        self.write_adapter(folder, folder)
        self.assert_like_stock(folder, plain)

    def test_alone(self, folder: Path, tmp_path: Path) -> None:
        """The base model that it names is opened with it, as Transformers does."""
        self.write_adapter(folder, tmp_path / "adapter")
        self.assert_like_stock(tmp_path / "adapter", folder)

    def test_of_a_model_that_is_not_there(self, folder: Path, tmp_path: Path) -> None:
        self.write_adapter(folder, tmp_path / "adapter")
        edit(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path="/no/such/model")
        what = (
            r"adapter of '/no/such/model' and no model of its own: There is no folder .*change base_model_name_or_path"
        )
        with pytest.raises(CheckpointError, match=what):
            open_without_experts(tmp_path / "adapter")
        edit(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path=None)
        with pytest.raises(CheckpointError, match=r"does not say of which model.*load_adapter"):
            open_without_experts(tmp_path / "adapter")

    def test_of_itself_or_of_another_adapter(self, folder: Path, tmp_path: Path) -> None:
        self.write_adapter(folder, tmp_path / "adapter")
        for base in (tmp_path / "adapter", Path(shutil.copytree(tmp_path / "adapter", tmp_path / "other"))):
            edit(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path=str(base))
            with pytest.raises(
                CheckpointError, match=rf"has an adapter of '{base}', which is an adapter too\. Instead, change"
            ):
                open_without_experts(tmp_path / "adapter")

    def test_in_a_subfolder(self, folder: Path, tmp_path: Path) -> None:
        self.write_adapter(folder, tmp_path / "all" / "adapter")
        with pytest.raises(
            ConfigError, match="has an adapter in 'adapter', and Transformers cannot open an adapter in a subfolder"
        ):
            open_without_experts(tmp_path / "all", subfolder="adapter")

    def test_of_a_kind_that_transformers_does_not_load(self, folder: Path, tmp_path: Path) -> None:
        """It would fill what is missing with other numbers each time."""
        self.write_adapter(folder, tmp_path / "adapter", use_dora=True)
        with pytest.raises(
            CheckpointError, match=r"The adapter has .* Transformers would use random numbers for missing weights.*DoRA"
        ):
            open_without_experts(tmp_path / "adapter")

    @pytest.mark.parametrize(
        ("file", "content", "what"),
        [
            ("adapter_config.json", "{", "The adapter_config.json of .* cannot be read"),
            ("adapter_config.json", "[]", "it must be a JSON object, and is a list"),
            ("adapter_model.safetensors", "junk", "its weights were loaded, but not what .* after them .an adapter"),
        ],
    )
    def test_damaged_beside_a_model(self, folder: Path, file: str, content: str, what: str) -> None:
        self.write_adapter(folder, folder)
        (folder / file).write_text(content)
        with pytest.raises(CheckpointError, match=what):
            open_without_experts(folder)

    def test_its_tensors_lie_where_all_others_do(self, folder: Path, tmp_path: Path) -> None:
        self.write_adapter(folder, tmp_path / "adapter")
        opened = open_without_experts(tmp_path / "adapter")
        lora = [parameter for name, parameter in opened.model.named_parameters() if "lora_" in name]
        assert len(lora) == 6
        assert {parameter.data_ptr() % 64 for parameter in lora} == {0}
        opened.store.close()

    def test_without_peft(self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.write_adapter(folder, tmp_path / "adapter")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=rf"`pip install peft`, or open '{folder}' without the adapter"):
            open_without_experts(tmp_path / "adapter")

    def test_on_experts(self, folder: Path, tmp_path: Path) -> None:
        self.write_adapter(folder, tmp_path / "adapter", target_parameters=["mlp.experts.gate_up_proj"])
        with pytest.raises(UnsupportedModelError, match="has an adapter on its experts"):
            open_without_experts(tmp_path / "adapter")

    @pytest.mark.parametrize("name", ["_load_pretrained_model", "_finalize_model_loading", "from_pretrained"])
    def test_whatever_transformers_calls_takes_what_the_class_itself_takes(self, name: str) -> None:
        """By position or by name: its own code calls them in both ways, and others in other versions."""
        own = inspect.signature(getattr(Qwen2MoeForCausalLM, name))
        given = {
            parameter.name: object()
            for parameter in own.parameters.values()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        }
        overridden = inspect.signature(
            getattr(_Opening(lambda *_: None, 4096, "none").subclass(Qwen2MoeForCausalLM), name)
        )
        overridden.bind(*given.values())
        if name != "_finalize_model_loading":
            overridden.bind(**given)


class TestClasses:
    """Which class a checkpoint is opened as."""

    def test_what_config_json_names(self, tmp_path: Path) -> None:
        causal = build("qwen3_moe")
        causal.config.num_labels = 3
        classifier = AutoModelForSequenceClassification.from_config(causal.config).eval()
        classifier.save_pretrained(tmp_path)
        opened = open_without_experts(tmp_path)
        assert type(opened.model) is type(classifier)
        opened.store.close()
        what = r"'lm_head\.weight'.*as Qwen3MoeForCausalLM.*names Qwen3MoeForSequenceClassification.*auto_class="
        with pytest.raises(CheckpointError, match=what):
            open_without_experts(tmp_path, auto_class=AutoModelForCausalLM)

    def test_one_that_is_asked_for(self, folder: Path) -> None:
        opened = open_without_experts(folder, auto_class=AutoModel)
        assert type(opened.model).__name__ == "Qwen2MoeModel"
        opened.store.close()

    def test_a_model_of_several_parts_is_opened_whole(self, tmp_path: Path) -> None:
        """Its text model alone is had by asking for it, as Transformers' AutoModelForCausalLM gives it."""
        vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
        vision |= {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 16}
        tokens = {"image_token_id": 120, "vision_start_token_id": 121, "vision_end_token_id": 122}
        text = build_zoo("qwen3_5_moe").config.to_dict()
        whole = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=text, vision_config=vision, **tokens))
        whole.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(whole).__name__]
        names = []
        for arguments in ({}, {"auto_class": AutoModelForCausalLM}):
            opened = open_without_experts(tmp_path, **arguments)
            names.append(type(opened.model).__name__)
            opened.store.close()
        assert names == ["Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"]

    @pytest.mark.parametrize(
        "architectures",
        [
            None,
            [],
            5,
            "Qwen2MoeModel",
            ["NoSuchForCausalLM"],
            ["torch"],
            ["Qwen2MoeConfig"],
            ["Qwen2MoePreTrainedModel"],
            ["PreTrainedModel"],
        ],
    )
    def test_where_it_names_none_that_there_is(self, folder: Path, architectures: Any) -> None:
        edit(folder / "config.json", architectures=architectures)
        opened = open_without_experts(folder)
        assert type(opened.model) is Qwen2MoeForCausalLM
        opened.store.close()


@pytest.mark.parametrize("auto_class", ["AutoModel", int, AutoConfig])
def test_what_is_no_class_of_models(auto_class: Any, folder: Path) -> None:
    with pytest.raises(ConfigError, match="'auto_class' argument must be an Auto class or model class"):
        open_without_experts(folder, auto_class=auto_class)


def test_weights_of_a_name_that_is_asked_for(tmp_path: Path) -> None:
    """What is asked for counts more than what config.json says."""
    save(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "mine.safetensors")
    edit(tmp_path / "config.json", transformers_weights="gone.safetensors")
    open_without_experts(tmp_path, transformers_weights="mine.safetensors").store.close()
    (tmp_path / "mine.safetensors").rename(tmp_path / "model.safetensors")
    config = AutoConfig.from_pretrained(tmp_path)
    del config.transformers_weights
    open_without_experts(tmp_path, config=config).store.close()


def test_an_error_of_the_callers_own_progress_is_not_the_checkpoints(folder: Path) -> None:
    def progress(done_bytes: int, total_bytes: int) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        open_without_experts(folder, progress=progress)


def test_progress_reaches_its_total_where_files_have_what_the_model_does_not_use(tmp_path: Path) -> None:
    """A layer that predicts several tokens, above all: with experts of its own, and without."""
    save(tmp_path)
    told: list[tuple[int, int]] = []
    open_without_experts(tmp_path, progress=lambda *bytes_: told.append(bytes_)).store.close()
    extra = {"mtp.0.head": torch.zeros(300, 300), "model.layers.9.mlp.experts.0.up_proj.weight": torch.zeros(30, 30)}
    rewrite(shards(tmp_path)[0], lambda tensors: tensors.update(extra))
    again: list[tuple[int, int]] = []
    open_without_experts(tmp_path, progress=lambda *bytes_: again.append(bytes_)).store.close()
    assert again[-1] == told[-1]
    for done_bytes, total_bytes in (told[-1], again[-1]):
        assert done_bytes == total_bytes > 0


def test_only_files_with_experts_stay_open(tmp_path: Path) -> None:
    save(tmp_path, shard_size="20KB")
    opened = open_without_experts(tmp_path)
    with_experts = {where.file_idx for name, where in _tensors(opened).items() if ".experts." in name}
    assert {idx for idx, file in enumerate(opened.store.files) if not file.closed} == with_experts
    assert len(with_experts) < len(opened.store.files)
    opened.store.close()
    for read_mode in ("page_cache", "direct"):
        model = promoe.from_pretrained(tmp_path, cache="50%", config=config(read_mode=read_mode))
        with torch.no_grad():
            found, wanted = (
                one(token_ids(1, 6, seed=0)).logits for one in (model, AutoModelForCausalLM.from_pretrained(tmp_path))
            )
        assert torch.equal(found, wanted)
        model.promoe.close()


def _tensors(opened: OpenedModel) -> dict[str, Any]:
    return {name: where for file in opened.store.files for name, where in file.tensors.items()}


class TestRefusedCheckpoints:
    def edit_config(self, folder: Path, **fields: Any) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **fields}))

    def refused(self, folder: Path | str, match: str, error: type[Exception] = CheckpointError, **kwargs: Any) -> None:
        before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        with pytest.raises(error, match=match):
            open_without_experts(folder, **kwargs)
        after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        assert after == before

    def test_truncated_shard(self, folder: Path) -> None:
        shard = shards(folder)[3]
        size_bytes = shard.stat().st_size
        os.truncate(shard, size_bytes // 2)
        self.refused(folder, rf"{shard.name} .*expected {size_bytes} bytes .*, found {size_bytes // 2} bytes \(trunc")

    def test_corrupt_header(self, folder: Path) -> None:
        content = bytearray(shards(folder)[1].read_bytes())
        content[8:12] = b"\x00\x01\x02\x03"
        shards(folder)[1].write_bytes(content)
        self.refused(folder, f"{shards(folder)[1].name} is not a sound safetensors file: its header is not a JSON")

    def test_missing_shard(self, folder: Path) -> None:
        gone = shards(folder)[2]
        gone.unlink()
        self.refused(folder, f"{gone.name}: No such file")

    def test_missing_index(self, folder: Path) -> None:
        (folder / "model.safetensors.index.json").unlink()
        self.refused(folder, r"No model\.safetensors or model\.safetensors\.index\.json in .*Found config\.json")

    def test_damaged_index(self, folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text('{"weight_map": ')
        self.refused(folder, r"index\.json is not a valid JSON file: Expecting value")

    def test_expert_missing_from_index_and_files(self, folder: Path) -> None:
        name = "model.layers.1.mlp.experts.4.down_proj.weight"
        index = folder / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        rewrite(folder / content["weight_map"].pop(name), lambda tensors: tensors.pop(name))
        index.write_text(json.dumps(content))
        self.refused(folder, "layers.1.mlp.experts.down_proj .*needs 8: missing expert 4")

    def test_expert_in_the_index_but_not_in_its_file(self, folder: Path) -> None:
        name = "model.layers.1.mlp.experts.4.down_proj.weight"
        shard = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
        rewrite(folder / shard, lambda tensors: tensors.pop(name))
        self.refused(folder, "layers.1.mlp.experts.down_proj .*needs 8: missing expert 4")

    def test_expert_of_another_shape(self, folder: Path) -> None:
        name = "model.layers.1.mlp.experts.4.down_proj.weight"
        shard = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
        rewrite(folder / shard, lambda tensors: tensors.update({name: torch.zeros(64, 31)}))
        self.refused(folder, rf"'{name}' has shape \[64, 31\], but \[64, 32\] was expected")

    def test_another_tensor_of_another_shape(self, tmp_path: Path) -> None:
        save(tmp_path)
        rewrite(shards(tmp_path)[0], lambda tensors: tensors.update({"lm_head.weight": torch.zeros(100, 64)}))
        self.refused(tmp_path, r"'lm_head.weight' has shape \[100, 64\], but \[128, 64\] was expected \(1 such")

    def test_another_tensor_missing(self, tmp_path: Path) -> None:
        save(tmp_path)
        rewrite(shards(tmp_path)[0], lambda tensors: tensors.pop("model.layers.0.mlp.gate.weight"))
        self.refused(tmp_path, r"no tensor for 'model.layers.0.mlp.gate.weight' \(1 tensors missing")

    def test_config_of_another_size(self, folder: Path) -> None:
        self.edit_config(folder, num_experts=16)
        self.refused(folder, "8 tensors like .*needs 16: missing expert 8")

    @pytest.mark.parametrize("method", [*REFUSED, "of-tomorrow"])
    def test_experts_in_other_quantised_formats(self, folder: Path, method: str) -> None:
        self.edit_config(folder, quantization_config={"quant_method": method})
        self.refused(
            folder,
            rf"is quantised \(quant_method {method}\), .*{re.escape(refusal(method))} Supported quantised formats: fp8, .*gptq",
        )

    def test_experts_in_the_format_of_mlx(self, folder: Path) -> None:
        self.edit_config(folder, quantization_config={"group_size": 64, "bits": 4})
        self.refused(folder, r"quant_method mlx.*Open the checkpoint that it was made from")

    def test_quantised_tensors_without_a_config(self, tmp_path: Path) -> None:
        def quantise(tensors: dict[str, torch.Tensor]) -> None:
            for name in [name for name in tensors if ".experts." in name]:
                tensors[name] = tensors[name].to(torch.float8_e4m3fn)

        save(tmp_path)
        rewrite(shards(tmp_path)[0], quantise)
        self.refused(tmp_path, "has dtype F8_E4M3")

    def test_experts_that_would_have_to_be_computed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        core = transformers.core_model_loading
        conversion = core.WeightConverter("experts.packed", "experts.down_proj", [core.Transpose(0, 2)])
        original = transformers.modeling_utils.get_model_conversion_mapping
        monkeypatch.setattr(
            transformers.modeling_utils,
            "get_model_conversion_mapping",
            lambda *args, **kwargs: [conversion, *original(*args, **kwargs)],
        )
        save(tmp_path, fused=True)

        def pack(tensors: dict[str, torch.Tensor]) -> None:
            for layer_idx in range(3):
                prefix = f"model.layers.{layer_idx}.mlp.experts"
                tensors[f"{prefix}.packed"] = tensors.pop(f"{prefix}.down_proj").transpose(1, 2).contiguous()

        rewrite(shards(tmp_path)[0], pack)
        self.refused(tmp_path, r"model.layers.0.mlp.experts.down_proj.*'experts.packed' by Transpose")

    def test_dense_model(self, tmp_path: Path) -> None:
        build("llama").save_pretrained(tmp_path)
        self.refused(tmp_path, "no MoE layers", UnsupportedModelError)

    def test_pickled_weights(self, tmp_path: Path) -> None:
        model = build("qwen2_moe")
        model.config.save_pretrained(tmp_path)
        torch.save({}, tmp_path / "pytorch_model.bin")
        self.refused(tmp_path, r"No model\.safetensors.*Found config\.json, pytorch_model\.bin.*save_pretrained")

    def test_one_file_instead_of_a_folder(self, tmp_path: Path) -> None:
        save(tmp_path)
        self.refused(tmp_path / "model.safetensors", "is a file. Give the folder of a checkpoint")
        (tmp_path / "model.bin").write_bytes(b"PK")
        self.refused(tmp_path / "model.bin", "is a file. Give the folder of a checkpoint.*or a GGUF file")

    def test_folder_without_config(self, folder: Path) -> None:
        (folder / "config.json").unlink()
        self.refused(folder, f"The folder '{folder}' has no config.json")

    def test_unknown_model_type(self, folder: Path) -> None:
        self.edit_config(folder, model_type="no_such_moe")
        self.refused(folder, "as a model: .*no_such_moe", UnsupportedModelError)

    def test_code_of_the_checkpoint_is_never_run(self, folder: Path) -> None:
        auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
        (folder / "own.py").write_text("raise SystemExit('ran')")
        self.edit_config(folder, model_type="no_such_moe", auto_map=auto_map)
        self.refused(folder, "as a model: ", UnsupportedModelError)

    def test_a_class_of_another_kind(self, folder: Path) -> None:
        self.refused(folder, "as AutoModelForSeq2SeqLM: Unrecognized configuration", UnsupportedModelError,
                     auto_class=transformers.AutoModelForSeq2SeqLM)  # fmt: skip

    def test_nothing_there(self, tmp_path: Path) -> None:
        self.refused(tmp_path / "absent", f"There is no folder '{tmp_path / 'absent'}'. ")
        self.refused(
            "promoe-tests/no-such-model", "There is no folder 'promoe-tests/no-such-model', and nothing of that name"
        )

    def test_a_failing_disk_while_the_rest_is_read(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(*_: object) -> int:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "preadv", fails)
        self.refused(folder, r"Cannot open .*Cannot read \d+ bytes at offset \d+, found 0: Input/output error")

    def test_transformers_opens_it_after_a_refusal(self, folder: Path) -> None:
        with pytest.raises(ConfigError):
            open_without_experts(folder, device_map="auto")
        rewrite(shards(folder)[0], lambda tensors: None)
        assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 0


def test_a_checkpoint_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout of a downloaded snapshot, opened by id without network: symlinks into a folder of blobs."""
    source = save(tmp_path / "source", shard_size="60KB")
    cache = tmp_path / "cache"
    repo = cache / "models--promoe-tests--tiny"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    (repo / "blobs").mkdir()
    for file in source.iterdir():
        shutil.copy(file, repo / "blobs" / file.name)
        (snapshot / file.name).symlink_to(repo / "blobs" / file.name)
    opened = open_without_experts("promoe-tests/tiny", cache_dir=cache, local_files_only=True)
    assert_equal_to_plain(opened, plain_tensors(source))
    assert AutoConfig.from_pretrained(snapshot).num_experts == 8
    opened.store.close()


def test_experts_that_are_numbered_with_a_gap(tmp_path: Path) -> None:
    """As many as there should be, but one of them in another's place: every expert between would be its neighbour."""
    save(tmp_path)
    old, new = (f"model.layers.1.mlp.experts.{expert_idx}.down_proj.weight" for expert_idx in (2, 9))
    rewrite(shards(tmp_path)[0], lambda tensors: tensors.update({new: tensors.pop(old)}))
    with pytest.raises(CheckpointError, match=r"not numbered one after the other.*are 8"):
        open_without_experts(tmp_path)


def test_a_misspelt_argument_is_no_damaged_checkpoint(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"unexpected keyword argument 'cahce'.*check its spelling"):
        open_without_experts(folder, cahce="25%")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"experts_implementation": "abacus"}, r"with experts_implementation='abacus': .*not supported.*leave it out"),
        ({"attn_implementation": "abacus"}, r"with attn_implementation='abacus': .*not supported.*leave it out"),
        ({"load_in_4bit": True}, r"'load_in_4bit' argument cannot be used .*Use experts="),
    ],
)
def test_an_argument_that_transformers_does_not_take_is_named(
    folder: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_without_experts(folder, **arguments)


def test_what_an_argument_needs_and_is_not_installed_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any, **kwargs: Any) -> None:
        raise ImportError("the package flash_attn is not installed.")

    monkeypatch.setattr(Qwen2MoeForCausalLM, "__init__", missing)
    with pytest.raises(
        ConfigError, match=r"with attn_implementation='flash_attention_2': the package .*\. Install what"
    ):
        open_without_experts(folder, attn_implementation="flash_attention_2")
    with pytest.raises(CheckpointError, match="ImportError: the package"):
        open_without_experts(folder)
