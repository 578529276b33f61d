"""Which experts are worth packing for this processor, and packing them (`promoe pack`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from promoe.errors import UnsupportedModelError
from promoe.experts.kernels.formats import FORMATS, Formats, SlotFormat, formats_in, formats_of
from promoe.experts.kernels.gain import gain_of
from promoe.experts.moe_layers import MoELayer
from promoe.model.file_tensors import Progress
from promoe.model.slot_folders import write_slots
from promoe.model.slot_index import INDEX
from promoe.scheduler import ExpertKey
from promoe.stores.file_store import FileStore
from promoe.stores.slot_format import MatrixFormat
from promoe.units import format_memory

PACKED = "packed"
# A smaller gain could be noise in the measured times.
LEAST_GAIN = 1.05


def packable(layers: Sequence[MoELayer], store: FileStore) -> Formats:
    """Return what `write_packed` would pack; nothing if it would raise, or if the experts are in a slot format already."""
    if formats_in(store.layouts):
        return {}
    try:
        return _worth_packing(layers, store, FORMATS[PACKED])
    except UnsupportedModelError:
        return {}


def write_packed(
    layers: Sequence[MoELayer],
    store: FileStore,
    folder: Path,
    progress: Progress | None = None,
    slot_format: str = PACKED,
) -> int:
    """Pack the experts of a checkpoint into `folder` (see `write_slots`), and return the number of bytes written.

    Args:
        layers: the model's MoE layers.
        store: the checkpoint's experts.
        folder: created if it does not exist.
        progress: called as `progress(done_bytes, total_bytes)`.
        slot_format: a key of `FORMATS`, of a format that is exact.

    Raises:
        UnsupportedModelError: no matrix of this model can be packed on this machine, or packing makes none faster.
        ConfigError: there is too little disk space, or the folder cannot be written.
        CheckpointError: an expert cannot be read.
    """
    try:
        formats = _worth_packing(layers, store, FORMATS[slot_format])
    except UnsupportedModelError as error:
        if (folder / INDEX).is_file():
            raise UnsupportedModelError(
                f"{error} The experts that were packed into {folder} before are still used: delete that folder."
            ) from error
        raise
    return write_slots(layers, store, folder, formats, _pack, slot_format, progress)


def _worth_packing(layers: Sequence[MoELayer], store: FileStore, slot_format: SlotFormat) -> Formats:
    possible = formats_of(layers, slot_format)
    if not any(possible.values()):
        raise UnsupportedModelError(
            "No expert of this model can be packed on this machine. Packing needs matrices in bfloat16 of at most 64 MiB whose "
            "sizes are multiples of 64, experts that run with experts_implementation='grouped_mm', and a processor and build "
            "of torch whose oneDNN has its own layout for matrices and computes one token's row with the same bits. Found "
            f"{properties(layers)}. Run the model without packing."
        )
    _check_stored(layers, possible, store)
    found = {
        layout: {name: matrix for name, matrix in matrices.items() if gain_of(matrix) >= LEAST_GAIN}
        for layout, matrices in possible.items()
    }
    if not any(found.values()):
        raise UnsupportedModelError(
            "Packing this model's experts gains nothing on this machine. Measured speedup of one token's product by packed "
            f"matrices: {gains_in_words(possible)}; packing is worth it from {LEAST_GAIN} on. "
            f"Found {properties(layers)}. Run the model without packing."
        )
    return {layout: matrices for layout, matrices in found.items() if matrices}


def gains_in_words(formats: Formats) -> str:
    """Return the speedup of the products by each tensor, as text."""
    gains = {(name, gain_of(matrix)) for matrices in formats.values() for name, matrix in matrices.items()}
    return ", ".join(f"{name} {times:.2f}" for name, times in sorted(gains))


def properties(layers: Sequence[MoELayer]) -> str:
    """Return the properties of the model and of torch that slot formats depend on, as text."""
    matrices = {
        f"{spec.name} {' x '.join(map(str, spec.shape))} in {str(spec.dtype).removeprefix('torch.')}": None
        for layer in layers
        for spec in layer.layout.tensors
        if len(spec.shape) == 2
    }
    how = sorted({layer.implementation for layer in layers})
    return f"{', '.join(matrices)}; {' and '.join(how)}; torch with {torch.backends.cpu.get_cpu_capability()}"


def stored_bytes(layer: MoELayer, store: FileStore) -> int:
    """Return the size of an expert in the checkpoint's files, in bytes."""
    return sum(chunk.source_nbytes for chunk in store.chunks(ExpertKey(layer.layer_idx, 0)))


def _check_stored(layers: Sequence[MoELayer], formats: Formats, store: FileStore) -> None:
    """Raise UnsupportedModelError if packed experts would be larger than they are in the checkpoint."""
    for layer in layers:
        packed_bytes = layer.layout.in_formats(formats.get(layer.layout, {})).payload_bytes
        nbytes = stored_bytes(layer, store)
        if nbytes < packed_bytes:
            raise UnsupportedModelError(
                f"The experts of {layer.name!r} take {format_memory(nbytes)} each in the checkpoint (in fewer bits), and "
                f"would take {format_memory(packed_bytes)} packed. Reading them would take longer than packing "
                "saves. Run the model without packing."
            )


def _pack(layer: MoELayer, name: str, matrix: torch.Tensor, matrix_format: MatrixFormat) -> torch.Tensor:
    packed = matrix_format.pack(matrix)
    if not torch.equal(matrix_format.view(packed).dense().view(torch.int16), matrix.view(torch.int16)):
        raise UnsupportedModelError(
            f"{name} {list(matrix.shape)} of {layer.name!r} changes on this machine when it is packed and unpacked. This is a "
            f"fault of this version of torch ({torch.__version__}). Run the model without packing."
        )
    return packed
