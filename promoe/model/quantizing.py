"""Write the experts of a checkpoint in fewer bits (`promoe quantize`), and measure how much they change."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from promoe.errors import UnsupportedModelError
from promoe.experts.kernels.formats import Formats, SlotFormat, formats_of, matrices
from promoe.experts.kernels.int4 import GROUPS, Int4Format
from promoe.experts.kernels.quantized import Quantized
from promoe.experts.moe_layers import MoELayer
from promoe.model.file_tensors import Progress
from promoe.model.packing import properties, stored_bytes
from promoe.model.slot_folders import write_slots
from promoe.model.slot_index import HotFormats
from promoe.scheduler import ExpertKey
from promoe.stores.file_store import FileStore
from promoe.stores.slot_format import MatrixFormat
from promoe.units import format_memory

logger = logging.getLogger(__name__)


@dataclass
class Quantization:
    """What was written.

    Attributes:
        nbytes: of all experts in the folder, in slots.
        plain_bytes: of all experts in slots, as the model has them.
        errors: for each layer that was written by this call, by name: `norm(quantised - original) / norm(original)` over
            all its matrices.
        plain: names of matrices that stayed as they are.
    """

    nbytes: int = 0
    plain_bytes: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)


class Hot(NamedTuple):
    """Experts that are kept in another format, with more bits, and that format."""

    experts: frozenset[ExpertKey]
    slot_format: SlotFormat


def write_quantized(
    layers: Sequence[MoELayer],
    store: FileStore,
    folder: Path,
    slot_format: SlotFormat,
    method: str = "rtn",
    progress: Progress | None = None,
    hot: Hot | None = None,
) -> Quantization:
    """Write the experts of a checkpoint into `folder` in a quantised format (see `write_slots`), or, with `hot`, in two.

    Raises:
        UnsupportedModelError: no matrix of this model can be quantised.
        ConfigError: there is too little disk space, or the folder cannot be written.
        CheckpointError: an expert cannot be read, or has NaN or infinity.
    """
    formats = quantizable(layers, slot_format)
    of_hot = None if hot is None else HotFormats(hot.experts, quantizable(layers, hot.slot_format))
    _warn_twice(layers, store)
    squares: dict[str, list[float]] = {}

    def encode(layer: MoELayer, name: str, matrix: torch.Tensor, matrix_format: MatrixFormat) -> torch.Tensor:
        assert isinstance(matrix_format, Quantized), matrix_format
        content = matrix_format.quantize(matrix, method)
        original = matrix.float()
        error = matrix_format.view(content).dense().float().sub_(original)
        sums = squares.setdefault(layer.name, [0.0, 0.0])
        sums[0] += float(torch.linalg.vector_norm(error)) ** 2
        sums[1] += float(torch.linalg.vector_norm(original)) ** 2
        return content

    nbytes = write_slots(layers, store, folder, formats, encode, method, progress, of_hot)
    return Quantization(
        nbytes=nbytes,
        plain_bytes=sum(layer.num_experts * layer.layout.slot_bytes for layer in layers),
        errors={name: (error / max(total, 1e-30)) ** 0.5 for name, (error, total) in squares.items()},
        plain=sorted(
            {
                spec.name
                for layer in layers
                for spec in layer.layout.tensors
                for made in (formats, *(() if of_hot is None else (of_hot.formats,)))
                if len(spec.shape) == 2 and spec.name not in made[layer.layout]
            }
        ),
    )


def quantizable(layers: Sequence[MoELayer], slot_format: SlotFormat) -> Formats:
    """Return the matrices that can be kept in a quantised format.

    Raises:
        UnsupportedModelError: there are none.
    """
    formats = formats_of(layers, slot_format)
    if not any(formats.values()):
        _check_group(layers, slot_format)
        raise UnsupportedModelError(
            f"No expert of this model can be kept in {slot_format.name}. That needs matrices in bfloat16 "
            "(dtype=torch.bfloat16, --dtype bfloat16) whose sizes are multiples of 64 and of the group, and experts that "
            f"Transformers' own kernels compute. Found {properties(layers)}. Run the model with its experts as they are."
        )
    return formats


def _check_group(layers: Sequence[MoELayer], slot_format: SlotFormat) -> None:
    """Raise UnsupportedModelError if another size of groups would do."""
    if not isinstance(slot_format, Int4Format):
        return
    fitting = [group for group in GROUPS if any(formats_of(layers, Int4Format(slot_format.bits, group)).values())]
    if fitting:
        every = {spec.shape[0 if transposed else 1] for layer in layers for spec, transposed in matrices(layer)}
        inputs = sorted(size for size in every if size % slot_format.group)
        raise UnsupportedModelError(
            f"No matrix of an expert of this model has inputs in groups of {slot_format.group}: they have "
            f"{' or '.join(map(str, inputs))} inputs, which is no multiple of {slot_format.group}. Groups of "
            f"{' or '.join(map(str, fitting))} fit (--group)."
        )


def _warn_twice(layers: Sequence[MoELayer], store: FileStore) -> None:
    layer = layers[0]
    nbytes = stored_bytes(layer, store)
    if nbytes < layer.layout.payload_bytes:
        logger.warning(
            "The experts of this checkpoint are in fewer bits already (%s each, %s in %s). Quantising them again adds a second "
            "error.",
            format_memory(nbytes),
            format_memory(layer.layout.payload_bytes),
            str(layer.layout.tensors[0].dtype).removeprefix("torch."),
        )
