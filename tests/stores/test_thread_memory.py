"""A thread's memory is reused from call to call, and by no other thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from promoe.stores.thread_memory import ThreadMemory


def test_a_thread_gets_the_same_memory_again_while_it_is_large_enough() -> None:
    memory = ThreadMemory()
    large = memory.of((8, 4), torch.float32)
    assert (large.shape, large.dtype) == ((8, 4), torch.float32)
    small = memory.of((3,), torch.int16)
    assert small.data_ptr() == large.data_ptr()
    assert memory.of((9, 4), torch.float32).untyped_storage().nbytes() == 9 * 4 * 4


def test_each_thread_has_its_own() -> None:
    memory = ThreadMemory()
    mine = memory.of((4,), torch.uint8).fill_(1)
    with ThreadPoolExecutor(1) as other:
        theirs = other.submit(lambda: memory.of((4,), torch.uint8).fill_(2)).result()
    assert mine.tolist() == [1] * 4
    assert theirs.tolist() == [2] * 4


def test_memory_first_asked_for_in_inference_mode_can_be_written_outside_of_it() -> None:
    memory = ThreadMemory()
    with torch.inference_mode():
        memory.of((4,), torch.uint8).zero_()
    assert memory.of((4,), torch.uint8).add_(1).tolist() == [1] * 4
