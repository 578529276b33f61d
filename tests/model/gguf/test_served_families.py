"""Models of every architecture served from GGUF files, a few experts at a time, compared bit for bit with the decoded one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf_checkpoints import CONVERTERS, dequantised_model, write_gguf
from served import PROMPTS, LinkOver, close, config, greedy, plain_link

import promoe


@pytest.mark.parametrize("kind", ["BF16", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("family", CONVERTERS)
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
