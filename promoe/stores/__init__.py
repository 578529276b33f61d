"""Stores: where every expert's weights always are (RAM or a checkpoint's files), as chunks that a link can move.

    base                what a store is, and what a chunk is
    host                experts in RAM: the model's own tensors
    file_store          experts in the files of a checkpoint
    slot_files          experts in files of their own, as they lie in a slot
    layout              where the tensors of one expert lie in a slot; `slot_format` says how a matrix lies there
    checkpoint_names    which tensors of a checkpoint become which parameter of the model
    checkpoint_plan     which byte range of which file holds which piece of which expert
    encodings/          how checkpoints keep weights in fewer bits
    expert_conversion   converts experts that a checkpoint holds in another form, as they arrive
    open_files          keeps files open, and no more of them than the process may have
    fingerprint         notices when a file has changed since it was opened

Stores know bytes and offsets. They do not know slots or policies.
"""

from __future__ import annotations

from promoe.stores.base import (
    Chunk,
    HotLayouts,
    Store,
    convert_chunk,
    first_chunks,
    first_tensors,
    kinds,
    layout_counts,
    layout_of,
    longest_chunk,
    read_expert,
    split_at_pages,
)
from promoe.stores.file_store import FileStore
from promoe.stores.host import HostStore

__all__ = [
    "Chunk",
    "FileStore",
    "HostStore",
    "HotLayouts",
    "Store",
    "convert_chunk",
    "first_chunks",
    "first_tensors",
    "kinds",
    "layout_counts",
    "layout_of",
    "longest_chunk",
    "read_expert",
    "split_at_pages",
]
