"""Collecting: what is recorded is what the model does with each prompt alone, once, whatever interrupts it."""

from __future__ import annotations

import errno
import io
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoint import byte_tokenizer
from tiny_models import MOE_FAMILIES
from torch import nn
from transformers import PreTrainedModel

import promoe
from promoe.errors import ConfigError, UnsupportedModelError
from promoe.experts.moe_layers import find_moe_layers
from promoe.training import collect as collect_module
from promoe.training.collect import save_gates
from promoe.training.encoding import encode
from promoe.training.prompts import Prompt, PromptError
from promoe.training.recorded_traces import RecordedTrace
from promoe.training.routing_traces import TraceError
from promoe.training.trace_folder import part_paths

from .collecting import (
    FAST,
    PROMPTS,
    TOKENIZER,
    TOP_K_OF_LOGITS,
    assert_recorded_as_alone,
    options,
    record,
    sequences,
    tiny,
    writer_of,
)
from .recordings import assert_same_rows, columns


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny()


# -- what is recorded -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_rows_are_those_of_each_prompt_alone(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    trace = RecordedTrace(record(model, tmp_path))
    assert_recorded_as_alone(model, tmp_path)
    assert trace.prompts.tolist() == [prompt.idx for prompt in PROMPTS]
    assert trace.info.num_layers == (2 if family.startswith("deepseek") else 3)
    for batch in (sequences(trace)[:3], sequences(trace)[3:6], sequences(trace)[6:]):
        wanted = round(sum(len(sequence.prompt) for sequence in batch) / len(batch))
        assert {len(sequence.generated) for sequence in batch} == {wanted}
    if family in TOP_K_OF_LOGITS:
        logits = torch.from_numpy(trace.gate_logits(slice(None))).view(trace.num_tokens, -1, 8)
        np.testing.assert_array_equal(np.sort(logits.topk(2).indices), np.sort(trace.routing.experts))


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_sequences_that_end_early_are_recorded_up_to_their_end(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    endless = [sequence.generated for sequence in sequences(RecordedTrace(record(model, tmp_path / "endless")))]
    # A token that ends one sequence of the first batch in the middle, and not all of them; and one that ends another.
    candidates = [tokens[i] for tokens in endless[:3] for i in range(2, len(tokens) - 2)]
    end = next(token for token in candidates if any(token not in tokens for tokens in endless[:3]))
    model.generation_config.eos_token_id = [end, endless[4][0]]
    found = sequences(RecordedTrace(record(model, tmp_path / "ended")))
    ends = {end, endless[4][0]}
    for sequence, tokens in zip(found, endless, strict=True):
        length = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
        assert sequence.generated == tokens[:length]
    assert found[4].generated == []  # it ended with its first token, which nothing reads
    assert len({len(sequence.generated) for sequence in found[:3]}) > 1
    assert_recorded_as_alone(model, tmp_path / "ended")


def test_a_batch_that_ends_before_its_time(model: PreTrainedModel, tmp_path: Path) -> None:
    model.generation_config.eos_token_id = list(range(len(TOKENIZER)))
    record(model, tmp_path)
    assert all(sequence.generated == [] for sequence in sequences(RecordedTrace(tmp_path)))
    assert_recorded_as_alone(model, tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75])
def test_the_share_that_is_generated(model: PreTrainedModel, tmp_path: Path, share: float) -> None:
    chosen = options(decode_share=share, batch_size=2)
    writer = writer_of(model, tmp_path, chosen)
    collect_module.record(model, TOKENIZER, PROMPTS, writer, chosen)
    assert writer.decode_share == pytest.approx(share, abs=0.02)
    assert_recorded_as_alone(model, tmp_path)


def test_it_stops_after_the_batch_that_has_enough(model: PreTrainedModel, tmp_path: Path) -> None:
    read: list[int] = []

    def watched() -> Iterator[Prompt]:
        for prompt in PROMPTS:
            read.append(prompt.idx)
            yield prompt

    chosen = options(max_tokens=1, batch_size=2)
    writer = writer_of(model, tmp_path, chosen)
    collect_module.record(model, TOKENIZER, watched(), writer, chosen)
    assert RecordedTrace(tmp_path).prompts.tolist() == [0, 1]
    assert read == [0, 1]


def test_the_batch_size_changes_no_routing(model: PreTrainedModel, tmp_path: Path) -> None:
    record(model, tmp_path, batch_size=1)
    assert_recorded_as_alone(model, tmp_path)


def test_long_conversations_are_cut(model: PreTrainedModel, tmp_path: Path) -> None:
    found = sequences(RecordedTrace(record(model, tmp_path, max_prompt_tokens=8)))
    assert max(len(sequence.prompt) for sequence in found) == 8


def test_prompts_without_a_token_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode_but_one(prompt: Prompt, tokenizer: Any, max_tokens: int) -> list[int]:
        return [] if prompt.idx == 3 else encode(prompt, tokenizer, max_tokens)

    monkeypatch.setattr(collect_module, "encode", encode_but_one)
    model = tiny()
    for max_tokens in (1, 10_000):
        record(model, tmp_path / "went on", max_tokens=max_tokens)
    record(model, tmp_path / "whole")
    assert RecordedTrace(tmp_path / "whole").prompts.tolist() == [0, 1, 4, 6, 7, 8]
    assert_same_rows(tmp_path / "went on", tmp_path / "whole")


# -- sampling ---------------------------------------------------------------------------------------------------


def test_sampling_depends_on_the_seed_alone(model: PreTrainedModel, tmp_path: Path) -> None:
    record(model, tmp_path / "a", temperature=1.0)
    torch.manual_seed(123)
    state = torch.get_rng_state()
    record(model, tmp_path / "b", temperature=1.0)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_rows(tmp_path / "a", tmp_path / "b")
    greedy = columns(RecordedTrace(record(model, tmp_path / "greedy")))
    changes: dict[str, dict[str, Any]] = {"seed": {"seed": 1}, "temperature": {"temperature": 0.5}}
    for name, change in changes.items():
        other = columns(RecordedTrace(record(model, tmp_path / name, **({"temperature": 1.0} | change))))
        assert not np.array_equal(other["token_ids"], columns(RecordedTrace(tmp_path / "a"))["token_ids"])
        assert not np.array_equal(other["token_ids"], greedy["token_ids"])


def test_the_models_own_way_of_generating_does_not_matter(tmp_path: Path) -> None:
    record(tiny(), tmp_path / "plain")
    model = tiny()
    model.generation_config.update(num_beams=2, num_return_sequences=2, use_cache=False, max_length=7)
    model.config.use_cache = False
    record(model, tmp_path / "beams")
    assert_same_rows(tmp_path / "beams", tmp_path / "plain")


def test_a_model_that_reads_its_prompt_in_pieces_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    model.generation_config.prefill_chunk_size = 4
    with pytest.raises(
        UnsupportedModelError, match=r"passes of \[\(3, 1\), .* Remove what changes this from its gener"
    ):
        record(model, tmp_path)


@pytest.mark.parametrize("pad", ["tokenizer", "model", "end", "nothing", "unknown to the model"])
def test_any_token_serves_as_padding(model: PreTrainedModel, tmp_path: Path, pad: str) -> None:
    tokenizer = byte_tokenizer()
    model.generation_config.pad_token_id = 5 if pad == "model" else None
    model.generation_config.eos_token_id = 0 if pad == "end" else None
    if pad.startswith("unknown"):
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
        assert tokenizer.pad_token_id == len(TOKENIZER)
    elif pad != "tokenizer":
        tokenizer.pad_token = None
    chosen = options()
    collect_module.record(model, tokenizer, PROMPTS, writer_of(model, tmp_path, chosen), chosen)
    assert_recorded_as_alone(model, tmp_path)


# -- patched models ---------------------------------------------------------------------------------------------


@contextmanager
def patched(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    promoe.patch(model, cache="25%", link=FAST)
    try:
        yield model
    finally:
        promoe.unpatch(model)


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_a_patched_model_gives_the_same_rows(family: str, tmp_path: Path) -> None:
    record(tiny(family), tmp_path / "wanted")
    with patched(tiny(family)) as model:
        record(model, tmp_path / "found")
        assert model.promoe.stats().hit_rate < 1
    assert_same_rows(tmp_path / "found", tmp_path / "wanted")


def test_a_model_with_its_experts_on_disk_gives_the_same_rows(tmp_path: Path) -> None:
    plain = tiny()
    plain.save_pretrained(tmp_path / "checkpoint")
    record(plain, tmp_path / "wanted", temperature=0.8)
    model = promoe.from_pretrained(tmp_path / "checkpoint", cache="50%")
    try:
        record(model, tmp_path / "found", temperature=0.8)
        save_gates(find_moe_layers(model, allow_meta=True), tmp_path / "found")
    finally:
        model.promoe.close()
    assert_same_rows(tmp_path / "found", tmp_path / "wanted")
    gates = RecordedTrace(tmp_path / "found").gates
    assert torch.equal(gates[1]["weight"], find_moe_layers(plain)[1].gate.weight)


# -- shards -----------------------------------------------------------------------------------------------------


def test_shards_hold_each_prompt_once(model: PreTrainedModel, tmp_path: Path) -> None:
    for shard_index in range(3):
        record(model, tmp_path, shard_index=shard_index, num_shards=3)
    trace = RecordedTrace(tmp_path)
    assert trace.prompts.tolist() == [0, 3, 6, 1, 4, 7, 8]
    assert [path.name for path in part_paths(tmp_path)] == [f"part-0000{shard}-00000.arrow" for shard in range(3)]
    assert_recorded_as_alone(model, tmp_path)


def test_tokens_are_divided_among_shards(model: PreTrainedModel, tmp_path: Path) -> None:
    assert options(max_tokens=10, num_shards=3).shard_tokens == 4
    record(model, tmp_path, max_tokens=3, batch_size=1, num_shards=3, shard_index=1)
    assert RecordedTrace(tmp_path).prompts.tolist() == [1]


def test_a_shard_without_prompts(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"None of the prompts falls to shard 2 of 9. Choose fewer --num-shards"):
        record(model, tmp_path, shard_index=2, num_shards=9)


# -- interruptions ----------------------------------------------------------------------------------------------


@contextmanager
def failing(model: nn.Module, passes: int, error: BaseException) -> Iterator[None]:
    """In the middle of a forward pass, after so many whole ones."""
    left = [passes]

    def fail(experts: nn.Module, args: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise error

    hook = find_moe_layers(model)[1].experts.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


@pytest.fixture
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three batches; the first has 18 passes."""
    return record(tiny(), tmp_path_factory.mktemp("trace"), temperature=1.0)


@pytest.mark.parametrize(
    ("passes", "part_bytes", "error"),
    [
        (0, 1, KeyboardInterrupt()),
        (3, 1 << 20, KeyboardInterrupt()),
        (20, 1, KeyboardInterrupt()),
        (20, 1 << 20, RuntimeError("broken")),
        (34, 1 << 20, KeyboardInterrupt()),
    ],
    ids=str,
)
def test_a_run_that_was_interrupted_goes_on_as_if_it_were_not(
    model: PreTrainedModel, tmp_path: Path, uninterrupted: Path, passes: int, part_bytes: int, error: BaseException
) -> None:
    with failing(model, passes, error), pytest.raises(type(error)):
        record(model, tmp_path, part_bytes=part_bytes, temperature=1.0)
    whole_batches = {0: 0, 3: 0, 20: 3, 34: 6}[passes]
    assert len(writer_of(model, tmp_path, options(temperature=1.0)).recorded) == whole_batches
    record(model, tmp_path, part_bytes=part_bytes, temperature=1.0)
    assert_same_rows(tmp_path, uninterrupted)


def test_interrupted_again_and_again(model: PreTrainedModel, tmp_path: Path, uninterrupted: Path) -> None:
    for passes in (20, 3, 20, 0, 5):
        with failing(model, passes, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            record(model, tmp_path, temperature=1.0)
    record(model, tmp_path, temperature=1.0)
    assert_same_rows(tmp_path, uninterrupted)
    assert len(part_paths(tmp_path)) == 3


@pytest.mark.parametrize("batch", range(3))
def test_a_part_that_was_deleted_is_recorded_again(
    model: PreTrainedModel, tmp_path: Path, uninterrupted: Path, batch: int
) -> None:
    record(model, tmp_path, part_bytes=1, temperature=1.0)
    part_paths(tmp_path)[batch].unlink()
    record(model, tmp_path, part_bytes=1, temperature=1.0)
    assert_same_rows(tmp_path, uninterrupted)


@pytest.mark.parametrize("first", [1, 60, 110])
def test_a_finished_trace_is_extended(model: PreTrainedModel, tmp_path: Path, uninterrupted: Path, first: int) -> None:
    record(model, tmp_path, max_tokens=first, temperature=1.0)
    before = {path: path.read_bytes() for path in part_paths(tmp_path)}
    assert RecordedTrace(tmp_path).num_tokens < RecordedTrace(uninterrupted).num_tokens
    record(model, tmp_path, max_tokens=first, temperature=1.0)  # nothing to do
    assert {path: path.read_bytes() for path in part_paths(tmp_path)} == before
    record(model, tmp_path, temperature=1.0)
    assert {path: path.read_bytes() for path in before} == before
    assert_same_rows(tmp_path, uninterrupted)


def test_a_prompt_that_cannot_be_encoded_loses_nothing(
    model: PreTrainedModel, tmp_path: Path, uninterrupted: Path
) -> None:
    damaged = [*PROMPTS[:4], Prompt(6, ()), *PROMPTS[5:]]
    with pytest.raises(PromptError, match="Prompt 6 has no message of a user"):
        record(model, tmp_path, damaged, temperature=1.0)
    assert RecordedTrace(tmp_path).prompts.tolist() == [0, 1, 3]
    record(model, tmp_path, temperature=1.0)
    assert_same_rows(tmp_path, uninterrupted)


def test_a_disk_that_fills_up_loses_nothing(
    model: PreTrainedModel, tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, calls = os.fsync, iter(range(99))

    def fail_later(descriptor: int) -> None:
        if next(calls) >= 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_later)
        with pytest.raises(TraceError, match=r"No space left on device\. Free some space and repeat the command"):
            record(model, tmp_path, part_bytes=1, temperature=1.0)
    assert RecordedTrace(tmp_path).prompts.tolist() == [0, 1, 3]
    assert not list(tmp_path.glob("*.unfinished"))
    record(model, tmp_path, part_bytes=1, temperature=1.0)
    assert_same_rows(tmp_path, uninterrupted)


def test_the_end_of_the_data_is_said(model: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        record(model, tmp_path, max_tokens=1)
        assert not caplog.messages
        record(model, tmp_path, max_tokens=5000)
    assert caplog.messages == [f"The data ended after {RecordedTrace(tmp_path).num_tokens} of 5000 tokens."]


def test_progress_says_how_far_it_is_and_how_long_it_takes(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(model, tmp_path, max_tokens=1)
    num_tokens, terminal, tqdm = RecordedTrace(tmp_path).num_tokens, io.StringIO(), collect_module.tqdm
    monkeypatch.setattr(
        collect_module,
        "tqdm",
        lambda **arguments: tqdm(**(arguments | {"disable": False, "file": terminal, "mininterval": 0})),
    )
    record(model, tmp_path, max_tokens=120)
    lines = terminal.getvalue().split("\r")
    assert f"{num_tokens}/120" in lines[1]
    assert "<" in lines[2]  # elapsed<remaining
    assert "token/s" in lines[2]
    assert "120/120" in lines[-1]  # also where the last batch has more
