"""The promise: whatever the cache size, policy, predictor, timing and order, no bit differs from the unmodified model.

This table is complete in families, experts implementations and dtypes; `test_identity_drawn` draws the rest.
"""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from served import PROMPTS, LinkOver, config, delayed, expected, greedy, plain_link, poison_free_slots, served, stock
from tiny_models import IMPLEMENTATIONS, MOE_FAMILIES, build
from transformers import PreTrainedModel

import promoe
from promoe.links import HostLink
from promoe.stores import Chunk

DTYPES = (torch.float32, torch.bfloat16)
CASES = (
    (1, "padded"),
    (2, "one"),
    ("top-k", "padded"),
    ("25%", "one"),
    ("25%", "padded"),
    ("50%", "one"),
    ("100%", "padded"),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_every_cache_size(family: str, implementation: str, dtype: torch.dtype) -> None:
    for cache, prompt in CASES:
        with served(family, dtype, implementation, cache=cache) as model:
            found = greedy(model, PROMPTS[prompt])
            found.assert_equals(expected(family, dtype, implementation, prompt))


@pytest.mark.parametrize("store", ["host", "file"])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_generate_gives_the_same_tokens(family: str, store: str) -> None:
    prompt = PROMPTS["padded"]
    wanted = stock(family).generate(**prompt, max_new_tokens=6, do_sample=False)
    with served(family, store=store, predictor="gate") as model:
        found = model.generate(**prompt, max_new_tokens=6, do_sample=False)
        assert torch.equal(found, wanted)
        assert model.promoe.stats().decode.passes == 5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_real_shapes(threads: int, dtype: torch.dtype) -> None:
    """Hidden 2,048 and intermediate 1,408, as DeepSeek-V2-Lite and Qwen1.5-MoE have: kernels take other paths there."""
    model = real_shapes(dtype)
    torch.set_num_threads(threads)  # the fixture of all tests sets it back
    for implementation in IMPLEMENTATIONS:
        model.set_experts_implementation(implementation)
        for prompt in ("one", "padded"):
            wanted = greedy(model, PROMPTS[prompt], new_tokens=1)
            promoe.patch(model, cache="50%", predictor=None, link=LinkOver(plain_link), config=config())
            try:
                poison_free_slots(model.promoe.runtime.engine)
                greedy(model, PROMPTS[prompt], new_tokens=1).assert_equals(wanted)
            finally:
                promoe.unpatch(model)


@functools.cache
def real_shapes(dtype: torch.dtype) -> PreTrainedModel:
    return build("qwen2_moe", dtype=dtype, hidden=2048, intermediate=1408, num_experts=4, top_k=2, layers=1)


def test_two_threads_on_one_model() -> None:
    prompts = ("one", "padded")
    wanted = {prompt: expected("qwen2_moe", torch.float32, "grouped_mm", prompt) for prompt in prompts}
    with served("qwen2_moe", cache=2, predictor="gate", link=delayed(1)) as model:
        together = threading.Barrier(2)

        def run(prompt: str) -> None:
            torch.set_num_threads(1)
            for _ in range(4):
                together.wait(60)
                greedy(model, PROMPTS[prompt]).assert_equals(wanted[prompt])

        with ThreadPoolExecutor(2) as threads:
            for result in [threads.submit(run, prompt) for prompt in prompts]:
                result.result(120)


def test_two_models_in_one_process() -> None:
    with served("qwen2_moe", cache=2, predictor="random") as one, served("qwen3_moe", cache="25%") as two:
        for _ in range(2):
            for model, family in ((one, "qwen2_moe"), (two, "qwen3_moe")):
                wanted = expected(family, torch.float32, "grouped_mm", "one")
                greedy(model, PROMPTS["one"]).assert_equals(wanted)


def test_file_and_host_store_of_one_model_side_by_side() -> None:
    wanted = expected("mixtral", torch.float32, "grouped_mm", "one")
    with served("mixtral", store="file", cache=3) as one, served("mixtral", cache=1) as two:
        for model in (one, two, one):
            greedy(model, PROMPTS["one"]).assert_equals(wanted)


def test_a_slot_that_lost_a_chunk_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own eyes: a link that forgets one chunk must not pass for bit-identical."""

    class Forgetful(HostLink):
        def transfer(self, chunk: Chunk, destination: memoryview, address: int) -> None:
            if chunk.source_offset_bytes:
                super().transfer(chunk, destination, address)

    with served("qwen2_moe", link=LinkOver(Forgetful)) as model:
        found = greedy(model, PROMPTS["one"])
        with pytest.raises(AssertionError):
            found.assert_equals(expected("qwen2_moe", torch.float32, "grouped_mm", "one"))
