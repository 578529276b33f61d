from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import build
from zoo import families

from promoe.commands.plan.reading import ReadModel, read_model
from promoe.commands.plan.stand_in import StandIn, token_ids
from promoe.errors import UnsupportedModelError


def read(folder: Path, family: str = "qwen2_moe", **fields: Any) -> ReadModel:
    """From its configuration alone."""
    build(family, dtype=torch.bfloat16, **fields).config.save_pretrained(folder)
    return read_model(str(folder), "bfloat16")


def test_a_few_blocks_stand_for_all(tmp_path: Path) -> None:
    found = read(tmp_path, layers=9)
    with closing(StandIn(found.model, found.layers, 2**16)) as stand_in:
        assert (len(stand_in.blocks), stand_in.num_blocks, stand_in.num_layers) == (4, 9, 9)
        cache, prompt = stand_in.run(token_ids(stand_in.model, 12))
        assert cache.get_seq_length() == 12
        assert prompt.pairs == 4 * 12 * 2
        cache, token = stand_in.run(token_ids(stand_in.model, 1), cache)
        assert cache.get_seq_length() == 13
        assert (token.pairs, token.experts_used) == (8, 8)
        assert token.experts_bytes == 8 * found.layers[0].layout.payload_bytes
        assert 0 < token.experts_s < token.pass_s
        assert token.others_s > token.pass_s - token.experts_s, "five blocks are added"


def test_all_kinds_of_blocks_are_among_them(tmp_path: Path) -> None:
    """The first is dense, and attention changes late."""
    types = ["full_attention"] * 6 + ["sliding_attention"] * 2
    found = read(tmp_path, "gpt_oss", layers=8, layer_types=types)
    with closing(StandIn(found.model, found.layers)) as stand_in:
        assert len(stand_in.blocks) == 7
    dense = read(tmp_path, "deepseek_v3", layers=9, first_k_dense_replace=5)
    with closing(StandIn(dense.model, dense.layers)) as stand_in:
        assert len(stand_in.blocks) == 7
        assert (len(stand_in.layers), stand_in.num_layers) == (2, 4)
        _, timed = stand_in.run(token_ids(stand_in.model, 1))
        assert timed.pairs == 2 * 2


def test_experts_one_by_one_take_as_many_pauses(tmp_path: Path) -> None:
    found = read(tmp_path)
    with closing(StandIn(found.model, found.layers)) as stand_in:
        stand_in.pause_s = 0.002
        _, timed = stand_in.run(token_ids(stand_in.model, 1))
        assert timed.experts_used == 6
        assert timed.experts_s >= 6 * 0.002


def test_made_up_experts_take_no_more_than_they_may(tmp_path: Path) -> None:
    found = read(tmp_path, num_experts=16)
    one = found.layers[0].layout.slot_bytes
    with closing(StandIn(found.model, found.layers, 5 * one)) as stand_in:
        assert sum(pool.nbytes for pool in stand_in._pools.values()) == 5 * one
        assert stand_in.run(token_ids(stand_in.model, 20))[1].pairs == 3 * 20 * 2


@pytest.mark.parametrize("family", ["jetmoe", "llama4", "jamba", "longcat_flash"])
def test_families_with_ways_of_their_own(family: str, tmp_path: Path) -> None:
    families.build(family).config.save_pretrained(tmp_path)
    found = read_model(str(tmp_path), "float32")
    with closing(StandIn(found.model, found.layers)) as stand_in:
        cache, _ = stand_in.run(token_ids(stand_in.model, 5))
        _, timed = stand_in.run(token_ids(stand_in.model, 1), cache)
        assert timed.experts_used >= 1


def test_blocks_in_two_lists_cannot_stand_in(tmp_path: Path) -> None:
    families.build("switch_transformers").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    found = read_model(str(tmp_path), "float32")
    with pytest.raises(UnsupportedModelError, match="one list of blocks"):
        StandIn(found.model, found.layers)
