"""llama.cpp behind a stand-in for its library, and where it is installed the real one."""

from __future__ import annotations

import ctypes
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import build
from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from promoe.commands.bench import llama_cpp
from promoe.commands.bench.gguf_writer import write_gguf
from promoe.commands.bench.llama_cpp import LlamaCpp, LlamaCppError, likeliest
from promoe.commands.bench.systems import EXACT
from promoe.commands.measure import REPETITION_PENALTY, generate

real = pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
IDS = [5, 60, 7, 8, 90, 11, 40]


class Library(SimpleNamespace):
    """Stands for the module `llama_cpp`: a model of 10 tokens, which says (last token + 1) % 10 with most certainty."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(batches=[], cleared=0, code=0, model=1, context=2, seconds=0.0, freed=[], **fields)
        self.llama_log_callback = lambda function: function
        self.llama_model_default_params = SimpleNamespace
        self.llama_context_default_params = SimpleNamespace
        self.llama_n_batch = lambda context: 4
        self.llama_vocab_n_tokens = lambda vocab: 10
        self.llama_model_get_vocab = self.llama_get_memory = lambda model: model
        self.llama_log_set = self.llama_backend_init = lambda *of_log: None
        self.llama_batch_get_one = lambda array, count: list(array)[:count]
        self.llama_free = self.llama_model_free = self.freed.append

    def llama_model_load_from_file(self, path: bytes, options: Any) -> Any:
        self.options = options
        return self.model

    def llama_init_from_model(self, model: Any, settings: Any) -> Any:
        self.settings = settings
        return self.context

    def llama_memory_clear(self, memory: Any, with_content: bool) -> None:
        self.cleared += 1

    def llama_decode(self, context: Any, batch: list[int]) -> int:
        self.batches.append(batch)
        time.sleep(self.seconds)
        return self.code

    def llama_get_logits_ith(self, context: Any, number: int) -> Any:
        assert number == -1
        logits = np.zeros(10, dtype=np.float32)
        logits[(self.batches[-1][-1] + 1) % 10] = 5.0
        self.kept = logits
        return logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    stand_in = Library()
    monkeypatch.setitem(sys.modules, "llama_cpp", stand_in)
    return stand_in


def opened(tmp_path: Path, **fields: Any) -> LlamaCpp:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    return LlamaCpp(tmp_path / "model.gguf", 64, 3, **fields)


def test_a_prompt_is_read_in_batches_and_tokens_one_by_one(library: Library, tmp_path: Path) -> None:
    model = opened(tmp_path)
    answer = model.generate([1, 2, 3, 4, 5, 6], 3)
    assert answer.tokens == (7, 8, 9)
    assert library.batches == [[1, 2, 3, 4], [5, 6], [7], [8]]
    assert len(answer.gaps_s) == 2
    assert min(answer.ttft_s, *answer.gaps_s) > 0
    assert model.generate([4], 1).tokens == (5,)
    assert library.cleared == 2, "nothing is kept from one prompt to the next"
    assert (library.settings.n_ctx, library.settings.n_threads, library.settings.n_threads_batch) == (64, 3, 3)


def test_banned_tokens_are_not_generated(library: Library, tmp_path: Path) -> None:
    assert opened(tmp_path, banned=[3]).generate([2], 1).tokens != (3,)
    assert opened(tmp_path).generate([2], 1).tokens == (3,)


def test_an_answer_that_takes_too_long_is_cut_short_after_a_few_tokens(library: Library, tmp_path: Path) -> None:
    library.seconds = 0.01
    assert len(opened(tmp_path).generate([1], 9, seconds=0.001, fewest_tokens=4).tokens) == 4
    assert len(opened(tmp_path).generate([1], 9, seconds=60.0, fewest_tokens=4).tokens) == 9


def test_repacking_is_llama_cpps_default(library: Library, tmp_path: Path) -> None:
    opened(tmp_path)
    assert library.options.use_extra_bufts is True
    opened(tmp_path, repack=False).close()
    assert library.options.use_extra_bufts is False
    assert library.freed == [2, 1]


def test_what_llama_cpp_cannot_do_is_an_error(library: Library, tmp_path: Path) -> None:
    model = opened(tmp_path)
    library.code = -3
    with pytest.raises(LlamaCppError, match="could not compute 2 tokens: llama_decode returned -3"):
        model.generate([1, 2], 1)
    library.context = None
    with pytest.raises(LlamaCppError, match="could not make a context of 64 tokens"):
        opened(tmp_path)
    library.model = None
    with pytest.raises(LlamaCppError, match=r"could not open '.*model\.gguf' \(4 bytes\)"):
        opened(tmp_path)


def test_tokens_are_chosen_as_transformers_does() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        logits = (3 * generator.standard_normal(40)).astype(np.float32)
        seen, banned = generator.integers(0, 40, 30).tolist(), generator.integers(0, 40, 2).tolist()
        chain = LogitsProcessorList(
            [
                RepetitionPenaltyLogitsProcessor(REPETITION_PENALTY),
                MinNewTokensLengthLogitsProcessor(0, len(seen) + 1, banned, device="cpu"),
            ]
        )
        expected = chain(torch.tensor([seen]), torch.from_numpy(logits)[None].clone()).argmax()
        assert likeliest(logits, seen, banned) == int(expected)


@pytest.fixture(scope="module", params=["qwen2_moe", "qwen3_moe"])
def model_and_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A tiny model that llama.cpp computes alike, in fp32 with the weights in bf16, and its folder."""
    folder = tmp_path_factory.mktemp(request.param)
    model: Any = build(request.param, dtype=torch.bfloat16, norm_topk_prob=request.param == "qwen3_moe")
    model.save_pretrained(folder / "checkpoint")
    return model.float(), folder


@real
@pytest.mark.parametrize(("form", "tolerance"), [(EXACT, 0.01), ("q8_0", 0.05), ("q4_0", 0.5)])
def test_the_real_one_computes_what_transformers_computes(model_and_folder: Any, form: str, tolerance: float) -> None:
    model, folder = model_and_folder
    write_gguf(folder / "checkpoint", folder / f"{form}.gguf", form, torch.bfloat16)
    for repack in (True, False):
        served = LlamaCpp(folder / f"{form}.gguf", 32, 2, repack=repack)
        try:
            with torch.inference_mode():
                expected = model(torch.tensor([IDS])).logits[0, -1].numpy()
            error = np.linalg.norm(served.logits(IDS) - expected) / np.linalg.norm(expected)
            assert error < tolerance
            assert served.num_tokens == model.config.vocab_size
        finally:
            served.close()


@real
def test_the_real_one_generates_what_transformers_generates(model_and_folder: Any) -> None:
    model, folder = model_and_folder
    write_gguf(folder / "checkpoint", folder / "plain.gguf", EXACT, torch.bfloat16)
    served = LlamaCpp(folder / "plain.gguf", 64, 2)
    try:
        for start in (1, 20, 50):
            ids = [(start + 7 * number) % 128 for number in range(20)]
            inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
            expected = generate(model, inputs, 6, repetition_penalty=REPETITION_PENALTY).tokens
            assert served.generate(ids, 6).tokens == expected
    finally:
        served.close()


@real
def test_a_file_that_is_damaged_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + b"\0" * 60)
    with pytest.raises(LlamaCppError, match="could not open"):
        LlamaCpp(tmp_path / "model.gguf", 64, 1)


def test_the_module_is_imported_without_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert "llama_cpp" not in vars(llama_cpp)
