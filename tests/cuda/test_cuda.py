"""On a real GPU: `pytest -m cuda tests/cuda`. What the tests of the double in `tests/test_on_device.py` promise, kept."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import write_checkpoint
from tiny_models import IMPLEMENTATIONS, build, token_ids
from torch import nn
from transformers import AutoModelForCausalLM

import promoe
from promoe.errors import ConfigError, PromoeError
from promoe.experts.kernels import proofs
from promoe.experts.kernels.slot_windows import MAX_GROUPS, SlotOrder, is_hopper
from promoe.experts.pairs import Pairs
from promoe.transfer.devices.cuda import OWN_PAGES_BYTES
from promoe.units import aligned

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIG = promoe.PromoeConfig(
    strict=True, ablation=promoe.Ablation(governor=False), min_probability=0.3, bypass=False, chunk_bytes=4096
)
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


@pytest.fixture(scope="module")
def table() -> Iterator[list[tuple[str, ...]]]:
    """Rows that are printed when all tests of this file have run."""
    rows = [("implementation", "dtype", "cache", "prompt", "same bits", "largest difference", "same tokens")]
    yield rows
    print("\n" + "\n".join(aligned(rows)))


@pytest.mark.parametrize("length", [12, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_answers_beside_the_unmodified_model_on_the_gpu(
    implementation: str, dtype: torch.dtype, length: int, table: list[tuple[str, ...]]
) -> None:
    """Bits where the kernel computes an expert by itself (eager); elsewhere they are printed, and their distance bounded."""
    ids = token_ids(1, length, seed=1)
    sizes: dict[str, Any] = {"experts_implementation": implementation, "dtype": dtype, "max_position_embeddings": 1024}
    tokens, scores = answer(build("qwen2_moe", **sizes).to("cuda"), ids)
    model = build("qwen2_moe", **sizes)
    for cache in ("5%", "30%", "100%"):
        promoe.patch(model, device="cuda", cache=cache, config=CONFIG)
        found_tokens, found_scores = answer(model, ids)
        promoe.unpatch(model)
        same, same_tokens = torch.equal(found_scores, scores), torch.equal(found_tokens, tokens)
        # From the first token that differs on the contexts do, too.
        alike = NEW_TOKENS if same_tokens else 1 + int((found_tokens != tokens)[0, length:].int().argmax())
        distance = float((found_scores[:alike] - scores[:alike]).abs().max())
        words = tuple("yes" if one else "no" for one in (same, same_tokens))
        name = str(dtype).removeprefix("torch.")
        table.append((implementation, name, cache, str(length), words[0], f"{distance:g}", words[1]))
        if implementation == "eager":
            assert same
        assert distance < (1e-3 if dtype == torch.float32 else 0.25)
        assert same_tokens or dtype != torch.float32
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_groups_are_sorted_as_on_the_gpu() -> None:
    """From 33 pairs on torch's sort is stable there, as ours on the host is; up to 32 its order within an expert is unknown."""
    index = torch.randint(0, 4, (50, 3), generator=torch.Generator().manual_seed(0))
    pairs = Pairs(index, 4, by_choice=False, device=torch.device("cuda"))
    found = pairs.select(pairs.experts).position_tensor
    assert found.is_cuda
    assert torch.equal(found, torch.sort(index.reshape(-1).cuda()).indices)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs a grouped kernel: sm90"
)
def test_grouped_products_over_more_slots_than_the_kernel_takes() -> None:
    draw = torch.Generator("cuda").manual_seed(0)
    stack = torch.randn(2 * MAX_GROUPS, 64, 128, device="cuda", dtype=torch.bfloat16, generator=draw)
    slots, sizes = [2000, 3, MAX_GROUPS + 7, 1], [5, 1, 20, 2]
    x = torch.randn(sum(sizes), 64, device="cuda", dtype=torch.bfloat16, generator=draw)
    found = SlotOrder(slots, sizes, stack.device).multiply(x, stack)
    expected = [rows @ stack[slot] for rows, slot in zip(x.split(sizes), slots, strict=True)]
    torch.testing.assert_close(found, torch.cat(expected))


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Whatever makes the host wait for the device raises, but for waiting for an event."""
    try:
        torch.cuda.set_sync_debug_mode("error")
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


def allocated_bytes() -> int:
    """Without what libraries keep to work in, for each stream that they have worked in."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def test_experts_are_never_all_on_the_gpu_and_nothing_stays_there() -> None:
    model = build("qwen2_moe", hidden=256, intermediate=512, num_experts=128)
    layers = promoe.find_moe_layers(model)
    experts_bytes = sum(layer.num_experts * layer.layout.slot_bytes for layer in layers)
    for _ in range(2):  # the first time, libraries take memory that they keep
        gc.collect()
        before = allocated_bytes()
        torch.cuda.reset_peak_memory_stats()
        promoe.patch(model, device="cuda", cache="10%", config=CONFIG)
        answer(model, token_ids(1, 12, seed=1))
        rest_bytes = sum(p.nbytes for p in model.parameters() if p.is_cuda)
        peak_bytes = torch.cuda.max_memory_allocated() - before
        promoe.unpatch(model)
        gc.collect()
        left_bytes = allocated_bytes() - before
    mib = [f"{nbytes / 2**20:.1f} MiB" for nbytes in (peak_bytes, experts_bytes, rest_bytes, left_bytes)]
    print("peak {}, of experts {}, of the rest {}, left after unpatching {}".format(*mib))
    libraries_bytes = 80 * 2**20  # cuBLAS works in up to 32 MiB for each of two streams on this generation
    assert peak_bytes < rest_bytes + 0.1 * experts_bytes + libraries_bytes
    assert peak_bytes < experts_bytes / 2
    assert left_bytes == 0


@pytest.mark.parametrize(
    ("large", "implementation", "dtype"),
    [
        (False, "eager", torch.float32),
        (True, "eager", torch.float32),
        (True, "grouped_mm", torch.bfloat16),
        (True, "grouped_mm", torch.float32),
        (True, "batched_mm", torch.bfloat16),
    ],
)
def test_the_experts_memory_is_pinned_while_it_is_served(large: bool, implementation: str, dtype: torch.dtype) -> None:
    """Blocks with pages of their own; small ones share theirs with others, whose copies would fail, and go through buffers.

    Forwards put the copies of what is pinned into the queue themselves.
    """
    sizes: dict[str, Any] = {"experts_implementation": implementation, "dtype": dtype}
    if large:
        sizes |= {"hidden": 512, "intermediate": 2048, "num_experts": 16, "layers": 2}
    ids = token_ids(1, 12, seed=1)
    tokens, scores = answer(build("qwen2_moe", **sizes).to("cuda"), ids)
    model = build("qwen2_moe", **sizes)
    parameter = promoe.find_moe_layers(model)[0].parameters()[0]
    assert (parameter.nbytes >= OWN_PAGES_BYTES) is large
    assert not parameter.is_pinned()
    promoe.patch(model, device="cuda", cache="30%", config=CONFIG)
    assert parameter.is_pinned() is large
    assert parameter.view(-1)[-1:].is_pinned() is large
    assert model.promoe.runtime.engine.queues is large  # type: ignore[union-attr]
    found = answer(model, ids)
    promoe.unpatch(model)
    assert not parameter.is_pinned()
    assert torch.equal(found[0], tokens)
    assert torch.equal(found[1], scores)


def test_one_token_is_computed_with_the_bits_of_the_stock_kernel() -> None:
    """By fewer kernels: those of this size are proven. (`generate` decodes by batched_mm.)"""
    model = build("qwen2_moe", experts_implementation="grouped_mm", dtype=torch.bfloat16, hidden=512, intermediate=1024)
    ids = token_ids(1, 12, seed=1)
    expected = answer(copy.deepcopy(model).to("cuda"), ids)
    promoe.patch(model, device="cuda", cache="50%", config=CONFIG)
    experts = [layer.experts for layer in promoe.find_moe_layers(model)]
    found = answer(model, ids)
    promoe.unpatch(model)
    assert torch.equal(found[0], expected[0])
    if is_hopper(torch.device("cuda")):
        assert torch.equal(found[1], expected[1])
        assert [[proof.same for proof in proofs._OF_MODULES[one].values()] for one in experts] == [[True]] * len(
            experts
        )


def test_a_cache_for_all_experts_runs_the_stock_forward_on_the_gpu() -> None:
    ids = token_ids(1, 12, seed=1)
    expected = answer(build("qwen2_moe").to("cuda"), ids)
    model = build("qwen2_moe")
    experts = promoe.find_moe_layers(model)[0].parameters()[0].data_ptr()
    promoe.patch(model, device="cuda", cache="100%")
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    found = answer(model, ids)
    promoe.unpatch(model)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert promoe.find_moe_layers(model)[0].parameters()[0].data_ptr() == experts


@pytest.mark.parametrize("kept", [None, 4, 0])
def test_a_checkpoint_on_disk_through_pinned_memory(kept: int | None, tmp_path: Path) -> None:
    """All experts stay in pinned RAM, four of them, or as few as possible."""
    folder = write_checkpoint(tmp_path / "checkpoint")
    resident = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    slot_bytes = promoe.find_moe_layers(resident)[0].layout.slot_bytes
    tokens, scores = answer(resident.to("cuda"), token_ids(1, 12, seed=1))
    settings = replace(CONFIG, pinned_bytes=None if kept is None else kept * slot_bytes)
    model = promoe.from_pretrained(folder, device="cuda", cache="20%", config=settings, experts_implementation="eager")
    found = answer(model, token_ids(1, 12, seed=1))
    print(model.promoe.stats().link)  # type: ignore[union-attr]
    promoe.unpatch(model)
    assert torch.equal(found[0], tokens)
    assert torch.equal(found[1], scores)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_two_threads_with_streams_of_their_own(implementation: str) -> None:
    """Each waits for its own copies; what both get is what one alone gets."""
    ids = [token_ids(1, 12, seed=seed) for seed in (1, 2)]
    model = build("qwen2_moe", experts_implementation=implementation)
    promoe.patch(model, device="cuda", cache="20%", config=CONFIG)
    expected = [answer(model, one) for one in ids]
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
        assert torch.equal(found[number][0], expected[number][0])
        if implementation == "eager":
            assert torch.equal(found[number][1], expected[number][1])


def test_a_stream_that_is_not_the_default_one_waits_for_copies() -> None:
    ids = token_ids(1, 12, seed=1)
    model = build("qwen2_moe", experts_implementation="eager")
    tokens, scores = answer(build("qwen2_moe", experts_implementation="eager").to("cuda"), ids)
    promoe.patch(model, device="cuda", cache="5%", config=CONFIG)
    with torch.cuda.stream(torch.cuda.Stream()):
        found = answer(model, ids)
    promoe.unpatch(model)
    assert torch.equal(found[0], tokens)
    assert torch.equal(found[1], scores)


@pytest.mark.parametrize("lacking", ["slots", "the rest"])
def test_no_memory_on_the_gpu_leaves_the_model_as_it_was(lacking: str) -> None:
    """No room for the slots; or for them, but then not for everything else."""
    sizes: dict[str, Any] = {"hidden": 512, "intermediate": 1024, "num_experts": 24}
    if lacking == "the rest":
        sizes |= {"intermediate": 32, "vocab_size": 150_000}
    model, reference = build("qwen2_moe", **sizes), build("qwen2_moe", **sizes)
    torch.cuda.empty_cache()
    free_bytes = torch.cuda.mem_get_info()[0]
    hog = torch.empty(max(0, free_bytes - 2**27), dtype=torch.uint8, device="cuda")
    with pytest.raises(ConfigError, match="Choose a smaller cache"):
        promoe.patch(model, device="cuda", cache="100%", config=CONFIG)
    del hog
    torch.cuda.empty_cache()
    assert not hasattr(model, "promoe")
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert own.device.type == "cpu"
        assert not own.is_pinned()
        assert torch.equal(own, other)
    ids = token_ids(1, 12, seed=1)
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, reference(ids).logits)


def test_capture_is_refused() -> None:
    model = build("qwen2_moe", experts_implementation="eager")
    promoe.patch(model, device="cuda", config=CONFIG)
    experts = promoe.find_moe_layers(model)[0].experts
    hidden = torch.zeros(1, 64, device="cuda")
    index, weights = torch.zeros(1, 2, dtype=torch.long, device="cuda"), torch.ones(1, 2, device="cuda")
    graph = torch.cuda.graph(torch.cuda.CUDAGraph())

    def compute() -> None:
        hidden.add_(1.0)  # a graph without a kernel is warned of
        experts(hidden, index, weights)

    with torch.inference_mode(), pytest.raises((PromoeError, RuntimeError)) as caught, graph:
        compute()
    promoe.unpatch(model)
    errors = [caught.value, caught.value.__context__]
    assert any("CUDA graph was being captured" in str(error) for error in errors)
