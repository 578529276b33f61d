"""Runs a model over prompts and records its gates: prefill of the prompt, then what it generates.

Prompts are run in batches in the order of the data. A batch depends on nothing but its prompts and the seed, so a
collection that was interrupted, and goes on, records the same rows as one that was not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tqdm.auto import tqdm

import promoe
from promoe.errors import ConfigError, UnsupportedModelError
from promoe.experts.moe_layers import MoELayer, find_moe_layers
from promoe.model.tokenizer import check_known
from promoe.training.collect_options import CollectOptions, check_positions
from promoe.training.gate_recorder import GateRecord, GateRecorder
from promoe.training.prompt_encoding import encode
from promoe.training.prompts import Prompt
from promoe.training.recorded_traces import TraceWriter, write_gates
from promoe.training.trace_folder import DECODE, PREFILL, Rows, TraceInfo

logger = logging.getLogger(__name__)


def describe(model: Any, layers: Sequence[MoELayer], name: str, settings: dict[str, Any]) -> TraceInfo:
    """The header of a model's trace.

    Raises:
        UnsupportedModelError: its gates do not read hidden states of one size, or do not say how many they choose.
    """
    unknown = [layer.gate_name for layer in layers if layer.top_k is None or gate_width(layer) is None]
    sizes = {gate_width(layer) for layer in layers}
    if unknown or len(sizes) != 1:
        raise UnsupportedModelError(
            f"The gates of {name} cannot be recorded: they need weights [experts, hidden size], one hidden size and a known "
            f"top_k. Found hidden sizes {sizes}; without one, or without top_k: {unknown}. Choose a model of another family."
        )
    return TraceInfo(
        model=name,
        revision=getattr(model.config, "_commit_hash", None),
        model_type=model.config.model_type,
        hidden_size=next(size for size in sizes if size is not None),
        num_experts=[layer.num_experts for layer in layers],
        top_k=[layer.top_k for layer in layers if layer.top_k is not None],
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
        ConfigError: sequences would be too long for the model; no prompt falls to the shard.
        PromoeError: the model's gates cannot be recorded; a prompt cannot be encoded, or not for this model; the disk is
            full.
    """
    check_positions(model, options)
    layers = find_moe_layers(model, allow_meta=True)
    total = options.shard_tokens
    # Whole batches are recorded or missing, so what is left falls into the batches of an uninterrupted run.
    mine = _encoded(prompts, tokenizer, writer.recorded, options)
    with (
        GateRecorder(model, layers) as recorder,
        tqdm(total=total, initial=min(writer.num_tokens, total), unit="token", desc="collect", disable=None) as bar,
    ):
        try:
            while writer.num_tokens < total and (batch := list(islice(mine, options.batch_size))):
                writer.append(_run(model, batch, _pad_id(tokenizer, model), recorder, options))
                bar.update(min(writer.num_tokens, total) - bar.n)  # tqdm drops a total that is exceeded
        finally:
            writer.flush()  # also what an interrupted run has: its batches are whole
    if not writer.num_tokens:
        raise ConfigError(
            f"None of the prompts falls to shard {options.shard_index} of {options.num_shards}. Choose fewer --num-shards, or "
            "more data."
        )
    if writer.num_tokens < total:
        logger.warning("The data ended after %d of %d tokens.", writer.num_tokens, total)


def _encoded(
    prompts: Iterable[Prompt], tokenizer: Any, recorded: AbstractSet[int], options: CollectOptions
) -> Iterator[tuple[int, list[int]]]:
    """The prompts of the shard that are not recorded yet: position in the data, tokens."""
    for prompt in prompts:
        if prompt.idx % options.num_shards == options.shard_index and prompt.idx not in recorded:
            tokens = encode(prompt, tokenizer, options.max_prompt_tokens)
            if tokens:  # some tokenizers leave out characters that they do not know
                yield prompt.idx, tokens


def _run(
    model: Any, batch: Sequence[tuple[int, list[int]]], pad_id: int, recorder: GateRecorder, options: CollectOptions
) -> list[Rows]:
    """Rows of each prompt of a batch."""
    encoded = [tokens for _, tokens in batch]
    ids, mask = _padded(encoded, pad_id)
    check_known(model, ids)
    new_tokens = options.new_tokens(sum(map(len, encoded)) / len(encoded))
    sampling = {} if options.temperature is None else {"do_sample": True, "temperature": options.temperature}
    gpus = [model.device] if model.device.type == "cuda" else []
    with torch.inference_mode(), torch.random.fork_rng(gpus):
        torch.manual_seed(options.seed + batch[0][0])
        model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            # One more than is recorded: the last token that is generated is not read again.
            max_new_tokens=new_tokens + 1,
            pad_token_id=pad_id,
            # One token of one sequence at a time, whatever the model's generation config says.
            use_cache=True,
            num_beams=1,
            num_return_sequences=1,
            **sampling,
        )
    records = recorder.take()
    passes = [record.token_ids.shape for record in records]
    if passes[0] != ids.shape or set(passes[1:]) - {(len(batch), 1)}:
        raise UnsupportedModelError(
            f"{type(model).__name__} generates in passes of {sorted(set(passes))} tokens: prompts at once, then one token at a "
            "time, were expected. Remove what changes this from its generation_config.json."
        )
    ends = _end_ids(model)
    return [_rows(idx, row, len(tokens), records, ends) for row, (idx, tokens) in enumerate(batch)]


def _rows(prompt_idx: int, row: int, num_tokens: int, records: Sequence[GateRecord], ends: frozenset[int]) -> Rows:
    """One sequence's tokens: its prompt, and what was generated up to its end."""
    prefill, *steps = records
    # After its end it is only carried along with its batch.
    num_generated = next((i for i, step in enumerate(steps) if int(step.token_ids[row, 0]) in ends), len(steps))
    kept = [(prefill, slice(-num_tokens, None)), *((step, slice(None)) for step in steps[:num_generated])]
    return Rows(
        prompt=prompt_idx,
        phase=np.repeat([PREFILL, DECODE], [num_tokens, num_generated]),
        token_ids=np.concatenate([record.token_ids[row, tokens] for record, tokens in kept]),
        gate_inputs=torch.cat([record.gate_inputs[row, tokens] for record, tokens in kept]),
        gate_logits=np.concatenate([record.gate_logits[row, tokens] for record, tokens in kept]),
        experts=np.concatenate([record.experts[row, tokens] for record, tokens in kept]),
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
    num_known = (
        model.get_input_embeddings().num_embeddings
    )  # some tokenizers have a padding token that the model has not
    for pad_id in (tokenizer.pad_token_id, model.generation_config.pad_token_id, *sorted(_end_ids(model))):
        if isinstance(pad_id, int) and 0 <= pad_id < num_known:
            return pad_id
    return 0


def save_gates(layers: Sequence[MoELayer], folder: Path) -> None:
    """Keep the gates' parameters and buffers beside a trace: what predictors that build on gates start from.

    Raises:
        TraceError: they cannot be written.
    """
    tensors = {
        f"{layer.layer_idx}.{name}": tensor.detach().to("cpu", copy=True).contiguous()
        for layer in layers
        for name, tensor in layer.gate.state_dict().items()
    }
    write_gates(folder, tensors)
