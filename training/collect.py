"""What `promoe-train collect` does: open a model, say how large the trace will be, run prompts, record what gates see.

Prompts are run in batches in the order of the data: first the prompts themselves, then what the model generates. A batch
depends on nothing but its prompts and the seed, so a collection that was interrupted, and goes on, records the same rows as
one that was not.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm

import promoe
from promoe.errors import CheckpointError, ConfigError, PromoeError, UnsupportedModelError
from promoe.experts.moe_layers import MoELayer, find_moe_layers
from promoe.model.context import context_tokens
from promoe.model.gguf.finding import is_gguf
from promoe.model.hub import base_of
from promoe.model.model_class import class_to_open
from promoe.model.tokenizer import check_known, load_tokenizer
from promoe.predictors.base import gate_weight
from promoe.training.encoding import encode
from promoe.training.gate_recorder import GateRecord, GateRecorder
from promoe.training.options import Collect
from promoe.training.prompts import Prompt, read_exclusions, read_prompts
from promoe.training.recorded_traces import TraceWriter, write_gates
from promoe.training.trace_folder import DECODE, PREFILL, Rows, TraceInfo, check_folder, part_paths
from promoe.units import format_memory

logger = logging.getLogger(__name__)

# So much is left free on the disk beside what the trace is expected to take.
SPARE_BYTES = 64 << 20


def collect(options: Collect) -> None:
    """Record a trace, or go on with one, and say what it holds.

    Raises:
        PromoeError: the model, the data or the folder cannot be used.
    """
    excluded = read_exclusions(options.exclude) if options.exclude is not None else []
    folder, settings = Path(options.out), settings_of(options, excluded)
    # Mistakes in the folder and the data are answered before a model is opened, which can take long.
    check_folder(folder, options.model, settings)
    prompts = read_prompts(options.data, excluded)
    first = next(prompts)
    model, tokenizer = open_model(options.model, options.dtype, options.cache)
    try:
        layers = find_moe_layers(model, allow_meta=True)
        info = describe(model, layers, options.model, settings)
        check_positions(model, options)
        print(check_disk(info, folder, options))
        writer = TraceWriter(folder, info, options.shard_index)
        if writer.num_tokens:
            print(f"going on after the {writer.num_tokens:,} tokens that are there")
        save_gates(layers, folder)
        record(model, tokenizer, chain([first], prompts), writer, options)
    finally:
        if options.cache is not None:
            model.promoe.close()
    print(f"{writer.num_tokens:,} tokens ({writer.decode_share:.0%} generated) in {folder}")


def settings_of(options: Collect, excluded: Collection[str]) -> dict[str, Any]:
    """Return the settings in which a collection must agree with a trace to go on with it. It may ask for more tokens.

    Args:
        options: how prompts are chosen and run.
        excluded: texts that are left out.
    """
    digest = hashlib.sha256(json.dumps(sorted(excluded)).encode()).hexdigest()
    return {
        "data": options.data,
        "excluded": f"{len(excluded)} prompts, sha256 {digest[:16]}" if excluded else None,
        "dtype": options.dtype,
        "decode_share": options.decode_share,
        "max_prompt_tokens": options.max_prompt_tokens,
        "batch_size": options.batch_size,
        "temperature": options.temperature,
        "seed": options.seed,
        "num_shards": options.num_shards,
    }


def open_model(path: str, dtype: str, cache: str | None) -> tuple[Any, Any]:
    """Return a model and its tokenizer. With `cache`, the model's experts stay on disk.

    Raises:
        CheckpointError: there is no model or tokenizer that can be opened.
        PromoeError: promoe cannot serve the model.
    """
    tokenizer = load_tokenizer(path)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # Transformers makes one up where there are no files
        raise CheckpointError(f"There is no tokenizer beside the model '{path}'. Put its files there.")
    try:
        chosen = None if dtype == "auto" else getattr(torch, dtype)
        if cache is not None:
            return promoe.from_pretrained(path, cache=cache, dtype=chosen), tokenizer
        if is_gguf(path):
            model = promoe.from_pretrained(path, cache="100%", experts="checkpoint", predictor=None, dtype=chosen)
            return promoe.unpatch(model), tokenizer
        # Never ask on the terminal whether a checkpoint's own code may run, nor open a pickle.
        safe = {"trust_remote_code": False, "use_safetensors": True}
        return class_to_open(base_of(path), safe).from_pretrained(path, dtype=dtype, **safe).eval(), tokenizer
    except PromoeError:
        raise  # a ConfigError is a ValueError too
    except Exception as error:  # Transformers computes with what config.json says
        raise CheckpointError(
            f"Cannot open the model '{path}': {type(error).__name__}: {str(error)[:2000].rstrip('. ')}. Transformers "
            "cannot open it: a file is missing or damaged, or its config.json is of a model that it does not have."
        ) from error


def describe(model: Any, layers: Sequence[MoELayer], name: str, settings: dict[str, Any]) -> TraceInfo:
    """Return the header of a model's trace.

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
    """Return the hidden size that a gate reads, from its weight `[num_experts, hidden_size]`; None: it has none."""
    weight = gate_weight(layer.gate.parameters(), layer.num_experts)
    return None if weight is None else weight.shape[1]


def check_positions(model: Any, options: Collect) -> None:
    """Raise ConfigError if sequences may become longer than the model has positions."""
    positions = context_tokens(model.config)
    if positions is not None and options.max_sequence > positions:
        raise ConfigError(
            f"Prompts of {options.max_prompt_tokens:,} tokens and what is generated, {options.max_sequence:,} in all, are more "
            f"than the model's {positions:,} positions. Choose a smaller --max-prompt-tokens or --decode-share."
        )


def check_disk(info: TraceInfo, folder: Path, options: Collect) -> str:
    """Return how large a shard's trace will be, in words.

    Raises:
        ConfigError: the disk has less free space than the trace still needs.
    """
    present = sum(path.stat().st_size for path in part_paths(folder, options.shard_index))
    expected = options.shard_tokens * info.token_bytes
    last_batch = options.batch_size * options.max_sequence * info.token_bytes  # it is finished, whatever it adds
    existing = next(path for path in (folder, *folder.resolve().parents) if os.path.exists(path))
    free = shutil.disk_usage(existing).free
    size = f"{options.shard_tokens:,} tokens of {format_memory(info.token_bytes)} = {format_memory(expected)}"
    if present < expected and expected - present + last_batch + SPARE_BYTES > free:
        raise ConfigError(
            f"The trace needs {size} and up to {format_memory(last_batch)} for the batch that completes it; "
            f"{format_memory(present)} are there, and {existing} has {format_memory(free)} free. Choose fewer --max-tokens, a "
            "smaller --batch-size or another --out."
        )
    return f"{size} into {folder} ({format_memory(free)} free)"


def save_gates(layers: Sequence[MoELayer], folder: Path) -> None:
    """Write the gates' parameters and buffers beside a trace, for predictors that start from them.

    Raises:
        TraceError: they cannot be written.
    """
    tensors = {
        f"{layer.layer_idx}.{name}": tensor.detach().to("cpu", copy=True).contiguous()
        for layer in layers
        for name, tensor in layer.gate.state_dict().items()
    }
    write_gates(folder, tensors)


def record(model: Any, tokenizer: Any, prompts: Iterable[Prompt], writer: TraceWriter, options: Collect) -> None:
    """Record until the shard has its tokens, or there are no more prompts.

    Args:
        model: a causal language model of Transformers, patched or not, in eval mode.
        tokenizer: the model's own.
        prompts: prompts from the start of the data; those that `writer` has are skipped.
        writer: writer of the shard.
        options: how to run them.

    Raises:
        ConfigError: sequences would be too long for the model, or no prompt belongs to the shard.
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
            writer.flush()  # also after an interruption: the batches that it has are whole
    if not writer.num_tokens:
        raise ConfigError(
            f"None of the prompts falls to shard {options.shard_index} of {options.num_shards}. Choose fewer --num-shards, or "
            "more data."
        )
    if writer.num_tokens < total:
        logger.warning("The data ended after %d of %d tokens.", writer.num_tokens, total)


def _encoded(
    prompts: Iterable[Prompt], tokenizer: Any, recorded: AbstractSet[int], options: Collect
) -> Iterator[tuple[int, list[int]]]:
    """Yield the prompts of the shard that are not recorded yet: position in the data, tokens."""
    for prompt in prompts:
        if prompt.idx % options.num_shards == options.shard_index and prompt.idx not in recorded:
            tokens = encode(prompt, tokenizer, options.max_prompt_tokens)
            if tokens:  # some tokenizers drop characters that they do not know
                yield prompt.idx, tokens


def _run(
    model: Any, batch: Sequence[tuple[int, list[int]]], pad_id: int, recorder: GateRecorder, options: Collect
) -> list[Rows]:
    """Run a batch, and return the rows of each of its prompts."""
    encoded = [tokens for _, tokens in batch]
    # Padded on the left, as generation wants it.
    ids = pad_sequence(list(map(torch.tensor, encoded)), True, pad_id, "left")
    mask = pad_sequence([torch.ones(len(tokens), dtype=torch.long) for tokens in encoded], True, 0, "left")
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
            # One sequence per prompt, one token at a time, whatever the model's generation config says.
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
    """Return the rows of one sequence: its prompt, and what was generated up to its end."""
    prefill, *steps = records
    # After its end, a sequence is only carried along with its batch.
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


def _end_ids(model: Any) -> frozenset[int]:
    ends = model.generation_config.eos_token_id
    return frozenset([ends] if isinstance(ends, int) else ends or [])


def _pad_id(tokenizer: Any, model: Any) -> int:
    """Return a token to pad with. It is masked, so any one will do that the model has."""
    # The model may not know the tokenizer's padding token.
    num_known = model.get_input_embeddings().num_embeddings
    for pad_id in (tokenizer.pad_token_id, model.generation_config.pad_token_id, *sorted(_end_ids(model))):
        if isinstance(pad_id, int) and 0 <= pad_id < num_known:
            return pad_id
    return 0
