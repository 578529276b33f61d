"""Stores: where every expert's weights always are (RAM or safetensors files), as chunks that a link can move."""

from __future__ import annotations

from promoe.stores.base import (
    Chunk,
    Store,
    convert_chunk,
    first_chunks,
    first_tensors,
    read_expert,
    split_at_pages,
)
from promoe.stores.host import HostStore
from promoe.stores.safetensors_store import SafetensorsStore

__all__ = [
    "Chunk",
    "HostStore",
    "SafetensorsStore",
    "Store",
    "convert_chunk",
    "first_chunks",
    "first_tensors",
    "read_expert",
    "split_at_pages",
]
