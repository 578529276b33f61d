"""Traces of ids: read, split by prompt, and refused when they do not fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from promoe.training.routing_traces import TraceError, load_npz

from .traces import EXPERTS, LAYERS, TOP_K, random_trace, save, trace_of


def test_what_was_saved_is_read(tmp_path: Path) -> None:
    trace = random_trace()
    read = load_npz(save(trace, tmp_path / "t.npz"))
    np.testing.assert_array_equal(read.experts, trace.experts)
    np.testing.assert_array_equal(read.token_ids, trace.token_ids)
    np.testing.assert_array_equal(read.prompt_lengths, trace.prompt_lengths)
    assert (read.num_tokens, read.num_layers, read.top_k, read.num_experts) == (120, LAYERS, TOP_K, EXPERTS)


def test_a_split_is_by_prompt_in_order() -> None:
    rows = np.arange(10)[:, None, None] * np.ones((1, 1, 1), dtype=int)
    trace = trace_of(rows, np.arange(10), [1, 2, 3, 1, 3], num_experts=10)
    fit, held_out = trace.split()
    assert fit.token_ids.tolist() == list(range(7))
    assert fit.experts.ravel().tolist() == list(range(7))
    assert fit.prompt_lengths.tolist() == [1, 2, 3, 1]
    assert held_out.token_ids.tolist() == [7, 8, 9]
    assert held_out.prompt_lengths.tolist() == [3]
    assert trace.prompt_starts.tolist() == [0, 1, 3, 6, 7]


def test_the_first_tokens_are_a_trace_of_their_own() -> None:
    trace = random_trace(prompts=3, length=4)
    assert trace.first(6).prompt_lengths.tolist() == [4, 2]
    assert trace.first(8).prompt_lengths.tolist() == [4, 4]
    assert trace.first(99).prompt_lengths.tolist() == [4, 4, 4]
    np.testing.assert_array_equal(trace.first(6).experts, trace.experts[:6])
    assert trace.first(6).token_ids.tolist() == trace.token_ids[:6].tolist()


def test_the_last_tokens() -> None:
    trace = random_trace(prompts=3, length=4)
    assert trace.last(6).prompt_lengths.tolist() == [2, 4]
    assert trace.last(8).prompt_lengths.tolist() == [4, 4]
    assert trace.last(99).prompt_lengths.tolist() == [4, 4, 4]
    np.testing.assert_array_equal(trace.last(6).experts, trace.experts[-6:])
    assert trace.last(6).first_row == trace.first_row + 6


def test_one_prompt_cannot_be_split() -> None:
    with pytest.raises(TraceError, match=r"1 prompts cannot be split.*Collect more"):
        random_trace(prompts=1).split()


def test_visits_come_token_by_token_with_sorted_ids() -> None:
    trace = trace_of([[[3, 1], [0, 2]], [[5, 4], [7, 6]]], [0, 1], [2])
    assert list(trace.visits()) == [(0, 0, [1, 3]), (0, 1, [0, 2]), (1, 0, [4, 5]), (1, 1, [6, 7])]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": None}, "has no array 'experts'; it has prompt_lengths, token_index, token_strings"),
        ({"prompt_lengths": None}, "has no array 'prompt_lengths'"),
        ({"experts": np.zeros((120, 4, 2))}, "'experts' must be whole numbers, found float64"),
        (
            {"experts": np.zeros((120, 4), dtype=int)},
            r"must be \[num_tokens, num_layers, top_k\], found shape \(120, 4\)",
        ),
        ({"experts": np.zeros((0, 4, 2), dtype=int)}, "is empty"),
        ({"experts": np.zeros((120, 4, 2), dtype=int)}, "uses an expert of a layer twice"),
        ({"experts": np.tile(np.array([-1, 0]), (120, 4, 1))}, "must be 0 to 32767, found -1 to 0"),
        ({"token_index": np.zeros(119, dtype=int)}, r"120 tokens, but \(119,\) token ids"),
        ({"prompt_lengths": np.array([60, 59])}, "prompts of 119 tokens in all, but 120 rows"),
        ({"prompt_lengths": np.array([120, 0])}, "at least one token"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = save(random_trace(), tmp_path / "t.npz", **changes)
    with pytest.raises(TraceError, match=message) as raised:
        load_npz(path)
    assert str(path) in str(raised.value)


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        load_npz(tmp_path / "none.npz")
    for content in (b"", b"no archive", b"PK\x03\x04 half an archive"):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(TraceError, match=r"bad\.npz"):
            load_npz(tmp_path / "bad.npz")
    np.save(tmp_path / "array.npy", np.zeros(3))
    with pytest.raises(TraceError, match="not a NumPy archive"):
        load_npz(tmp_path / "array.npy")


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    trace, path = random_trace(prompts=100), tmp_path / "t.npz"
    np.savez_compressed(path, experts=trace.experts, prompt_lengths=trace.prompt_lengths, token_index=trace.token_ids)
    content = bytearray(path.read_bytes())
    content[100:200] = bytes(100)
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"t\.npz is not a NumPy archive"):
        load_npz(path)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    path = save(random_trace(), tmp_path / "t.npz", token_index=np.array([{"a": 1}], dtype=object))
    with pytest.raises(TraceError, match="not a NumPy archive of plain arrays"):
        load_npz(path)
