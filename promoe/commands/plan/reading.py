"""Reads a model's sizes from the headers of its files, or, where there are none, from its configuration alone: no weights."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, initialization

from promoe.commands.plan.kv_cache import find_kv_cache
from promoe.commands.plan.sizes import ExpertsOfLayer, ModelSizes
from promoe.errors import CheckpointError, ConfigError, PromoeError, UnsupportedModelError
from promoe.experts.kernels.formats import FORMATS, QUANTIZED, SlotFormat, form_in_words
from promoe.experts.moe_layers import MoELayer, find_moe_layers, model_type_of
from promoe.model.gguf.finding import find_gguf, is_gguf
from promoe.model.hub import base_of, is_folder
from promoe.model.meta_model import as_loaded
from promoe.model.model_class import class_to_open
from promoe.model.opening import open_headers
from promoe.model.opening_checks import take_quantization
from promoe.model.placement import other_bytes
from promoe.model.quantized_linear import keep_for
from promoe.model.quantizing import quantizable
from promoe.model.relaying import kept_layout
from promoe.model.slot_folders import default_folder, kept_in, open_experts
from promoe.model.slot_index import INDEX
from promoe.scheduler import ExpertKey
from promoe.stores.base import layout_counts, split_at_pages
from promoe.stores.encodings.base import Integers
from promoe.stores.encodings.schemes import SCHEMES
from promoe.stores.file_store import FileStore
from promoe.stores.layout import DEFAULT_CHUNK_BYTES, ExpertLayout
from promoe.stores.tensor_files import INDEX_NAME, WEIGHTS_NAME


@dataclass(frozen=True)
class ReadModel:
    """A model on the meta device and its sizes.

    Args:
        sizes: as numbers.
        model: without weights.
        layers: its MoE layers.
        store: its files, to be closed; None: there are none here.
        folder: where its files are, or would be.
    """

    sizes: ModelSizes
    model: PreTrainedModel
    layers: list[MoELayer]
    store: FileStore | None
    folder: Path


def read_model(path_or_id: str, dtype: str | None = None, experts: str = "auto", on_device: bool = False) -> ReadModel:
    """Read the headers where the files are here (a folder, or a hub id that was downloaded), else config.json.

    Args:
        path_or_id: folder of a checkpoint, a hub id, or GGUF files.
        dtype: the dtype that the model is to have; None: the checkpoint's.
        experts: the form of the experts, as for `promoe.from_pretrained`. A quantised one does not have to be written yet.
        on_device: whether the slots will be on a device.

    Raises:
        PromoeError: there is neither, or it is not of a model that promoe can serve.
    """
    kind = "GGUF" if is_gguf(path_or_id) else "safetensors"
    if kind == "GGUF":
        place: Path | None = _local_file(path_or_id)
    else:
        if (
            os.path.isdir(path_or_id) or _local_folder(path_or_id) is None
        ):  # of an id whose files are here nobody is asked
            path_or_id = base_of(path_or_id)
        place = _local_folder(path_or_id)
    if place is None or (place.is_dir() and not _has_weights(place)):
        store = None
        model, layers, assumed, in_files = _from_config(path_or_id if place is None else str(place), dtype)
        found = []
        for layer in layers:
            integers = {} if experts == "checkpoint" else in_files.integers(layer)
            found.append(_assumed_experts(layer, kept_layout(layer, integers), in_files.bits(layer)))
        found_in = f"config.json alone; {assumed}"
    else:
        opened = open_headers(place, dtype=dtype, keep="none" if on_device else keep_for(experts))
        model, layers, count = opened.model, opened.layers, len(opened.store.files)
        if experts in QUANTIZED and not (default_folder(opened.store, experts) / INDEX).is_file():
            store = kept_in(layers, opened.store, experts) or opened.store
        else:  # as `from_pretrained` does
            store = open_experts(layers, opened.store, experts, DEFAULT_CHUNK_BYTES)
        if store.hot is not None:
            store.close()
            raise ConfigError(
                f"--experts {experts} has more bits for some experts of a layer, and a plan knows layers whose experts are all "
                "alike. Plan with the form of the other experts, such as --experts int4."
            )
        found = [_stored_experts(layer, store) for layer in layers]
        form = form_in_words(layout_counts(store))
        found_in = f"the headers of {count} {kind} {'file' if count == 1 else 'files'}"
        found_in += f", experts {form}" if form else ""
    if experts in QUANTIZED and not any(one.layout.formats for one in found):
        found = experts_in(layers, FORMATS[experts])
        found_in += f", with experts in {form_in_words((one.layout, one.num_experts) for one in found)}"
    sizes = ModelSizes(
        name=path_or_id,
        model_type=model_type_of(model) or type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        layers=tuple(found),
        other_bytes=other_bytes(model, layers),
        kv=find_kv_cache(model, layers),
        found_in=found_in,
    )
    folder = Path.cwd() if place is None else place.parent if place.is_file() else place
    return ReadModel(sizes, model, layers, store, folder)


def experts_in(layers: Sequence[MoELayer], slot_format: SlotFormat) -> list[ExpertsOfLayer]:
    """Return what the experts of each layer would be in a quantised format.

    Raises:
        UnsupportedModelError: none of them can be in it.
    """
    formats = quantizable(layers, slot_format)
    return [_assumed_experts(layer, layer.layout.in_formats(formats[layer.layout]), {}) for layer in layers]


def _local_file(name: str) -> Path:
    """Return the first of the GGUF files that a name stands for. Nothing is downloaded, because that would be all of them.

    Raises:
        CheckpointError: they are not on this machine.
    """
    try:
        return find_gguf(name, {"local_files_only": True})[0]
    except CheckpointError as error:
        if os.path.exists(name):
            raise
        raise CheckpointError(
            f"{error} A plan downloads nothing, and of a GGUF file it reads the header: download the file first (hf download)."
        ) from error


def _local_folder(path_or_id: str) -> Path | None:
    """Return where the checkpoint lies; None: it is a hub id, of which nothing is here."""
    if is_folder(path_or_id):
        return Path(path_or_id)
    try:
        for name in (INDEX_NAME, WEIGHTS_NAME):
            if isinstance(found := try_to_load_from_cache(path_or_id, name), str) and _has_weights(Path(found).parent):
                return Path(found).parent
    except ValueError as error:  # no name that a hub has
        raise CheckpointError(f"There is no model '{path_or_id[:500]}': {error}") from error
    return None


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


# The linear layers of an expert that become one matrix of the model, and other names that families have for them.
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj", "w1", "w3"), "down_proj": ("down_proj", "w2")}


class _InFiles:
    """What config.json says of experts' weights in the files.

    Args:
        quantization: its `quantization_config`; None: there is none.
    """

    def __init__(self, quantization: Mapping[str, Any] | None) -> None:
        self._quantization = quantization
        self._method = None if quantization is None else SCHEMES[quantization["quant_method"]]

    def bits(self, layer: MoELayer) -> dict[str, float | None]:
        """Return the bits of a weight of each matrix; None: those of its dtype."""
        if self._method is None or self._quantization is None:
            return {}
        method, quantization = self._method, self._quantization
        return {spec.name: method.bits(quantization, _modules(layer, spec.name)) for spec in layer.layout.tensors}

    def integers(self, layer: MoELayer) -> dict[str, Integers | None]:
        """Return `Encoding.integers` of each matrix."""
        if self._method is None or self._quantization is None:
            return {}
        method, quantization = self._method, self._quantization
        return {spec.name: method.integers(quantization, _modules(layer, spec.name)) for spec in layer.layout.tensors}


def _modules(layer: MoELayer, matrix: str) -> list[str]:
    """Return the names that the first expert's linear layers may have in the files."""
    return [f"{layer.name}.0.{part}" for part in _PARTS.get(matrix, (matrix,))]


def _from_config(path_or_id: str, dtype: str | None) -> tuple[PreTrainedModel, list[MoELayer], str, _InFiles]:
    """Return the model that a configuration describes, its MoE layers, what its dtype rests on, and its weights' form."""
    try:
        config: Any = AutoConfig.from_pretrained(path_or_id, trust_remote_code=False)
        in_files = _InFiles(take_quantization(path_or_id, config))
        stated = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
        wanted: torch.dtype = getattr(torch, dtype) if dtype is not None else stated or torch.bfloat16
        assumed = "as asked" if dtype is not None else "as it says" if stated else "which does not say so: assumed"
        model_class = class_to_open(path_or_id, {"config": config})
        build = model_class.from_config if model_class is AutoModelForCausalLM else model_class._from_config
        with torch.device("meta"), _safe_on_meta():
            model: Any = build(config, dtype=wanted)
        as_loaded(model, model._get_dtype_plan(wanted))
        stated_as = f"{str(wanted).removeprefix('torch.')}, {assumed}"
        return model.eval(), find_moe_layers(model, allow_meta=True), stated_as, in_files
    except (PromoeError, MemoryError):
        raise
    except OSError as error:
        raise CheckpointError(
            f"Cannot read the configuration of {path_or_id}: {str(error)[:2000]} Give a folder with a config.json, or a hub id "
            "that can be reached."
        ) from error
    except Exception as error:  # Transformers computes with what config.json says, and so do models
        raise UnsupportedModelError(
            f"No model can be made from the config.json of {path_or_id}: {type(error).__name__}: "
            f"{str(error)[:300].removesuffix('.')}. It is damaged, or of a model that Transformers does not have."
        ) from error


def _safe_on_meta() -> AbstractContextManager[object]:
    """Return what Transformers' own `from_pretrained` uses: some models compute a number or two when they are made."""
    context: AbstractContextManager[object] = getattr(initialization, "meta_device_safe_creation_ops", nullcontext)()
    return context


def _stored_experts(layer: MoELayer, store: FileStore) -> ExpertsOfLayer:
    chunks = store.chunks(ExpertKey(layer.layer_idx, 0))
    stored = sum(sum(part.nbytes for part in chunk.parts) or chunk.source_nbytes for chunk in chunks)
    layout, chunk_bytes = store.layouts[layer.layer_idx], store.chunk_bytes(layer.layer_idx)
    return ExpertsOfLayer(layer.num_experts, layer.top_k or 1, layout, stored, chunk_bytes)


def _assumed_experts(layer: MoELayer, layout: ExpertLayout, bits: Mapping[str, float | None]) -> ExpertsOfLayer:
    """Assume what a checkpoint would have: so many bits per weight of each matrix, or as many as `layout` has."""
    tensors = layout.tensors
    stored = sum(
        tensor.nbytes
        if len(tensor.shape) < 2 or (stated := bits.get(tensor.name)) is None
        else round(math.prod(tensor.shape) * stated / 8)
        for tensor in tensors
    )
    chunks = tuple(
        nbytes
        for tensor in tensors
        for _, nbytes in split_at_pages(tensor.offset_bytes, tensor.nbytes, DEFAULT_CHUNK_BYTES)
    )
    return ExpertsOfLayer(layer.num_experts, layer.top_k or 1, layout, stored, chunks)
