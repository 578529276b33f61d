"""The tokenizer beside a checkpoint, and prompts as it encodes them."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from promoe.errors import CheckpointError
from promoe.model.hub import base_of


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer beside a checkpoint.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    base = base_of(model)
    if base != model and _has_tokenizer(model):
        base = model  # an adapter's own, which may know more tokens
    try:
        # Never ask on the terminal whether a checkpoint's own code may run.
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    except Exception as error:  # tokenizers raises that class itself
        raise CheckpointError(
            f"Cannot open the tokenizer of '{base[:500]}': {type(error).__name__}: {str(error)[:2000].rstrip('. ')}. Its files "
            "(tokenizer.json, tokenizer_config.json) are missing, damaged, or Git LFS pointers that were not pulled."
        ) from error
    return tokenizer


def _has_tokenizer(adapter: str) -> bool:
    """Return whether a folder, or a hub id, has a tokenizer's files."""
    names = ("tokenizer_config.json", "tokenizer.json")
    if os.path.isdir(adapter):
        return any(os.path.isfile(os.path.join(adapter, name)) for name in names)
    from transformers.utils import cached_file

    quietly = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    return any(cached_file(adapter, name, **quietly) is not None for name in names)


def check_known(model: Any, ids: torch.Tensor) -> None:
    """Raise CheckpointError where a tokenizer gave ids that the model has no embedding for."""
    num_known = model.get_input_embeddings().num_embeddings
    if int(ids.max()) >= num_known:
        raise CheckpointError(
            f"The tokenizer gives token {int(ids.max())}, and the model knows {num_known}: they do not belong together. Put "
            "the model's own tokenizer beside it."
        )


def prompt_inputs(tokenizer: PreTrainedTokenizerBase, prompt: str) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask`, both `[1, n]`, through the chat template where there is one.

    Raises:
        CheckpointError: the tokenizer, or its chat template, cannot encode it.
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
    except Exception as error:  # a template computes, and may divide by zero
        raise CheckpointError(
            f"The model's tokenizer or chat template cannot encode the prompt: {type(error).__name__}: {str(error)[:2000]}. "
            "Mend tokenizer_config.json or chat_template.jinja."
        ) from error
    if not found["input_ids"].numel():
        raise CheckpointError(
            "The model's tokenizer makes no tokens of the prompt: its own files are missing or empty, and Transformers made up "
            "one that knows nothing. Put tokenizer.json and tokenizer_config.json beside the checkpoint."
        )
    return found
