"""A tiny model that is recorded, for tests of `promoe-train collect`, and what it does with each prompt alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tiny_checkpoint import byte_tokenizer
from tiny_models import build
from torch.nn import functional
from transformers import PreTrainedModel

from promoe import EmulatedLink
from promoe.experts.moe_layers import find_moe_layers
from promoe.training import collect as collect_module
from promoe.training.collect import describe, settings_of
from promoe.training.encoding import encode
from promoe.training.options import Collect
from promoe.training.prompts import Message, Prompt
from promoe.training.recorded_traces import RecordedTrace, TraceWriter

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
