"""The promise: whatever the cache size, policy, predictor, timing and order, no bit differs from the unmodified model.

These tables are complete in families, experts implementations and dtypes, and in policies and predictions;
`test_identity_drawn` draws the rest.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from served import (
    DISTURBANCES,
    EVICTIONS,
    PREDICTORS,
    PROMPTS,
    TOP_K,
    LinkOver,
    Outputs,
    check_integrity,
    close,
    config,
    copying_link,
    delayed,
    disturb,
    expected,
    greedy,
    load_stock,
    plain_link,
    predictor_of,
    record,
    resident,
    served,
    stock,
)
from tiny_models import IMPLEMENTATIONS, MOE_FAMILIES, build, left_padded, token_ids
from transformers import PreTrainedModel

import promoe
from promoe.experts.combine import WeightedSum
from promoe.stores import Chunk, Store
from promoe.transfer.links import Fault, FaultyLink, HostLink, Link
from promoe.transfer.rows import ExpertRows

DTYPES = (torch.float32, torch.bfloat16)
# Cache, prompt, store, and whether forwards copy short chunks themselves.
CASES = (
    (1, "padded", "host", False),
    (2, "one", "host", True),
    ("top-k", "padded", "host", False),
    ("25%", "one", "host", False),
    ("25%", "padded", "file", True),
    ("50%", "one", "file", False),
    ("50%", "one", "host", True),
    ("1 per layer", "padded", "host", False),
    ("3 per layer", "one", "file", True),
    ("100%", "padded", "host", False),
)


def tables() -> list[Any]:
    """Each family, implementation and dtype with every other case in the default tests, and with all in the slow ones."""
    found = []
    for number, (family, implementation, dtype) in enumerate(product(MOE_FAMILIES, IMPLEMENTATIONS, DTYPES)):
        label = f"{family}-{implementation}-{dtype}".replace("torch.", "")
        found.append(pytest.param(family, implementation, dtype, CASES[number // 2 % 2 :: 2], id=label))
        found.append(pytest.param(family, implementation, dtype, CASES, id=f"{label}-all", marks=pytest.mark.slow))
    return found


@pytest.mark.parametrize(("family", "implementation", "dtype", "cases"), tables())
def test_every_cache_size(family: str, implementation: str, dtype: torch.dtype, cases: Sequence[Any]) -> None:
    for cache, prompt, store, copying in cases:
        link = LinkOver(copying_link if copying else plain_link)
        with served(family, dtype, implementation, cache=cache, store=store, link=link) as model:
            found = greedy(model, PROMPTS[prompt])
        found.assert_equals(expected(family, dtype, implementation, prompt))


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("predictor", PREDICTORS)
def test_every_policy_with_every_prediction(eviction: str, predictor: str | None) -> None:
    """Each prediction meets every policy, and over the table each policy every family."""
    family = MOE_FAMILIES[(PREDICTORS.index(predictor) + EVICTIONS.index(eviction)) % len(MOE_FAMILIES)]
    wanted, visits = record(family, torch.float32, "grouped_mm", "short")
    chosen = predictor_of(predictor, stock(family), visits, lookahead=3)
    with served(family, cache="50%", predictor=chosen, eviction=eviction, link=delayed(7)) as model:
        greedy(model, PROMPTS["short"]).assert_equals(wanted)
        assert model.promoe.stats().policy == eviction


@pytest.mark.parametrize("kind", DISTURBANCES[1:])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_every_disturbance_between_gate_and_experts(family: str, kind: str) -> None:
    wanted = expected(family, torch.float32, "grouped_mm", "one")
    with served(family, cache=2, predictor="gate") as model:
        undo = disturb(model, kind, PROMPTS["one"])
        greedy(model, PROMPTS["one"]).assert_equals(wanted)
        undo()
        greedy(model, PROMPTS["one"]).assert_equals(wanted)


def test_the_gate_is_really_called_twice() -> None:
    with served("qwen2_moe", cache=2) as model:
        before = [len(layer.gate._forward_hooks) for layer in promoe.find_moe_layers(model)]
        undo = disturb(model, "gate called twice", PROMPTS["one"])
        hooks = [next(reversed(layer.gate._forward_hooks.values())) for layer in promoe.find_moe_layers(model)]
        greedy(model, PROMPTS["one"], new_tokens=2)
        assert [hook.calls for hook in hooks] == [3, 3, 3]
        undo()
        assert [len(layer.gate._forward_hooks) for layer in promoe.find_moe_layers(model)] == before


@pytest.mark.parametrize("store", ["host", "file", "offloaded", "spooled"])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_generate_gives_the_same_tokens(family: str, store: str) -> None:
    prompt = PROMPTS["padded"]
    wanted = stock(family).generate(**prompt, max_new_tokens=6, do_sample=False)
    with served(family, store=store, predictor="gate") as model:
        found = model.generate(**prompt, max_new_tokens=6, do_sample=False)
        assert torch.equal(found, wanted)
        assert model.promoe.stats().decode.passes == 5


@pytest.mark.parametrize("store", ["host", "file", "offloaded", "spooled"])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_unpatched_models_are_the_stock_model_again(family: str, store: str) -> None:
    """Weights and bits, also of a model whose experts had been left in files."""
    wanted = expected(family, torch.float32, "grouped_mm", "padded")
    with served(family, cache=2, store=store) as model:
        greedy(model, PROMPTS["padded"], new_tokens=1)
        promoe.unpatch(model)
        assert not hasattr(model, "promoe")
        greedy(model, PROMPTS["padded"]).assert_equals(wanted)
        state, plain = model.state_dict(), stock(family).state_dict()
        assert list(state) == list(plain)
        assert all(torch.equal(state[name], plain[name]) for name in plain)


# -- experts of real size ---------------------------------------------------------------------------------------


# The stock batched_mm copies an expert of 34 MB per token and choice, so its prompts are short.
SMALL = {
    "one": {"input_ids": token_ids(1, 2), "attention_mask": torch.ones(1, 2, dtype=torch.long)},
    "padded": left_padded((2, 1, 1)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_real_shapes(threads: int, dtype: torch.dtype) -> None:
    """Hidden 2,048 and intermediate 1,408, as DeepSeek-V2-Lite and Qwen1.5-MoE have: kernels take other paths there."""
    model = real_shapes(dtype)
    torch.set_num_threads(threads)  # the fixture of all tests sets it back

    def answers() -> list[Outputs]:
        found = []
        for implementation in IMPLEMENTATIONS:
            model.set_experts_implementation(implementation)
            prompts = SMALL if implementation == "batched_mm" else PROMPTS
            found += [greedy(model, prompts[prompt], new_tokens=1) for prompt in ("one", "padded")]
        return found

    wanted = answers()
    promoe.patch(model, cache="50%", predictor=None, link=LinkOver(plain_link), config=config())
    try:
        found = answers()
        check_integrity(model)
    finally:
        promoe.unpatch(model)
    for ours, theirs in zip(found, wanted, strict=True):
        ours.assert_equals(theirs)


@pytest.mark.parametrize("read_mode", ["page_cache", "direct"])
def test_real_shapes_from_files(read_mode: str, tmp_path: Path) -> None:
    """Experts of 17 MB, in chunks of 4 MiB that do not end where tensors do."""
    real_shapes(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="30MB")
    wanted = greedy(load_stock(tmp_path), PROMPTS["padded"], new_tokens=1)
    model = promoe.from_pretrained(tmp_path, cache="50%", predictor=None, config=config(read_mode=read_mode))
    try:
        greedy(model, PROMPTS["padded"], new_tokens=1).assert_equals(wanted)
        check_integrity(model)
    finally:
        close(model)


@functools.cache
def real_shapes(dtype: torch.dtype) -> PreTrainedModel:
    return build("qwen2_moe", dtype=dtype, hidden=2048, intermediate=1408, num_experts=4, top_k=TOP_K, layers=1)


# -- several at once --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("store", "cache"), [("host", 1), ("host", 2), ("file", "25%"), ("spooled", 1)])
def test_two_threads_on_one_model(store: str, cache: str | int) -> None:
    prompts = ("one", "padded")
    wanted = {prompt: expected("qwen2_moe", torch.float32, "grouped_mm", prompt) for prompt in prompts}
    with served("qwen2_moe", store=store, cache=cache, predictor="gate", link=delayed(1)) as model:
        together = threading.Barrier(2)

        def run(prompt: str) -> None:
            torch.set_num_threads(1)
            for _ in range(3):
                together.wait(60)
                greedy(model, PROMPTS[prompt]).assert_equals(wanted[prompt])

        with ThreadPoolExecutor(2) as threads:
            for result in [threads.submit(run, prompt) for prompt in prompts]:
                result.result(120)
        stats = model.promoe.stats()
        assert (stats.prefill.passes, stats.decode.passes) == (6, 18)


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


# -- the tests' own eyes ----------------------------------------------------------------------------------------


def test_a_slot_that_lost_a_chunk_is_seen() -> None:
    """A link that forgets one chunk must not pass for bit-identical."""

    class Forgetful(HostLink):
        def transfer(self, chunk: Chunk, destination: memoryview, address: int) -> None:
            if chunk.source_offset_bytes:
                super().transfer(chunk, destination, address)

    with served("qwen2_moe", link=LinkOver(Forgetful)) as model:
        found = greedy(model, PROMPTS["one"])
    with pytest.raises(AssertionError):
        found.assert_equals(expected("qwen2_moe", torch.float32, "grouped_mm", "one"))


def last_late(store: Store) -> Link:
    """The fastest link, but the last tensors of an expert come late: there is time to begin it."""
    late_from = [layout["down_proj"].offset_bytes for layout in store.layouts]
    assert len(set(late_from)) == 1
    late = Fault("slow", 1e-3)
    return FaultyLink(plain_link(store), lambda _, chunk: late if chunk.slot_offset_bytes >= late_from[0] else None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("store", ["host", "file", "spooled"])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_experts_begun_before_they_are_whole(
    family: str, store: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    begin = WeightedSum.begin

    def counted(self: WeightedSum, expert: int, rows: ExpertRows) -> None:
        begun.append(expert)
        begin(self, expert, rows)

    monkeypatch.setattr(WeightedSum, "begin", counted)
    # What was spooled lies as in a slot, so that a chunk of the usual length has a whole expert of these.
    fields = {"chunk_bytes": 4096} if store == "spooled" else {}
    for begin_early in (True, False):
        with served(family, dtype, store=store, link=LinkOver(last_late), begin_early=begin_early, **fields) as model:
            greedy(model, PROMPTS["one"]).assert_equals(expected(family, dtype, "grouped_mm", "one"))
        assert bool(begun) == begin_early
        begun.clear()


@pytest.mark.parametrize("threads", [3, 4])
def test_layers_whose_rows_are_cut_by_threads(threads: int) -> None:
    """Without waiting for all experts of such a layer, 8 and 2 of 100 prompts differ here."""
    torch.set_num_threads(threads)  # conftest sets it back
    plain, patched = (
        build("qwen2_moe", dtype=torch.float32, hidden=64, intermediate=14336, num_experts=8, top_k=3) for _ in range(2)
    )
    prompts = [{"input_ids": token_ids(1, 7, seed=seed)} for seed in range(40)]
    with torch.inference_mode():
        wanted = [plain(**prompt).logits for prompt in prompts]
        promoe.patch(patched, cache="50%", link=LinkOver(plain_link), config=config())
        for prompt, logits in zip(prompts, wanted, strict=True):
            assert torch.equal(patched(**prompt).logits, logits)
    promoe.unpatch(patched)


def test_references_never_come_from_a_patched_model() -> None:
    with served("qwen2_moe") as model:
        assert model is resident("qwen2_moe")
        assert model is not stock("qwen2_moe")
        mine = {tensor.data_ptr() for tensor in model.parameters()}
        assert not mine & {tensor.data_ptr() for tensor in stock("qwen2_moe").parameters()}
        stock("qwen2_moe").promoe = model.promoe
        try:
            with pytest.raises(AssertionError, match="unmodified"):
                record.__wrapped__("qwen2_moe", torch.float32, "grouped_mm", "one")
        finally:
            del stock("qwen2_moe").promoe
