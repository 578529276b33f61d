"""On a real GPU: `pytest -m cuda tests/cuda`. What the tests of the double in `tests/test_on_device.py` promise, kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny_models import IMPLEMENTATIONS, build, token_ids
from torch import nn

import promoe
from promoe.errors import ConfigError, PromoeError

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIG = promoe.PromoeConfig(strict=True, governor=False, min_probability=0.3, min_group_bytes=0, chunk_bytes=4096)
NEW_TOKENS = 8


def answer(model: nn.Module, ids: torch.Tensor) -> Any:
    """Tokens and scores, on the CPU."""
    with torch.inference_mode():
        found: Any = model.generate(  # type: ignore[operator]
            input_ids=ids.to("cuda"),
            attention_mask=torch.ones_like(ids, device="cuda"),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            return_dict_in_generate=True,
            output_scores=True,
        )
    return found.sequences.cpu(), torch.stack(found.scores).cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_answers_beside_the_unmodified_model_on_the_gpu(implementation: str, dtype: torch.dtype) -> None:
    """Bits where the kernel computes an expert by itself (eager); elsewhere the distance is printed, and bounded."""
    ids = token_ids(1, 12, seed=1)
    resident = build("qwen2_moe", experts_implementation=implementation, dtype=dtype).to("cuda")
    tokens, scores = answer(resident, ids)
    model = build("qwen2_moe", experts_implementation=implementation, dtype=dtype)
    for cache in ("5%", "30%", "100%"):
        promoe.patch(model, device="cuda", cache=cache, config=CONFIG)
        found_tokens, found_scores = answer(model, ids)
        distance = float((found_scores - scores).abs().max())
        print(f"{implementation} {dtype} cache {cache}: largest difference of a score {distance:g}")
        if implementation == "eager":
            assert torch.equal(found_scores, scores)
        assert distance < (1e-3 if dtype == torch.float32 else 0.25)
        assert torch.equal(found_tokens, tokens)
        promoe.unpatch(model)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Whatever makes the host wait for the device raises, but for waiting for an event."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("tokens", [1, 5, 40, 300])
@pytest.mark.parametrize("cache", ["20%", "100%"])
@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_the_host_waits_for_ids_alone(implementation: str, cache: str, tokens: int) -> None:
    model = build("qwen3_moe", experts_implementation=implementation, dtype=torch.bfloat16, top_k=3)
    layer = promoe.find_moe_layers(model)[1]
    promoe.patch(model, device="cuda", cache=cache, predictor=None, config=CONFIG)
    hidden = torch.randn(1, tokens, 64, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        for _ in range(2):  # the first time, memory is pinned and libraries are loaded
            layer.block(hidden)
        torch.cuda.synchronize()
        with no_synchronisation():
            layer.block(hidden)
    promoe.unpatch(model)


def test_ids_that_are_changed_in_place_are_an_error() -> None:
    model = build("qwen2_moe", dtype=torch.bfloat16)
    promoe.patch(model, device="cuda", cache="30%", config=CONFIG)
    experts = promoe.find_moe_layers(model)[1].experts

    def change(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        args[1].add_(3).remainder_(8)

    hook = experts.register_forward_pre_hook(change)
    with torch.inference_mode(), pytest.raises(PromoeError, match="changed in place"):
        model(token_ids(1, 12, seed=1).to("cuda"))
    hook.remove()
    promoe.unpatch(model)


def test_experts_are_never_all_on_the_gpu() -> None:
    model = build("qwen2_moe", hidden=256, intermediate=512, num_experts=32)
    layers = promoe.find_moe_layers(model)
    experts_bytes = sum(layer.num_experts * layer.layout.slot_bytes for layer in layers)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    promoe.patch(model, device="cuda", cache="10%", config=CONFIG)
    answer(model, token_ids(1, 12, seed=1))
    rest_bytes = sum(p.nbytes for p in model.parameters() if p.is_cuda)
    peak_bytes = torch.cuda.max_memory_allocated() - before
    promoe.unpatch(model)
    assert peak_bytes < rest_bytes + 0.1 * experts_bytes + 64 * 2**20
    assert peak_bytes < experts_bytes


def test_the_experts_memory_is_pinned_while_it_is_served() -> None:
    model = build("qwen2_moe")
    parameter = promoe.find_moe_layers(model)[0].parameters()[0]
    assert not parameter.is_pinned()
    promoe.patch(model, device="cuda", config=CONFIG)
    assert parameter.is_pinned()
    promoe.unpatch(model)
    assert not parameter.is_pinned()


def test_two_threads_with_streams_of_their_own() -> None:
    ids = [token_ids(1, 12, seed=seed) for seed in (1, 2)]
    model = build("qwen2_moe", experts_implementation="eager")
    resident = build("qwen2_moe", experts_implementation="eager").to("cuda")
    expected = [answer(resident, one) for one in ids]
    promoe.patch(model, device="cuda", cache="20%", config=CONFIG)
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found[number] = answer(model, ids[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    promoe.unpatch(model)
    for number in range(2):
        assert torch.equal(found[number][1], expected[number][1])


def test_no_memory_on_the_gpu_leaves_the_model_as_it_was() -> None:
    model = build("qwen2_moe", num_experts=32)
    free_bytes = torch.cuda.mem_get_info()[0]
    hog = torch.empty(max(0, free_bytes - 2**29), dtype=torch.uint8, device="cuda")
    rest = torch.empty(2**29 - 2**26, dtype=torch.uint8, device="cuda")
    big = build("qwen2_moe", hidden=512, intermediate=2048, num_experts=32)
    with pytest.raises(ConfigError, match="Choose a smaller cache"):
        promoe.patch(big, device="cuda", cache="100%")
    assert not hasattr(big, "promoe")
    assert {parameter.device.type for parameter in big.parameters()} == {"cpu"}
    del hog, rest, model


def test_capture_is_refused() -> None:
    model = build("qwen2_moe", experts_implementation="eager")
    promoe.patch(model, device="cuda", config=CONFIG)
    experts = promoe.find_moe_layers(model)[0].experts
    hidden = torch.zeros(1, 64, device="cuda")
    index, weights = torch.zeros(1, 2, dtype=torch.long, device="cuda"), torch.ones(1, 2, device="cuda")
    graph = torch.cuda.graph(torch.cuda.CUDAGraph())
    with torch.inference_mode(), pytest.raises((PromoeError, RuntimeError)) as caught, graph:
        experts(hidden, index, weights)
    promoe.unpatch(model)
    errors = [caught.value, caught.value.__context__]
    assert any("CUDA graph was being captured" in str(error) for error in errors)
