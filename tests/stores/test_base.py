from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from promoe.errors import ConfigError
from promoe.scheduler import ExpertKey
from promoe.stores import Chunk, HostStore, convert_chunk, first_chunks, first_tensors, split_at_pages

PAGE = 4096


@given(
    start=st.one_of(st.integers(0, 50).map(lambda page: page * PAGE), st.integers(0, 200_000)),
    nbytes=st.integers(1, 400_000),
    chunk_pages=st.integers(1, 30),
)
def test_parts_cover_the_range_cut_at_pages_and_none_is_too_long(start: int, nbytes: int, chunk_pages: int) -> None:
    parts = split_at_pages(start, nbytes, chunk_pages * PAGE)
    assert parts[0][0] == 0
    assert all(before[0] + before[1] == after[0] for before, after in itertools.pairwise(parts))
    assert parts[-1][0] + parts[-1][1] == nbytes
    assert all(0 < size <= chunk_pages * PAGE for _, size in parts)
    assert all((start + offset) % PAGE == 0 for offset, _ in parts[1:])
    if start % PAGE == 0:  # no more parts than needed, and about equal ones
        assert len(parts) == -(-nbytes // (chunk_pages * PAGE))
        assert max(size for _, size in parts) - min(size for _, size in parts) < 2 * PAGE


@pytest.mark.parametrize("chunk_bytes", [0, -4096, 4095, 5000])
def test_chunk_bytes_must_be_whole_pages(chunk_bytes: int) -> None:
    with pytest.raises(ConfigError, match=rf"chunk_bytes.*multiple of 4096.*{chunk_bytes}"):
        split_at_pages(0, 100, chunk_bytes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("source_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_conversion_rounds_as_torch_does(source_dtype: torch.dtype, dtype: torch.dtype) -> None:
    source = torch.randn(1001, dtype=torch.float64).to(source_dtype)
    destination = torch.zeros(1001, dtype=dtype)
    same = dtype == source_dtype
    chunk = Chunk(
        slot_offset_bytes=0,
        nbytes=destination.nbytes,
        source_idx=0,
        source_offset_bytes=0,
        source_nbytes=source.nbytes,
        source_dtype=None if same else source_dtype,
        dtype=None if same else dtype,
    )
    convert_chunk(chunk, source.view(torch.uint8).numpy().data, destination.view(torch.uint8).numpy().data)
    assert torch.equal(destination, source.to(dtype))


def store_of(chunk_bytes: int = PAGE, **elements: int) -> HostStore:
    """Return a store of one layer with two experts whose tensors have these sizes, in bytes."""
    return HostStore(
        [{name: torch.zeros(2, count, dtype=torch.uint8) for name, count in elements.items()}], chunk_bytes
    )


@pytest.mark.parametrize(
    ("elements", "count", "names"),
    [
        ({"gate_up_proj": 3 * PAGE, "down_proj": PAGE}, 3, ("gate_up_proj",)),
        ({"gate_up_proj": 2 * PAGE, "gate_up_proj_bias": 64, "down_proj": PAGE, "down_proj_bias": 64}, 3, None),
        ({"up_proj": 100, "down_proj": 100}, 1, ("up_proj",)),
        ({"down_proj": PAGE, "up_proj": PAGE}, 0, ()),
        ({"up_proj": PAGE, "down_proj": PAGE, "up_proj_bias": 64}, 0, ()),
        ({"up_proj": PAGE}, 0, ()),
        ({"down_proj": PAGE}, 0, ()),
    ],
    ids=["in order", "with biases", "short", "last first", "last between", "no last", "nothing else"],
)
def test_what_comes_before_the_last_tensors(
    elements: dict[str, int], count: int, names: tuple[str, ...] | None
) -> None:
    store = store_of(**elements)
    key = ExpertKey(0, 0)
    assert first_chunks(store, key, "down_proj") == count
    assert first_tensors(store, key, count) == (names if names is not None else ("gate_up_proj", "gate_up_proj_bias"))
