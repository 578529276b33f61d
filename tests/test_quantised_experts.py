"""The promise for quantised experts: no bit depends on the cache, the predictor, the timing or the number of threads.

The reference is the same model with all experts in slots in the same form. How far that is from the model itself is
checked against the *twin*: the unmodified model whose experts are the expanded weights.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from served import (
    PREDICTORS,
    PROMPTS,
    LinkOver,
    check_integrity,
    close,
    config,
    delayed,
    greedy,
    load_stock,
    plain_link,
    predictor_of,
    record,
    stock,
)
from tiny_models import MOE_FAMILIES, build, token_ids
from transformers import PreTrainedModel
from zoo import families
from zoo.exactness import assert_equal, outputs

import promoe
from promoe.experts.kernels.formats import formats_in, formats_of
from promoe.experts.kernels.int4 import Int4Format
from promoe.experts.kernels.int8 import Int8Format
from promoe.experts.moe_layers import find_moe_layers
from promoe.model.opening import open_headers
from promoe.model.quantizing import write_quantized
from promoe.scheduler import ExpertKey
from promoe.stores.base import Store, read_expert
from promoe.transfer.links import Link

FORMS = {"int8": Int8Format(), "int4": Int4Format(4, 32), "int3": Int4Format(3, 32), "int2": Int4Format(2, 32)}
# Experts of these families compute by code of their own, or have sizes that no tiny model makes multiples of 64.
PLAIN = {"dbrx", "jetmoe", "llama4", "longcat_flash", "nllb_moe", "step3p7", "switch_transformers"}
# Of the norm of a layer's output. The twin's weights are rounded to bf16, those in torch's kernels are not. (Of whole
# models nothing can be said: where two experts of a random model are nearly equal, the other one is chosen.)
TWIN_TOLERANCE = 0.01


def quantised(folder: Path, *forms: str) -> Path:
    """The folder of a checkpoint, with its experts in some forms beside it."""
    opened = open_headers(folder)
    for form in forms:
        write_quantized(opened.layers, opened.store, folder / f"promoe-{form}", FORMS[form])
    opened.store.close()
    return folder


@functools.cache
def checkpoint(family: str) -> Path:
    folder = Path(_scratch().name) / family
    build(family, dtype=torch.bfloat16, top_k=3, intermediate=64).save_pretrained(folder, max_shard_size="200KB")
    return quantised(folder, *FORMS)


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def opened(folder: Path, form: str, cache: str | int, **arguments: Any) -> PreTrainedModel:
    settings = {"predictor": None, "link": LinkOver(plain_link), "config": config(), **arguments}
    return promoe.from_pretrained(folder, experts=form, cache=cache, **settings)


@functools.cache
def reference(family: str, form: str, prompt: str) -> Any:
    model = opened(checkpoint(family), form, "100%")
    try:
        return greedy(model, PROMPTS[prompt])
    finally:
        close(model)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_every_cache_size(family: str, form: str) -> None:
    slot_bytes = open_slot_bytes(checkpoint(family), form)
    for cache, prompt in ((slot_bytes, "padded"), (2 * slot_bytes, "one"), ("25%", "padded"), ("50%", "one")):
        model = opened(checkpoint(family), form, cache, predictor="gate")
        try:
            greedy(model, PROMPTS[prompt]).assert_equals(reference(family, form, prompt))
            check_integrity(model)
            assert model.promoe.stats().evictions > 0
        finally:
            close(model)


def open_slot_bytes(folder: Path, form: str) -> int:
    model = opened(folder, form, "100%")
    try:
        return int(model.promoe._pools[0].layout.slot_bytes)
    finally:
        close(model)


@pytest.mark.parametrize("predictor", PREDICTORS)
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_every_prediction(form: str, predictor: str | None) -> None:
    family = MOE_FAMILIES[PREDICTORS.index(predictor) % len(MOE_FAMILIES)]
    _, visits = record(family, torch.float32, "grouped_mm", "short")
    chosen = predictor_of(predictor, stock(family), visits, lookahead=3)
    model = opened(checkpoint(family), form, "50%", predictor=chosen, link=delayed(7))
    try:
        greedy(model, PROMPTS["short"]).assert_equals(reference(family, form, "short"))
        check_integrity(model)
    finally:
        close(model)


@pytest.mark.parametrize("form", FORMS)
def test_one_and_two_threads_and_prompts_of_any_length(form: str) -> None:
    """Also where products have so many rows that matrices are expanded, and where promoe computes in parts."""
    folder = checkpoint("qwen3_moe")
    for threads in (1, 2):
        torch.set_num_threads(threads)
        full, few = opened(folder, form, "100%"), opened(folder, form, "30%", predictor="gate")
        try:
            with torch.no_grad():
                for batch, length in ((1, 1), (1, 3), (3, 17), (1, 90), (2, 250)):
                    ids = token_ids(batch, length, seed=length)
                    assert torch.equal(few(ids).logits, full(ids).logits), (threads, batch, length)
        finally:
            close(full)
            close(few)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_beams_and_sampling(form: str) -> None:
    folder = checkpoint("mixtral")
    full, few = opened(folder, form, "100%"), opened(folder, form, "25%", predictor="gate")
    try:
        for settings in ({"num_beams": 3, "do_sample": False}, {"do_sample": True, "temperature": 0.9}):
            found = []
            for model in (full, few):
                torch.manual_seed(0)
                found.append(model.generate(**PROMPTS["padded"], max_new_tokens=6, **settings))
            assert torch.equal(*found)
    finally:
        close(full)
        close(few)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_other_implementations_compute_with_the_expanded_weights(implementation: str) -> None:
    """Bit by bit as the twin: their kernels are given bf16 matrices."""
    folder = checkpoint("qwen2_moe")
    expected, model = twin(folder, "int4"), opened(folder, "int4", "30%")
    try:
        for one in (expected, model):
            one.set_experts_implementation(implementation)
        greedy(model, PROMPTS["one"]).assert_equals(greedy(expected, PROMPTS["one"]))
    finally:
        close(model)


def test_unpatching_gives_the_checkpoints_own_experts_back() -> None:
    folder = checkpoint("qwen3_moe")
    model = opened(folder, "int4", "30%")
    greedy(model, PROMPTS["one"])
    promoe.unpatch(model)
    greedy(model, PROMPTS["one"]).assert_equals(greedy(load_stock(folder), PROMPTS["one"]))


def test_without_asking_nothing_is_quantised() -> None:
    folder = checkpoint("olmoe")
    expected = greedy(load_stock(folder), PROMPTS["one"])
    for arguments in ({}, {"experts": "auto"}, {"experts": "checkpoint"}):
        model = promoe.from_pretrained(folder, cache="30%", config=config(), **arguments)
        try:
            greedy(model, PROMPTS["one"]).assert_equals(expected)
            assert not formats_in(model.promoe.runtime.engine.store.layouts)
        finally:
            close(model)


def counting_link(loads: list[Any], store: Store) -> Link:
    """A link that adds each expert whose first chunk it moves to `loads`."""
    link = plain_link(store)
    move = link.transfer

    def transfer(chunk: Any, *target: Any) -> None:
        if chunk.slot_offset_bytes == 0:
            loads.append(chunk)
        move(chunk, *target)

    link.transfer = transfer  # type: ignore[method-assign]
    return link


def test_a_miss_moves_the_forms_bytes() -> None:
    """Bits / 16 of the 16-bit bytes, and two bytes per output or four per group."""
    folder = checkpoint("qwen3_moe")
    moved, described = {}, []
    for form in ("checkpoint", *FORMS):
        loads: list[Any] = []
        model = opened(folder, form, "30%", link=LinkOver(functools.partial(counting_link, loads)))
        try:
            greedy(model, PROMPTS["one"])
            stats = model.promoe.stats()
            described.append(stats.store)
            # Not evictions: a slot whose transfer has not begun may be let again.
            moved[form] = stats.total.bytes_total / len(loads)
        finally:
            close(model)
    weights = 3 * 64 * 64  # gate, up and down of an expert
    assert moved["checkpoint"] == 2 * weights
    assert moved["int8"] == weights + 2 * 3 * 64
    for form, bits in (("int4", 4), ("int3", 3), ("int2", 2)):
        assert moved[form] == weights * bits / 8 + 4 * weights / 32
    names = [f"SlotFilesStore, int{bits}, {size} bits per weight" for bits, size in ((8, 8.25), (4, 5), (3, 4), (2, 3))]
    assert described == ["FileStore", *names]


# -- every family -----------------------------------------------------------------------------------------------


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models whose experts have sizes that can be quantised."""
    for name, size in families.SIZES.items():
        if size in (32, 48) and any(part in name for part in ("moe", "expert", "ffn")):
            monkeypatch.setitem(families.SIZES, name, 64)


def by_turns() -> Iterator[Any]:
    """Each family with one format; with the others in the slow tests."""
    forms = ("int8", "int4")
    for number, name in enumerate(families.names()):
        for form in forms:
            marks = () if form == forms[number % len(forms)] else (pytest.mark.slow,)
            yield pytest.param(name, form, marks=marks)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize(("name", "form"), [*by_turns()])
def test_every_family(name: str, form: str, tmp_path: Path) -> None:
    if not families.family_of(name).runs_in_bf16:
        pytest.skip("the unmodified model does not run in bf16")
    model = families.build(name, torch.bfloat16)
    if name.split()[0] in PLAIN:
        assert not any(formats_of(find_moe_layers(model), FORMS[form]).values())
        return
    model.save_pretrained(tmp_path)
    quantised(tmp_path, form)
    tokens = families.inputs(name, model)
    arguments = {"auto_class": type(model)} if families.family_of(name).whole else {}
    full = opened(tmp_path, form, "100%", **arguments)
    few = opened(tmp_path, form, "40%", predictor="gate", **arguments)
    try:
        expected = outputs(full, tokens)
        assert_equal(outputs(few, tokens), expected)
        assert few.promoe.stats().bytes_demand > 0
        check_integrity(few)
        for error in errors_of_layers(full, twin(tmp_path, form, type(model))):
            assert error < TWIN_TOLERANCE
    finally:
        close(full)
        close(few)


@torch.inference_mode()
def errors_of_layers(model: PreTrainedModel, other: PreTrainedModel) -> Iterator[float]:
    """How far apart the experts of two models are, layer by layer, for the same random tokens and choices."""
    for one, two in zip(find_moe_layers(model), find_moe_layers(other), strict=True):
        sizes = next(shape for name, shape, _ in two.stacked_shapes if name == "down_proj")
        hidden = torch.randn((9, sizes[2 if two.experts.is_transposed else 1])).to(torch.bfloat16)
        index = torch.stack([torch.randperm(two.num_experts)[:2] for _ in range(9)])
        weights = torch.rand((9, 2)).to(torch.bfloat16)
        found, expected = (layer.experts(hidden, index, weights).float() for layer in (one, two))
        yield float((found - expected).norm() / expected.norm())


def twin(folder: Path, form: str, model_class: Any = None) -> PreTrainedModel:
    """The unmodified model with the expanded weights of a form as its experts."""
    model = load_stock(folder) if model_class is None else model_class.from_pretrained(folder).eval()
    served = opened(folder, form, "100%", **({} if model_class is None else {"auto_class": model_class}))
    store = served.promoe.runtime.engine.store
    with torch.no_grad():
        for layer in find_moe_layers(model):
            layout = store.layouts[layer.layer_idx]
            own = layer.rows()
            for expert in range(layer.num_experts):
                slot = bytearray(layout.slot_bytes)
                read_expert(store, ExpertKey(layer.layer_idx, expert), memoryview(slot))
                for spec in layout.tensors:
                    if spec.format is not None:
                        memory = torch.frombuffer(slot, dtype=torch.uint8)[spec.offset_bytes : spec.end_bytes]
                        own[spec.name][expert].copy_(spec.format.view(memory).dense())
    close(served)
    return model


# -- a model that was in memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("has_checkpoint", [True, False])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_model_that_was_in_memory(form: str, has_checkpoint: bool, tmp_path: Path) -> None:
    """The same answers at any cache size; its own experts come back bit by bit."""
    model = load_stock(checkpoint("qwen2_moe"))
    if not has_checkpoint:
        model.config._name_or_path = ""
    own = greedy(model, PROMPTS["one"])
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    answers = []
    for cache in ("100%", "30%"):
        promoe.patch(model, store="disk", experts=form, cache=cache, config=config(spool_folder=tmp_path))
        assert not list(tmp_path.iterdir())  # nobody else can change the files
        answers.append(greedy(model, PROMPTS["one"]))
        assert formats_in(model.promoe.runtime.engine.store.layouts)
        check_integrity(model)
        promoe.unpatch(model)
    answers[1].assert_equals(answers[0])
    assert not torch.equal(answers[0].logits[0], own.logits[0])
    greedy(model, PROMPTS["one"]).assert_equals(own)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"experts": "int5", "store": "disk"}, r"must be \"auto\" or one of int8, int4, int3, int2. Got 'int5'"),
        ({"experts": "packed", "store": "disk"}, r"must be \"auto\" or one of int8"),
        ({"experts": "int4"}, r'needs store="disk"'),
        ({"experts": "int4", "device": "cuda"}, r'needs store="disk"'),
    ],
)
def test_what_patch_cannot_quantise(arguments: dict[str, Any], message: str) -> None:
    model = build("qwen3_moe", dtype=torch.bfloat16, intermediate=64)
    with pytest.raises(promoe.ConfigError, match=message):
        promoe.patch(model, **arguments)
    assert not hasattr(model, "promoe")


def test_a_model_without_experts_to_quantise_is_left_alone() -> None:
    model = build("qwen3_moe", dtype=torch.float32, intermediate=64)
    with pytest.raises(promoe.UnsupportedModelError, match="needs matrices in bfloat16"):
        promoe.patch(model, store="disk", experts="int4")
    assert not hasattr(model, "promoe")


def test_a_disk_that_is_too_small_leaves_the_model_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second set of files does not fit any more."""
    model = load_stock(checkpoint("qwen2_moe"))
    sizes = iter([2**40, 1])
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: type("Usage", (), {"free": next(sizes)}))
    model.config._name_or_path = ""
    own = greedy(model, PROMPTS["one"])
    with pytest.raises(promoe.ConfigError, match=r"experts take .* has only .* free"):
        promoe.patch(model, store="disk", experts="int4", config=config(spool_folder=tmp_path))
    assert not list(tmp_path.iterdir())
    greedy(model, PROMPTS["one"]).assert_equals(own)
