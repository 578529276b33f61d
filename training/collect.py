"""Runs a model over prompts and records its gates: prefill of the prompt, then what it generates.

Prompts are run in batches in the order of the data. A batch depends on nothing but its prompts and the seed, so a
collection that was interrupted, and goes on, records the same rows as one that was not.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tqdm.auto import tqdm

import promoe
from promoe.errors import ConfigError
from promoe.moe_layers import MoELayer, find_moe_layers
from promoe.training.gate_recorder import GateRecord, GateRecorder
from promoe.training.prompts import Prompt, encode
from promoe.training.recorded_traces import DECODE, GATES_FILE, PREFILL, Rows, TraceInfo, TraceWriter
from promoe.units import format_memory

logger = logging.getLogger(__name__)

MAX_DECODE_SHARE = 0.9
# Left free on the disk beside what the trace is expected to take.
SPARE_BYTES = 64 << 20


@dataclass(frozen=True)
class CollectOptions:
    """How prompts are run.

    Args:
        max_tokens: rows to record, over all shards; the batch in which they are reached is finished.
        decode_share: rows that are generated, of all; less where answers end early.
        max_prompt_tokens: longer conversations are cut after an earlier question.
        batch_size: prompts run together.
        temperature: of sampling; None: as the model's own generation config says.
        seed: of sampling.
        shard_index: which share of the prompts is run.
        num_shards: into how many the prompts are divided.
    """

    max_tokens: int = 100_000
    decode_share: float = 0.5
    max_prompt_tokens: int = 256
    batch_size: int = 32
    temperature: float | None = None
    seed: int = 0
    shard_index: int = 0
    num_shards: int = 1

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_prompt_tokens", "batch_size", "num_shards"):
            _require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        _require(
            0 <= self.decode_share <= MAX_DECODE_SHARE, "decode_share", f"0 to {MAX_DECODE_SHARE}", self.decode_share
        )
        _require(self.temperature is None or self.temperature > 0, "temperature", "more than 0", self.temperature)
        _require(
            0 <= self.shard_index < self.num_shards, "shard_index", f"0 to {self.num_shards - 1}", self.shard_index
        )

    @property
    def shard_tokens(self) -> int:
        """Rows of this shard."""
        return -(-self.max_tokens // self.num_shards)

    def settings(self, data: str, excluded: int) -> dict[str, Any]:
        """What must be the same for a trace to be gone on with; more tokens may be asked for."""
        return {
            "data": data,
            "excluded_prompts": excluded,
            "decode_share": self.decode_share,
            "max_prompt_tokens": self.max_prompt_tokens,
            "batch_size": self.batch_size,
            "temperature": self.temperature,
            "seed": self.seed,
            "num_shards": self.num_shards,
        }


def _require(holds: bool, name: str, allowed: str, found: object) -> None:
    if not holds:
        raise ConfigError(f"--{name.replace('_', '-')} must be {allowed}. Got {found} instead.")


def describe(model: Any, layers: Sequence[MoELayer], name: str, settings: dict[str, Any]) -> TraceInfo:
    """The header of a model's trace.

    Raises:
        ConfigError: its gates do not read hidden states of one size.
    """
    sizes = {gate_width(layer) for layer in layers}
    if len(sizes) != 1 or None in sizes:
        raise ConfigError(f"The gates of {name} have no weights [experts, hidden] of one hidden size: found {sizes}.")
    return TraceInfo(
        model=name,
        revision=getattr(model.config, "_commit_hash", None),
        model_type=model.config.model_type,
        hidden_size=next(size for size in sizes if size is not None),
        num_experts=[layer.num_experts for layer in layers],
        top_k=[layer.top_k or 1 for layer in layers],
        settings=settings,
        versions={
            "promoe": promoe.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    )


def gate_width(layer: MoELayer) -> int | None:
    """Hidden size that a gate reads: of its weight `[num_experts, hidden_size]`."""
    for parameter in layer.gate.parameters():
        if parameter.dim() == 2 and parameter.shape[0] == layer.num_experts:
            return int(parameter.shape[1])
    return None


def check_disk(info: TraceInfo, folder: Path, num_tokens: int) -> str:
    """How large a trace will be, in words.

    Raises:
        ConfigError: the disk has less free.
    """
    needed = num_tokens * info.token_bytes
    existing = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    size = f"{num_tokens:,} tokens of {format_memory(info.token_bytes)} = {format_memory(needed)}"
    if needed + SPARE_BYTES > free:
        raise ConfigError(
            f"The trace needs {size}, and {existing} has {format_memory(free)} free. Choose fewer --max-tokens or another "
            "--out."
        )
    return f"{size} into {folder} ({format_memory(free)} free)"


def collect(
    model: Any, tokenizer: Any, prompts: Iterable[Prompt], writer: TraceWriter, options: CollectOptions
) -> None:
    """Record until the shard has its tokens, or the prompts are used up.

    Args:
        model: a causal language model of Transformers, patched or not, in eval mode.
        tokenizer: its own.
        prompts: from the start of the data; those that `writer` has are skipped.
        writer: of the shard.
        options: how to run them.

    Raises:
        PromoeError: the model's gates cannot be recorded; a prompt cannot be encoded; the disk is full.
    """
    layers = find_moe_layers(model, allow_meta=True)
    mine = (p for p in prompts if p.idx % options.num_shards == options.shard_index and p.idx >= writer.next_prompt)
    with (
        GateRecorder(model, layers) as recorder,
        tqdm(total=options.shard_tokens, initial=writer.num_tokens, unit="token", desc="collect", disable=None) as bar,
    ):
        try:
            while writer.num_tokens < options.shard_tokens and (batch := list(islice(mine, options.batch_size))):
                before = writer.num_tokens
                writer.append(_run(model, tokenizer, batch, recorder, options))
                bar.update(writer.num_tokens - before)
        finally:
            writer.flush()  # also what an interrupted run has: its batches are whole
    if writer.num_tokens < options.shard_tokens:
        logger.warning("The data ended after %d of %d tokens.", writer.num_tokens, options.shard_tokens)


def _run(
    model: Any, tokenizer: Any, batch: Sequence[Prompt], recorder: GateRecorder, options: CollectOptions
) -> list[Rows]:
    """Rows of each prompt of a batch."""
    encoded = [encode(prompt, tokenizer, options.max_prompt_tokens) for prompt in batch]
    ids, mask = _padded(encoded, _pad_id(tokenizer, model))
    prompt_tokens = sum(map(len, encoded)) / len(encoded)
    new_tokens = round(prompt_tokens * options.decode_share / (1 - options.decode_share))
    ids, mask = ids.to(model.device), mask.to(model.device)
    recorder.take()  # what a pass that was interrupted has left
    with torch.inference_mode(), torch.random.fork_rng():
        torch.manual_seed(options.seed + batch[0].idx)
        if new_tokens:
            sampling = {} if options.temperature is None else {"do_sample": True, "temperature": options.temperature}
            # One more than is recorded: the last token that is generated is not read again.
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=new_tokens + 1,
                pad_token_id=_pad_id(tokenizer, model),
                **sampling,
            )
        else:
            model(input_ids=ids, attention_mask=mask, use_cache=False)
    records = recorder.take()
    ends = _end_ids(model)
    return [_rows(prompt.idx, sequence, records, ends) for sequence, prompt in enumerate(batch)]


def _rows(prompt_idx: int, sequence: int, records: Sequence[GateRecord], ends: frozenset[int]) -> Rows:
    """One sequence's tokens: its prompt, and what was generated up to its end."""
    kept: list[tuple[int, GateRecord, Any]] = [(PREFILL, records[0], records[0].real[sequence])]
    for record in records[1:]:
        if int(record.token_ids[sequence, 0]) in ends:
            break  # from here on it is only carried along with its batch
        kept.append((DECODE, record, slice(None)))
    counts = [len(record.token_ids[sequence, tokens]) for _, record, tokens in kept]
    return Rows(
        prompt=prompt_idx,
        phase=np.repeat([phase for phase, _, _ in kept], counts),
        token_ids=np.concatenate([record.token_ids[sequence, tokens] for _, record, tokens in kept]),
        gate_inputs=torch.cat([record.gate_inputs[sequence][tokens] for _, record, tokens in kept]),
        gate_logits=np.concatenate([record.gate_logits[sequence, tokens] for _, record, tokens in kept]),
        experts=np.concatenate([record.experts[sequence, tokens] for _, record, tokens in kept]),
    )


def _padded(encoded: Sequence[Sequence[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask `[sequences, tokens]`, padded on the left, as generation wants it."""
    length = max(map(len, encoded))
    ids = torch.full((len(encoded), length), pad_id)
    mask = torch.zeros((len(encoded), length), dtype=torch.long)
    for row, tokens in enumerate(encoded):
        ids[row, length - len(tokens) :] = torch.tensor(tokens)
        mask[row, length - len(tokens) :] = 1
    return ids, mask


def _end_ids(model: Any) -> frozenset[int]:
    ends = model.generation_config.eos_token_id
    return frozenset([ends] if isinstance(ends, int) else ends or [])


def _pad_id(tokenizer: Any, model: Any) -> int:
    """Masked wherever it stands, so any token will do."""
    for pad_id in (tokenizer.pad_token_id, model.generation_config.pad_token_id, *sorted(_end_ids(model))):
        if isinstance(pad_id, int):
            return pad_id
    return 0


def save_gates(layers: Sequence[MoELayer], folder: Path) -> None:
    """Write the gates' parameters and buffers, `<layer>.<name>`: what kinds that build on gates start from."""
    path = folder / GATES_FILE
    tensors = {
        f"{layer.layer_idx}.{name}": tensor.detach().to("cpu", copy=True).contiguous()
        for layer in layers
        for name, tensor in layer.gate.state_dict().items()
    }
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished)
    unfinished.rename(path)
