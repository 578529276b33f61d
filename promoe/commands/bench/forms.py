"""Experts in the forms that systems ask for, such as `gate:int4`: written if they are not there, at equal memory."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import torch

from promoe.commands.bench.messages import Sizes
from promoe.commands.bench.peers import prepare_gguf
from promoe.commands.bench.systems import EXACT, FROM_GGUF, System
from promoe.commands.terminal import bytes_bar
from promoe.errors import ConfigError
from promoe.experts.kernels.formats import FORMATS
from promoe.model.opening import OpenedModel, open_headers
from promoe.model.quantizing import write_quantized
from promoe.model.slot_folders import default_folder, open_experts
from promoe.model.slot_index import INDEX
from promoe.runtime.sizes import CacheSize, slots_per_layer
from promoe.stores.layout import DEFAULT_CHUNK_BYTES
from promoe.units import format_memory

SlotBytes = Mapping[str, Sequence[int]]
"""Form of the experts -> bytes of a slot of each MoE layer."""


def prepare_forms(
    systems: Sequence[System], checkpoint: Path, dtype: torch.dtype, folder: Callable[[System], Path]
) -> SlotBytes:
    """Return the bytes of a slot in each form that systems ask for. Experts that are not there in a form are written.

    Args:
        systems: all of them.
        checkpoint: folder of the model. A form is beside its files, as `promoe quantize` writes it.
        dtype: of the weights.
        folder: returns that of a system's GGUF file.

    Raises:
        ConfigError: experts in a form do not fit this checkpoint, machine or dtype, or cannot be written.
        UnsupportedModelError: the model's experts cannot be kept in a form.
        CheckpointError: the checkpoint cannot be read.
    """
    found: dict[str, list[int]] = {}
    for system in systems:
        form = system.experts
        if system.is_peer or form in found:
            continue
        if system.gguf_type is None:
            found[form] = _prepare(form, checkpoint, dtype)
        else:
            path = prepare_gguf(system.gguf_type, dtype, checkpoint, folder(system))
            found[form] = _prepare(FROM_GGUF[form][1], path, dtype, is_gguf=True)
    return found


def _prepare(form: str, checkpoint: Path, dtype: torch.dtype, *, is_gguf: bool = False) -> list[int]:
    opened = open_headers(checkpoint, dtype=dtype)
    with closing(opened.store):
        if form != EXACT and not is_gguf and not (default_folder(opened.store, form) / INDEX).is_file():
            _write(form, opened)
        with closing(open_experts(opened.layers, opened.store, form, DEFAULT_CHUNK_BYTES)) as store:
            return [layout.slot_bytes for layout in store.layouts]


def _write(form: str, opened: OpenedModel) -> None:
    folder = default_folder(opened.store, form)
    with bytes_bar(f"writing {form}") as progress:
        # Rounding to nearest: other methods take much longer, and what they write takes the same time to read and compute.
        done = write_quantized(opened.layers, opened.store, folder, FORMATS[form], progress=progress)
    print(
        f"The experts were not there in {form}: {format_memory(done.nbytes)} were written into {folder}, rounded to nearest. "
        "`promoe quantize` has other methods.",
        file=sys.stderr,
    )


def cache_of(system: System, cache: str, budget_bytes: int, slot_bytes: Sequence[int], sizes: Sizes) -> CacheSize:
    """Return the size of a system's cache, in no more memory than the systems in 16 bits have that share their slots.

    Args:
        system: one of this library's.
        cache: what was asked for. "2 per layer" is taken at its word in every form.
        budget_bytes: bytes of the slots of such a cache in 16 bits.
        slot_bytes: bytes of a slot of each MoE layer, in the form of the system.
        sizes: of the model.

    Raises:
        ConfigError: there is no room for a slot per layer.
    """
    if system.slots == "one token":
        return min(budget_bytes, _bytes_of(max(sizes.top_k), slot_bytes, sizes))
    if system.slots == "one layer":
        return min(budget_bytes, _bytes_of(max(sizes.num_experts), slot_bytes, sizes))
    if slots_per_layer(cache) is not None:
        return cache
    if system.slots == "per layer":
        if budget_bytes < sum(slot_bytes):
            raise ConfigError(
                f"The system {system.name!r} needs a slot for each layer, {format_memory(sum(slot_bytes))}, and a cache of "
                f"{cache} has {format_memory(budget_bytes)}. Ask for a larger --cache."
            )
        return f"{budget_bytes // sum(slot_bytes)} per layer"
    return budget_bytes if system.is_quantised else cache


def _bytes_of(num_slots: int, slot_bytes: Sequence[int], sizes: Sizes) -> int:
    """Return the bytes of a shared cache that has so many slots for the experts of every layer."""
    total_bytes, counts = 0, Counter[int]()  # layers with slots of one size share them
    for nbytes, count in zip(slot_bytes, sizes.num_experts, strict=True):
        total_bytes += nbytes * count
        counts[nbytes] += count
    return math.ceil(total_bytes * num_slots / min(counts.values()))
