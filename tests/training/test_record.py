"""Collecting: what is recorded is what the model does with each prompt alone, once, whatever interrupts it."""

from __future__ import annotations

import dataclasses
import errno
import io
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tiny_checkpoint import byte_tokenizer
from tiny_models import MOE_FAMILIES, build
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

import promoe
from promoe import EmulatedLink
from promoe.errors import CheckpointError, ConfigError, PromoeError, UnsupportedModelError
from promoe.experts.moe_layers import find_moe_layers
from promoe.training import collect as collect_module
from promoe.training.collect import check_disk, describe, gate_width, save_gates, settings_of
from promoe.training.encoding import encode
from promoe.training.options import Collect
from promoe.training.prompts import Message, Prompt, PromptError
from promoe.training.recorded_traces import RecordedTrace, TraceWriter
from promoe.training.routing_traces import TraceError
from promoe.training.trace_folder import TraceInfo, part_paths

from .recordings import assert_same_rows, columns

TOKENIZER = byte_tokenizer()
FAST = EmulatedLink(bandwidth_bytes_per_s=1e12)
TOP_K_OF_LOGITS = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "gpt_oss")


def prompt(idx: int, *texts: str) -> Prompt:
    roles = ["user", "assistant"] * len(texts)
    return Prompt(idx, tuple(Message(role=role, content=text) for role, text in zip(roles, texts, strict=False)))  # type: ignore[typeddict-item]


# As in any data, some numbers are left out.
PROMPTS = [
    prompt(0, "A question"),
    prompt(1, "Why?"),
    prompt(3, "What is a lighthouse for?"),
    prompt(4, "Tell me", "No", "Do"),
    prompt(6, "x"),
    prompt(7, "How does it work"),
    prompt(8, "Who is it"),
]


def tiny(family: str = "qwen2_moe", **fields: Any) -> PreTrainedModel:
    return build(family, vocab_size=len(TOKENIZER), **fields)


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny()


def options(**changes: Any) -> Collect:
    fields = {"model": "tiny", "out": "trace", "max_tokens": 10_000, "batch_size": 3, "max_prompt_tokens": 24}
    return Collect(**fields | changes)


def writer_of(model: PreTrainedModel, folder: Path, chosen: Collect, part_bytes: int = 1 << 20) -> TraceWriter:
    info = describe(model, find_moe_layers(model), "tiny", settings_of(chosen, []))
    return TraceWriter(folder, info, chosen.shard_index, part_bytes)


def record(
    model: PreTrainedModel, folder: Path, prompts: Sequence[Prompt] = PROMPTS, part_bytes: int = 1 << 20, **changes: Any
) -> Path:
    """The folder of a trace, recorded or gone on with."""
    chosen = options(**changes)
    collect_module.record(model, TOKENIZER, iter(prompts), writer_of(model, folder, chosen, part_bytes), chosen)
    return folder


class Sequences(NamedTuple):
    """One prompt of a trace."""

    idx: int
    prompt: list[int]
    generated: list[int]
    rows: slice


def sequences(trace: RecordedTrace) -> list[Sequences]:
    routing, result, start = trace.routing, [], 0
    assert routing.generated is not None
    for idx, length in zip(trace.prompts.tolist(), routing.prompt_lengths.tolist(), strict=True):
        rows = slice(start, start + length)
        start += length
        tokens, generated = routing.token_ids[rows], routing.generated[rows]
        assert (np.diff(generated.astype(int)) >= 0).all(), "what is generated follows the prompt"
        result.append(Sequences(idx, tokens[~generated].tolist(), tokens[generated].tolist(), rows))
    return result


class Alone(NamedTuple):
    """What a model does with one sequence, without a batch, padding or cache."""

    inputs: torch.Tensor  # [T, L, H]
    router: torch.Tensor  # [T, L, E]
    experts: torch.Tensor  # [T, L, K]
    next_token: list[int]


@torch.inference_mode()
def run_alone(model: PreTrainedModel, tokens: list[int]) -> Alone:
    given: list[tuple[torch.Tensor, torch.Tensor]] = []
    layers = find_moe_layers(model)
    hooks = [
        layer.experts.register_forward_pre_hook(lambda _, args: given.append((args[0].clone(), args[1].clone())))
        for layer in layers
    ]
    logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
    for hook in hooks:
        hook.remove()
    inputs = torch.stack([hidden.reshape(len(tokens), -1) for hidden, _ in given], dim=1)
    router = [
        functional.linear(inputs[:, i], layer.gate.weight, getattr(layer.gate, "bias", None))  # type: ignore[arg-type]
        for i, layer in enumerate(layers)
    ]
    experts = torch.stack([ids.reshape(len(tokens), -1) for _, ids in given], dim=1)
    return Alone(inputs, torch.stack(router, dim=1), experts, logits[0].argmax(-1).tolist())


def assert_recorded_as_alone(model: PreTrainedModel, folder: Path, prompts: Sequence[Prompt] = PROMPTS) -> None:
    """Every row of a greedy trace, against the prompts run one by one."""
    trace = RecordedTrace(folder)
    by_idx = {prompt.idx: prompt for prompt in prompts}
    for sequence in sequences(trace):
        assert sequence.prompt == encode(by_idx[sequence.idx], TOKENIZER, 24)
        alone = run_alone(model, sequence.prompt + sequence.generated)
        start = len(sequence.prompt) - 1
        assert sequence.generated == alone.next_token[start : start + len(sequence.generated)]
        # Half a unit in bfloat16's last place, and what a batch adds to it.
        torch.testing.assert_close(trace.gate_inputs(sequence.rows).float(), alone.inputs, rtol=2**-8 + 1e-4, atol=1e-4)
        logits = trace.gate_logits(sequence.rows).reshape(alone.router.shape)
        np.testing.assert_allclose(logits, alone.router, atol=1e-3)
        experts = np.sort(trace.routing.experts[sequence.rows], axis=2)
        np.testing.assert_array_equal(experts, np.sort(alone.experts, axis=2))


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


# -- before it starts -------------------------------------------------------------------------------------------


def has_free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> list[Path]:
    asked: list[Path] = []

    def usage(path: Path) -> Any:
        asked.append(path)
        return shutil._ntuple_diskusage(1 << 50, 0, nbytes)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    return asked


def info_of(model: PreTrainedModel) -> TraceInfo:
    return describe(model, find_moe_layers(model), "tiny", {})


def test_how_large_it_will_be(model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = has_free(monkeypatch, 1 << 30)
    folder = tmp_path / "not" / "yet"
    row = 24 + 3 * (64 * 2 + 8 * 4 + 2 * 2)
    assert info_of(model).token_bytes == row
    said = check_disk(info_of(model), folder, options(max_tokens=20_000, num_shards=2))
    assert said == f"10,000 tokens of {row} B = {10_000 * row / 2**20:.1f} MiB into {folder} (1.00 GiB free)"
    assert asked == [tmp_path]
    assert not (tmp_path / "not").exists()


def test_a_disk_that_is_too_small(model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, info = options(max_tokens=100_000), info_of(model)
    needed = (100_000 + 3 * 48) * info.token_bytes + (64 << 20)
    has_free(monkeypatch, needed)
    check_disk(info, tmp_path, chosen)
    has_free(monkeypatch, needed - 1)
    with pytest.raises(ConfigError, match=r"needs 100,000 tokens of 516 B = 49.2 MiB .* free\. Choose fewer --max-tok"):
        check_disk(info, tmp_path, chosen)


def test_what_is_there_needs_no_space(model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(model, tmp_path)
    info, there = RecordedTrace(tmp_path).info, part_paths(tmp_path)[0].stat().st_size
    chosen = options(max_tokens=1000)
    needed = (1000 + 3 * 48) * info.token_bytes + (64 << 20) - there
    has_free(monkeypatch, needed)
    check_disk(info, tmp_path, chosen)
    has_free(monkeypatch, needed - 1)
    with pytest.raises(ConfigError, match="KiB are there"):
        check_disk(info, tmp_path, chosen)
    has_free(monkeypatch, 0)
    check_disk(info, tmp_path, options(max_tokens=50))


def test_sequences_longer_than_the_model_knows_positions(tmp_path: Path) -> None:
    model = tiny(max_position_embeddings=48)
    record(model, tmp_path / "just", max_prompt_tokens=24)
    with pytest.raises(
        ConfigError, match=r"of 25 tokens .*, 50 in all, .* 48 positions\. Choose a smaller --max-prompt"
    ):
        record(model, tmp_path, max_prompt_tokens=25)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "--max-tokens must be at least 1. Got 0"),
        ({"max_prompt_tokens": 0}, "--max-prompt-tokens must be at least 1"),
        ({"batch_size": -1}, "--batch-size must be at least 1. Got -1"),
        ({"num_shards": 0}, "--num-shards must be at least 1"),
        ({"shard_index": 2, "num_shards": 2}, "--shard-index must be 0 to 1. Got 2"),
        ({"shard_index": -1}, "--shard-index must be 0 to 0"),
        ({"decode_share": 1.0}, r"--decode-share must be 0 to 0\.9. Got 1\.0"),
        ({"decode_share": -0.1}, "--decode-share must be"),
        ({"decode_share": float("nan")}, "--decode-share must be"),
        ({"temperature": 0.0}, "--temperature must be more than 0"),
        ({"temperature": float("nan")}, "--temperature must be more than 0"),
        ({"seed": -1}, r"--seed must be 0 to 2\^63 - 1"),
        ({"seed": 1 << 63}, "--seed must be"),
    ],
)
def test_options_that_cannot_work(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(**changes)


def test_settings_say_what_must_stay_the_same() -> None:
    def settings(excluded: Sequence[str] = (), **changes: Any) -> dict[str, Any]:
        return settings_of(options(**changes), excluded)

    assert settings(max_tokens=7, shard_index=1, num_shards=2) == settings(max_tokens=9, num_shards=2)
    assert settings()["excluded"] is None
    assert settings(["a", "b"]) == settings(["b", "a"]) != settings(["a", "c"])
    assert settings(["a", "b"])["excluded"].startswith("2 prompts, sha256 ")
    for name, value in {
        "decode_share": 0.1,
        "max_prompt_tokens": 3,
        "batch_size": 1,
        "temperature": 2.0,
        "seed": 5,
        "dtype": "float32",
        "data": "other",
    }.items():
        assert settings(**{name: value}) != settings()


# -- models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_a_trace_says_what_it_is_of(family: str) -> None:
    model = tiny(family, hidden=96, num_experts=12, top_k=3)
    info = describe(model, find_moe_layers(model), "org/tiny", {"seed": 1})
    layers = 2 if family.startswith("deepseek") else 3
    assert (info.model, info.model_type, info.revision, info.settings) == ("org/tiny", family, None, {"seed": 1})
    assert (info.hidden_size, info.num_experts, info.top_k) == (96, [12] * layers, [3] * layers)
    assert set(info.versions) == {"promoe", "torch", "transformers"}


@pytest.mark.parametrize("harm", ["top_k", "weight", "width"])
def test_gates_that_cannot_be_described(model: PreTrainedModel, harm: str) -> None:
    layers = find_moe_layers(model)
    gate: Any = layers[1].gate
    if harm == "top_k":
        layers[1] = dataclasses.replace(layers[1], top_k=None)
    elif harm == "weight":
        gate.weight = nn.Parameter(torch.zeros(4, 64))
    else:
        gate.weight = nn.Parameter(torch.zeros(8, 32))
    with pytest.raises(UnsupportedModelError, match=r"gates of tiny cannot be recorded: .*Choose a model of another"):
        describe(model, layers, "tiny", {})


def test_a_gate_whose_weights_have_another_form_has_no_width(model: PreTrainedModel) -> None:
    layer = find_moe_layers(model)[0]
    assert gate_width(layer) == 64
    layer.gate.weight = nn.Parameter(torch.zeros(64))
    assert gate_width(layer) is None


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gives token \d+, and the model knows 128: .*Put the model's own"):
        record(build("qwen2_moe"), tmp_path)


def test_a_model_without_moe_layers(tmp_path: Path) -> None:
    model = tiny("llama")
    with pytest.raises(UnsupportedModelError, match="has no MoE layers"):
        collect_module.record(model, TOKENIZER, PROMPTS, writer_of(tiny(), tmp_path, options()), options())


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_gates_are_kept_with_their_biases(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    layers = find_moe_layers(model)
    record(model, tmp_path)
    save_gates(layers, tmp_path)
    gates = RecordedTrace(tmp_path).gates
    for layer, gate in zip(layers, gates, strict=True):
        state = layer.gate.state_dict()
        assert gate.keys() == state.keys() > {"weight"}
        assert all(torch.equal(gate[name], state[name]) for name in state)


def test_errors_are_promoes_own(model: PreTrainedModel, tmp_path: Path) -> None:
    raising: list[Callable[[], Any]] = [
        lambda: record(model, tmp_path, shard_index=2, num_shards=9),
        lambda: record(tiny(max_position_embeddings=8), tmp_path / "b"),
    ]
    for action in raising:
        with pytest.raises(PromoeError):
            action()
