"""Load the tokenizer of a checkpoint, and encode prompts with it."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from promoe.errors import CheckpointError
from promoe.model.gguf.finding import find_gguf, is_gguf
from promoe.model.gguf.tokenizer import read_tokenizer
from promoe.model.hub import base_of


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a checkpoint; that of GGUF files is in them.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    if is_gguf(model):
        gguf: PreTrainedTokenizerBase = read_tokenizer(find_gguf(model)[0])
        return gguf
    base = base_of(model)
    if base != model and _has_tokenizer(model):
        base = model  # an adapter may have a tokenizer of its own, with more tokens
    try:
        # Never ask on the terminal whether a checkpoint's own code may run.
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise CheckpointError(
            f"Cannot open the tokenizer of '{base[:500]}': {type(error).__name__}: {str(error)[:2000].rstrip('. ')}. Its files "
            "(tokenizer.json, tokenizer_config.json) are missing, damaged, or Git LFS pointers that were not pulled."
        ) from error
    return tokenizer


def _has_tokenizer(adapter: str) -> bool:
    """Return whether a folder or a repository of the hub has a tokenizer's files."""
    names = ("tokenizer_config.json", "tokenizer.json")
    if os.path.isdir(adapter):
        return any(os.path.isfile(os.path.join(adapter, name)) for name in names)
    from transformers.utils import cached_file

    quietly = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    return any(cached_file(adapter, name, **quietly) is not None for name in names)


def check_known(model: Any, ids: torch.Tensor) -> None:
    """Raise CheckpointError if a tokenizer returned ids for which the model has no embedding."""
    num_known = model.get_input_embeddings().num_embeddings
    if int(ids.max()) >= num_known:
        raise CheckpointError(
            f"The tokenizer returned token {int(ids.max())}, but the model has only {num_known} tokens: they do not belong "
            "together. Put the model's own tokenizer into its folder."
        )


def prompt_inputs(tokenizer: PreTrainedTokenizerBase, prompt: str) -> dict[str, torch.Tensor]:
    """Return `input_ids` and `attention_mask`, both `[1, n]`, of a prompt. The chat template is applied if there is one.

    Raises:
        CheckpointError: the tokenizer or its chat template cannot encode the prompt.
    """
    try:
        if tokenizer.chat_template is not None:
            messages = [{"role": "user", "content": prompt}]
            encoded = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            encoded = tokenizer(prompt, return_tensors="pt")
        found = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    except Exception as error:  # a template is a program, and may raise anything
        raise CheckpointError(
            f"The model's tokenizer or chat template cannot encode the prompt: {type(error).__name__}: {str(error)[:2000]}. "
            "Repair tokenizer_config.json or chat_template.jinja."
        ) from error
    if not found["input_ids"].numel():
        raise CheckpointError(
            "The model's tokenizer turns the prompt into no tokens. Its own files are missing or empty, so Transformers made "
            "one without a vocabulary. Put tokenizer.json and tokenizer_config.json into the checkpoint's folder."
        )
    return found
