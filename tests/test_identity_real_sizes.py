"""Bit-identity where kernels choose by size: matrices of real models, all of a machine's threads, short and long prompts.

Tiny matrices on one thread take other paths through oneDNN than those that people have: other blocks, no sums in parts, no
AMX tiles that are full.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import packs
from tiny_models import build
from transformers import AutoModelForCausalLM

import promoe
from promoe.commands.pack import options as pack
from promoe.commands.pack.command import run_pack
from promoe.experts.kernels import packed
from promoe.stores.slot_files import SlotFilesStore

pytestmark = pytest.mark.slow

# Hidden and intermediate size.
SIZES = {"qwen3_moe": (2048, 768), "gpt_oss": (2880, 2880), "mixtral": (192, 4608), "deepseek_v3": (1024, 1408)}
PROMPT_TOKENS = (1, 2, 3, 7, 12, 33, 64, 100, 257, 700, 1500)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.fixture(autouse=True)
def _all_threads(_one_thread_fixed_seed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the other fixture takes back. Products with many rows are compared when they come again."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    monkeypatch.setattr(packed, "PRODUCTS_BEFORE_COMPARING", 2)


def answer(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """The logits of a prompt, and of four tokens after it."""
    logits, past = [], None
    with torch.inference_mode():
        for _ in range(5):
            out = model(ids, past_key_values=past, use_cache=True, logits_to_keep=8)
            logits.append(out.logits)
            past, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
    return logits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", SIZES)
def test_every_bit_is_the_unmodified_models(family: str, dtype: str, tmp_path: Path) -> None:
    hidden, intermediate = SIZES[family]
    sizes = {"hidden": hidden, "intermediate": intermediate, "num_experts": 8, "layers": 3}
    build(family, dtype=DTYPES[dtype], max_position_embeddings=2048, **sizes).save_pretrained(tmp_path)
    ways: dict[str, dict[str, Any]] = {"30%": {"experts": "checkpoint"}, "100%": {"experts": "checkpoint"}}
    if dtype == "bf16" and packs(tmp_path):
        run_pack(pack.Options(str(tmp_path)), io.StringIO())
        ways |= {"30%, packed": {"experts": "auto"}, "100%, packed": {"experts": "auto"}}
    stock = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for tensor in stock.parameters():
        tensor.data = tensor.data.clone()  # mapped ones are not aligned
    prompts = [torch.randint(3, 90, (1, tokens)) for tokens in PROMPT_TOKENS] + [torch.randint(3, 90, (4, 5))]
    expected = [answer(stock, ids) for ids in prompts]
    for name, options in ways.items():
        model = promoe.from_pretrained(tmp_path, cache=name.split(",")[0], **options)
        if "packed" in name and "100%" not in name:
            assert isinstance(model.promoe.runtime.engine.store, SlotFilesStore)
        for round_number in range(2):  # what is compared first, is done another way afterwards
            for ids, wanted in zip(prompts, expected, strict=True):
                found = answer(model, ids)
                same = [torch.equal(one, other) for one, other in zip(found, wanted, strict=True)]
                assert all(same), f"{name}, round {round_number}, {tuple(ids.shape)} tokens: same = {same}"
        model.promoe.close()
