"""Models of every architecture served from GGUF files, a few experts at a time, compared bit for bit with the decoded one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_checkpoints import CONVERTERS, dequantised_model, write_gguf
from served import PROMPTS, LinkOver, close, config, greedy, plain_link

import promoe


def by_turns() -> Iterator[Any]:
    """Each family with one type of weights; with the others in the slow tests."""
    kinds = ("BF16", "Q8_0", "Q4_K")
    for number, family in enumerate(CONVERTERS):
        for kind in kinds:
            marks = () if kind == kinds[number % len(kinds)] else (pytest.mark.slow,)
            yield pytest.param(family, kind, marks=marks)


@pytest.mark.parametrize(("family", "kind"), [*by_turns()])
def test_logits_and_tokens_are_those_of_the_decoded_model(tmp_path: Path, family: str, kind: str) -> None:
    path = write_gguf(tmp_path, family, weight_type=kind)
    expected = greedy(dequantised_model(path, family, torch.bfloat16), PROMPTS["one"])
    model = promoe.from_pretrained(path, experts="checkpoint", cache="40%", link=LinkOver(plain_link), config=config())
    try:
        assert model.dtype == torch.bfloat16
        greedy(model, PROMPTS["one"]).assert_equals(expected)
        assert model.promoe.stats().evictions > 0
    finally:
        close(model)
