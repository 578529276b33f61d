"""Read experts from a store into ordinary tensors, as Transformers would have loaded them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from promoe.errors import CheckpointError
from promoe.experts.adapters.base import is_buffer, set_tensor
from promoe.experts.moe_layers import MoELayer
from promoe.model.file_tensors import Progress
from promoe.scheduler import ExpertKey
from promoe.stores import Store
from promoe.stores.base import read_expert

# Threads that read when all experts are loaded: enough to keep one disk busy.
LOADING_THREADS = 2


def load_all_experts(layers: Sequence[MoELayer], store: Store, progress: Progress | None = None) -> None:
    """Replace every guarded expert parameter by a real one that is read from the store, or change nothing.

    Raises:
        CheckpointError: an expert cannot be read.
    """
    for layer, bank in zip(layers, read_all_experts(layers, store, progress), strict=True):
        # Guards do not know whether the weights would be trained, so this is taken from the gate beside them.
        requires_grad = any(parameter.requires_grad for parameter in layer.gate.parameters())
        for path, loaded in bank.items():
            keep = is_buffer(layer.experts, path)
            set_tensor(layer.experts, path, loaded if keep else nn.Parameter(loaded, requires_grad))


def read_all_experts(
    layers: Sequence[MoELayer], store: Store, progress: Progress | None = None
) -> list[dict[str, torch.Tensor]]:
    """Return, for each layer, a tensor for each of its paths. Changes nothing.

    Raises:
        CheckpointError: an expert cannot be read.
    """
    banks, done_bytes = [], 0
    for layer in layers:
        try:
            banks.append(_read_layer(layer, store))
        except OSError as error:
            raise CheckpointError(
                f"The experts of {layer.name!r} could not be read: {error}. Nothing was changed. Remove the cause and try "
                "again."
            ) from error
        done_bytes += layer.num_experts * layer.layout.payload_bytes
        if progress is not None:
            progress(done_bytes, store.expert_bytes)
    return banks


def _read_layer(layer: MoELayer, store: Store) -> dict[str, torch.Tensor]:
    """Return a tensor for each of the layer's paths, by path."""
    loaded: dict[str, torch.Tensor] = {}
    rows: dict[str, torch.Tensor | list[torch.Tensor]] = {}
    with torch.inference_mode(False):  # the caller may be in inference mode, and ordinary tensors are needed
        for tensor in layer.tensors:
            # Zeros, because a stack may have rows that belong to no expert.
            parts = [torch.zeros(tensor.stack_shape, dtype=tensor.dtype) for _ in tensor.paths]
            loaded |= zip(tensor.paths, parts, strict=True)
            rows[tensor.name] = tensor.split(parts, layer.num_experts)

    def load(expert_idx: int) -> None:
        slot = memoryview(bytearray(layer.layout.slot_bytes))
        read_expert(store, ExpertKey(layer.layer_idx, expert_idx), slot)
        for spec in layer.layout.tensors:
            source = torch.frombuffer(
                slot, dtype=spec.dtype, count=spec.nbytes // spec.dtype.itemsize, offset=spec.offset_bytes
            )
            rows[spec.name][expert_idx].copy_(source.view(spec.shape))

    with ThreadPoolExecutor(LOADING_THREADS, thread_name_prefix="promoe-load") as threads:
        list(threads.map(load, range(layer.num_experts)))
    return loaded
