"""Experts packed beforehand (`promoe.experts.kernels.packed`), in files of their own beside the checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from promoe.experts.kernels.packed import Packing
from promoe.stores.base import Store
from promoe.stores.layout import ExpertLayout
from promoe.stores.safetensors_files import SafetensorsFiles
from promoe.stores.safetensors_store import SafetensorsStore
from promoe.stores.slot_files import SlotFilesStore

Packings = Mapping[ExpertLayout, Mapping[str, Packing]]
NO_PACKINGS: Packings = MappingProxyType({})


class PackedStore(SlotFilesStore):
    """Store over the files of packed experts, one per layer.

    Takes over `files` and `plain`.

    Args:
        files: in the order of the layers.
        plain: the checkpoint that was packed; it is closed with this store.
        packings: of each layout, which tensors are packed, and how.
        chunk_bytes: longest chunk.
    """

    def __init__(self, files: SafetensorsFiles, plain: SafetensorsStore, packings: Packings, chunk_bytes: int) -> None:
        super().__init__(files, plain.layouts, plain.num_experts, chunk_bytes)
        self.plain = plain
        self.packings = packings

    def close(self) -> None:
        """Close the files, and the checkpoint's."""
        super().close()
        self.plain.close()


def packings_in(store: Store | None) -> Packings:
    """Of each layout, which tensors of its experts a store has packed, and how."""
    return store.packings if isinstance(store, PackedStore) else NO_PACKINGS
