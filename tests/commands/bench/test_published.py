"""The rows of Eliseev and Mazur (2023), each opened in this process: what it keeps, what it reads, and the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import write_checkpoint

from promoe.commands.bench.forms import cache_of, prepare_forms
from promoe.commands.bench.messages import Opening, Prompt
from promoe.commands.bench.served import Served
from promoe.commands.bench.systems import find_systems
from promoe.stats.totals import Stats

LAYERS, EXPERTS, TOP_K = 3, 8, 2
PROMPT = Prompt([5, 9, 40, 7, 33, 8, 21], 6, 0)
TOKENS = PROMPT.new_tokens - 1  # of decode


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("published") / "checkpoint", hidden=64, intermediate=64)


@contextmanager
def opened(folder: Path, name: str, cache: str = "50%") -> Iterator[Served]:
    """A system with the cache that `promoe bench` gives it."""
    resident = Served(Opening(find_systems(["lru", "resident"])[1], folder, "bfloat16", cache))
    system = find_systems([name, "static"])[-2]
    slot_bytes = prepare_forms([system], folder, torch.bfloat16, lambda system: folder)[system.experts]
    size = cache_of(system, cache, resident.slots_bytes(cache), slot_bytes, resident.sizes())
    served = Served(Opening(system, folder, "bfloat16", size))
    try:
        yield served
    finally:
        served.close()


def answered(folder: Path, name: str, cache: str = "50%") -> tuple[tuple[int, ...], Stats]:
    """The tokens of an answer, and what was counted of it after another one."""
    with opened(folder, name, cache) as served:
        served.answer(PROMPT)
        served.reset()
        tokens = served.answer(PROMPT).generation.tokens
        stats = served.facts().stats
        assert stats is not None
        return tokens, stats


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[int, ...]:
    resident = Served(Opening(find_systems(["lru", "resident"])[1], folder, "bfloat16", "50%"))
    return resident.answer(PROMPT).generation.tokens


@pytest.mark.parametrize("name", ["eliseev", "eliseev-no-preload"])
def test_slots_belong_to_layers(name: str, folder: Path, expected: tuple[int, ...]) -> None:
    tokens, stats = answered(folder, name)
    assert tokens == expected
    assert stats.cache_slots == LAYERS * EXPERTS // 2
    assert stats.policy == "lru"
    with opened(folder, name, "3 per layer") as served:
        pools = served.facts().scheduler.pools  # type: ignore[union-attr]
    assert [(pool.num_slots, pool.layers) for pool in pools] == [(3, (layer,)) for layer in range(LAYERS)]


def test_only_the_first_row_asks_the_next_gate(folder: Path) -> None:
    assert answered(folder, "eliseev-no-preload", "2 per layer")[1].decode.bytes_prefetched == 0
    system = find_systems(["eliseev"])[0]
    assert (system.predictor, system.config.lookahead, system.config.ablation.governor) == ("gate", 1, False)


def test_without_lru_nothing_is_kept_for_the_next_token(folder: Path, expected: tuple[int, ...]) -> None:
    tokens, stats = answered(folder, "eliseev-no-lru")
    assert tokens == expected
    assert stats.cache_slots == TOP_K
    assert (stats.decode.needed, stats.decode.hits) == (TOKENS * LAYERS * TOP_K, 0)
    assert stats.decode.bytes_demand == TOKENS * LAYERS * TOP_K * stats.expert_bytes[0]
    assert stats.decode.bytes_prefetched == 0


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_naive_offloading_reads_whole_layers(phase: str, folder: Path, expected: tuple[int, ...]) -> None:
    tokens, stats = answered(folder, "eliseev-naive")
    assert tokens == expected
    assert stats.cache_slots == EXPERTS
    counted = getattr(stats, phase)
    visits = LAYERS * (TOKENS if phase == "decode" else 1)
    assert (counted.layer_visits, counted.needed, counted.hits) == (visits, visits * EXPERTS, 0)
    assert counted.bytes_demand == visits * EXPERTS * stats.expert_bytes[0]


@pytest.mark.parametrize("name", ["eliseev", "eliseev-no-lru", "eliseev-naive"])
def test_two_bits_have_the_tokens_of_the_model_in_two_bits(name: str, folder: Path) -> None:
    with opened(folder, "resident:int2") as reference:
        wanted = reference.answer(PROMPT).generation.tokens
    tokens, stats = answered(folder, f"{name}:int2")
    assert tokens == wanted
    assert stats.expert_bytes[0] < 3 * 64 * 64 * 2 / 4


def test_a_model_with_all_experts_in_slots_fetches_nothing(folder: Path) -> None:
    with opened(folder, "resident:int8") as served:
        served.reset()
        served.answer(PROMPT)
        stats = served.handle.stats()
        assert served.facts().stats is None, "it is no system of this library that is measured"
    assert stats.decode.bytes_total == stats.prefill.bytes_total == 0
    assert stats.decode.hit_rate == stats.prefill.hit_rate == 1.0
