"""Files in which the experts' slots follow one another: their header, and the store over them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from promoe.scheduler import ExpertKey
from promoe.stores.base import HotLayouts, kinds, layout_of, longest_chunk, read_expert
from promoe.stores.layout import PAGE_BYTES, ExpertLayout
from promoe.stores.slot_files import SlotFilesStore, header_of, in_kinds, layer_path, write_layer
from promoe.stores.tensor_files import TensorFiles

LAYOUT = ExpertLayout.of(
    {"first": ((300, 64), torch.float32), "bias": ((7,), torch.float16), "second": ((5, 3), torch.int8)}
)


@pytest.mark.parametrize("length", [0, 1, 4000, 4080, 4096, 9000])
def test_slots_begin_at_a_page_whatever_the_header_says(length: int, tmp_path: Path) -> None:
    header = header_of({"note": "x" * length}, 2, LAYOUT)
    assert len(header) % PAGE_BYTES == 0
    path = tmp_path / "layer.safetensors"
    write_layer(path, header, [bytearray([number] * LAYOUT.slot_bytes) for number in (1, 2)])
    slots = load_file(path)["slots"]  # by others, too
    assert slots.shape == (2, LAYOUT.slot_bytes)
    assert slots.unique(dim=1).flatten().tolist() == [1, 2]


@pytest.mark.parametrize("chunk_bytes", [4096, 65536, 2**20])
def test_experts_are_read_as_they_were_written(chunk_bytes: int, tmp_path: Path) -> None:
    generator, counts = torch.Generator().manual_seed(0), (3, 2)
    written = {}
    for layer_idx, count in enumerate(counts):
        slots = []
        for expert_idx in range(count):
            slot = bytearray(LAYOUT.slot_bytes)
            for spec in LAYOUT.tensors:
                values = torch.randint(256, (spec.nbytes,), dtype=torch.uint8, generator=generator)
                slot[spec.offset_bytes : spec.end_bytes] = values.numpy().data
            written[ExpertKey(layer_idx, expert_idx)] = bytes(slot)
            slots.append(slot)
        write_layer(layer_path(tmp_path, layer_idx), header_of({}, count, LAYOUT), slots)
    files = TensorFiles.open([layer_path(tmp_path, layer_idx) for layer_idx in range(len(counts))])
    store = SlotFilesStore(files, [LAYOUT] * len(counts), counts, chunk_bytes)
    for key, slot in written.items():
        found = bytearray(LAYOUT.slot_bytes)
        read_expert(store, key, memoryview(found))
        assert bytes(found) == slot
        sizes = [chunk.nbytes for chunk in store.chunks(key)]
        assert sum(sizes) == LAYOUT.payload_bytes
        assert max(sizes) <= chunk_bytes
        assert tuple(sizes) == store.chunk_bytes(key.layer_idx)
    assert store.expert_bytes == LAYOUT.payload_bytes * sum(counts)
    store.close()


def test_who_reads_a_file_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    stores = []
    for number in (1, 2):
        write_layer(path, header_of({}, 1, LAYOUT), [bytearray([number] * LAYOUT.slot_bytes)])
        stores.append(SlotFilesStore(TensorFiles.open([path]), [LAYOUT], [1], 4096))
    for (number, store), again in itertools.product(enumerate(stores, 1), range(2)):
        slot = bytearray(LAYOUT.slot_bytes)
        read_expert(store, ExpertKey(0, 0), memoryview(slot))
        assert slot[0] == number, again
    for store in stores:
        store.close()


HOT_LAYOUT = ExpertLayout.of({"first": ((300, 64), torch.float64), "second": ((5, 3), torch.float32)})


def test_hot_experts_are_read_from_where_they_are(tmp_path: Path) -> None:
    """The number of an expert is not its place: the hot ones are elsewhere."""
    hot = HotLayouts(frozenset([ExpertKey(0, 1), ExpertKey(0, 3), ExpertKey(1, 0)]), [HOT_LAYOUT] * 2)
    counts = (5, 2)
    for layer_idx, count in enumerate(counts):
        ordinary, of_hot = in_kinds(layer_idx, count, hot.experts)
        slots = [bytearray([idx] * HOT_LAYOUT.slot_bytes) for idx in of_hot]
        slots += [bytearray([idx] * LAYOUT.slot_bytes) for idx in ordinary]
        write_layer(layer_path(tmp_path, layer_idx), header_of({}, count, LAYOUT, len(of_hot), HOT_LAYOUT), slots)
    others = load_file(layer_path(tmp_path, 0))
    assert {name: tensor[:, 0].tolist() for name, tensor in others.items()} == {"slots": [0, 2, 4], "hot_slots": [1, 3]}
    files = TensorFiles.open([layer_path(tmp_path, layer_idx) for layer_idx in range(len(counts))])
    store = SlotFilesStore(files, [LAYOUT] * len(counts), counts, 8192, hot=hot)
    for layer_idx, count in enumerate(counts):
        for expert_idx in range(count):
            key = ExpertKey(layer_idx, expert_idx)
            layout = HOT_LAYOUT if key in hot.experts else LAYOUT
            assert layout_of(store, key) == layout
            slot = bytearray(layout.slot_bytes)
            read_expert(store, key, memoryview(slot))
            assert all(
                slot[spec.offset_bytes : spec.end_bytes] == bytes([expert_idx] * spec.nbytes) for spec in layout.tensors
            )
    assert store.num_experts == counts
    assert store.expert_bytes == 4 * LAYOUT.payload_bytes + 3 * HOT_LAYOUT.payload_bytes
    assert [kinds(store, layer_idx) for layer_idx in (0, 1)] == [[(0, 0), (0, 1)], [(1, 1), (1, 0)]]
    assert longest_chunk(store) == max(chunk.nbytes for chunk in store.chunks(ExpertKey(0, 1)))
    store.close()
