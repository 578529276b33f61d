"""The space that a thread keeps."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from promoe.experts import scratch as part_space
from promoe.experts.scratch import PartSpace


def test_a_thread_keeps_its_space_unless_it_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_space, "_kept", threading.local())
    monkeypatch.setattr(part_space, "KEPT_BYTES", 4 * 1000 * 8)

    def address(num_rows: int) -> int:
        space = PartSpace(num_rows, 2, 4, 2, torch.float32)
        of_hidden, first, begun = space.of(num_rows)
        assert (of_hidden.shape, first.shape, begun.shape) == ((num_rows, 2), (num_rows, 4), (num_rows, 2))
        for i, tensor in enumerate((of_hidden, first, begun)):
            tensor.fill_(i)
        assert [int(tensor.sum()) for tensor in (of_hidden, first, begun)] == [0, 4 * num_rows, 4 * num_rows]
        assert PartSpace(num_rows, 2, 4, 2, torch.float32).of(num_rows)[0].data_ptr() != of_hidden.data_ptr()  # in use
        space.release()
        return of_hidden.data_ptr()

    kept = address(900)
    assert address(900) == address(10) == kept
    assert address(1001) != kept
    assert address(900) == kept
    with ThreadPoolExecutor(1) as other:
        assert other.submit(address, 900).result() != kept
