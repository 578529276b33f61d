from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import build
from transformers import AutoModelForCausalLM
from transformers.generation.continuous_batching import initialization

import promoe
from promoe.runtime.paged import PagedRunner


def test_forwards_are_never_captured_nor_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with an attention that needs no mask, Transformers would capture them (CUDA graphs) if it could choose."""
    build("qwen3_moe").save_pretrained(tmp_path)
    stock, ids = AutoModelForCausalLM.from_pretrained(tmp_path), torch.arange(3, 12)
    stock.generation_config.eos_token_id = None
    expected = stock.generate(ids[None], max_new_tokens=4, do_sample=False, pad_token_id=0)[0, len(ids) :].tolist()
    monkeypatch.setattr(initialization, "get_accelerator_graph_name", lambda: "CUDAGraph")
    monkeypatch.setattr(initialization, "is_flash_attention_requested", lambda config, version=None: True)
    model = promoe.from_pretrained(tmp_path, cache="50%")
    model.generation_config.eos_token_id = None
    with PagedRunner(model, at_once=2, step_tokens=16, kv_tokens=64) as runner:
        settings = runner._manager.continuous_batching_config
        assert settings.use_cuda_graph == (False, False)
        assert (settings.varlen_compile_config, settings.decode_compile_config) == (None, None)
        assert not settings.use_async_batching, "two steps at once"
        runner.add(0, ids.tolist(), 4)
        assert runner.next() == (0, expected, False, None)
    model.promoe.close()
