"""A tiny random MoE checkpoint with a tokenizer: what commands open. Written in well under a second."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from predictors.trained_predictors import make
from tiny_models import build
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

REPOSITORY = Path(__file__).resolve().parent.parent
CHAT_TEMPLATE = (
    "{% for message in messages %}<|human|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|gpt|>{% endif %}"
)


def write_checkpoint(folder: Path, *, chat: bool = True, **overrides: Any) -> Path:
    """A Qwen2-MoE of 3 layers, 8 experts, top 2, in bf16, with one token per byte."""
    tokenizer = byte_tokenizer(chat)
    fields: dict[str, Any] = {"hidden": 64, "intermediate": 16, "dtype": torch.bfloat16, **overrides}
    model = build("qwen2_moe", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **fields)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def byte_tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    """Bytes and three special tokens."""
    special = ["<|end|>", "<|human|>", "<|gpt|>"]
    vocabulary = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({token: idx for idx, token in enumerate(vocabulary)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|end|>",
        pad_token="<|end|>",
        extra_special_tokens={"human_token": "<|human|>", "gpt_token": "<|gpt|>"},
        chat_template=CHAT_TEMPLATE if chat else None,
    )


def write_checkout(root: Path, *, loss: float | None = 3.1, predictor: bool = True, **overrides: Any) -> Path:
    """A folder that looks like a checkout to `promoe demo`: prompts, the script that widens, a checkpoint and its card, a
    predictor."""
    folder = root / "examples" / "sharegpt_moe"
    write_checkpoint(folder / "checkpoint", **overrides)
    shutil.copy(REPOSITORY / "examples" / "sharegpt_moe" / "widen.py", folder)
    if loss is not None:
        card = f"- Held-out loss **{loss:.3f}** nats per token\n"
        (folder / "checkpoint" / "README.md").write_text(card, encoding="utf-8")
    if predictor:
        sizes = {"num_layers": 3, "hidden_size": 64, "num_experts": 8, "top_k": 2}
        make(**sizes, lookahead=2).save_pretrained(folder / "predictor")
    prompts = [f"Question {number}: what is {'very ' * number}good?" for number in range(6)]
    (folder / "heldout_prompts.json").write_text(json.dumps(prompts), encoding="utf-8")
    return root
