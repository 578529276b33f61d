"""Recorded traces made up for tests, and the comparison of two that were really recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from promoe.training.recorded_traces import RecordedTrace, TraceWriter
from promoe.training.trace_folder import DECODE, PREFILL, Rows, TraceInfo

LAYERS, HIDDEN, EXPERTS, TOP_K = 3, 5, 4, 2


def make_info(**changes: Any) -> TraceInfo:
    info = TraceInfo("org/model", "abc", "qwen2_moe", HIDDEN, [EXPERTS] * LAYERS, [TOP_K] * LAYERS, {"seed": 0})
    return dataclasses.replace(info, **changes)


def make_rows(prompt: int, length: int = 4, generated: int = 1) -> Rows:
    """Random rows of one prompt; the same for the same arguments."""
    rng = np.random.default_rng([prompt, length])
    bits = torch.from_numpy(rng.integers(0, 1 << 16, (length, LAYERS, HIDDEN), np.uint16))
    ids = rng.random((length, LAYERS, EXPERTS)).argsort(axis=2)[:, :, :TOP_K]
    return Rows(
        prompt=prompt,
        phase=np.repeat([PREFILL, DECODE], [length - generated, generated]),
        token_ids=rng.integers(0, 100, length, np.int32),
        gate_inputs=bits.view(torch.bfloat16),
        gate_logits=rng.random((length, LAYERS * EXPERTS), np.float32),
        experts=ids.reshape(length, -1).astype(np.int16),
    )


PROMPTS = [make_rows(0, 4), make_rows(2, 3, 0), make_rows(3, 6, 3), make_rows(7, 1, 0), make_rows(8, 5, 2)]


def write(folder: Path, parts: Sequence[Sequence[Rows]], info: TraceInfo | None = None, shard_index: int = 0) -> Path:
    """A trace of these parts."""
    writer = TraceWriter(folder, info or make_info(), shard_index)
    for prompts in parts:
        writer.append(prompts)
        writer.flush()
    return folder


def columns(trace: RecordedTrace) -> dict[str, Any]:
    """All that a trace holds, as arrays, its prompts in ascending order."""
    lengths = trace.routing.prompt_lengths
    starts = np.cumsum(lengths) - lengths
    order = np.concatenate([np.arange(starts[i], starts[i] + lengths[i]) for i in np.argsort(trace.prompts)])
    return {
        "prompts": np.sort(trace.prompts),
        "lengths": lengths[np.argsort(trace.prompts)],
        "token_ids": trace.routing.token_ids[order],
        "generated": _generated(trace)[order],
        "gate_inputs": trace.gate_inputs(order).view(torch.uint16).numpy(),
        "gate_logits": trace.gate_logits(order).view(np.uint32),
        "experts": trace.routing.experts[order],
    }


def _generated(trace: RecordedTrace) -> Any:
    assert trace.routing.generated is not None
    return trace.routing.generated


def assert_same_rows(found: Path, wanted: Path) -> None:
    """Bit for bit, whatever the parts and their order."""
    found_columns, wanted_columns = columns(RecordedTrace(found)), columns(RecordedTrace(wanted))
    for name, values in wanted_columns.items():
        np.testing.assert_array_equal(found_columns[name], values, err_msg=name)
