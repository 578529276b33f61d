"""What is trained and how: the sizes, the model, the optimizers, the learning rate and the losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from muon import Muon
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen2MoeConfig, Qwen2MoeForCausalLM

CURVE_WINDOWS = 32  # held-out windows for the loss on the way
FINAL_WINDOWS = 256  # and for the loss in the model card
EVALUATION_BATCH = 16


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result, apart from the machine's speed."""

    minutes: float = 80.0
    optimizer: str = "muon"  # "muon" (matrices), "muon-dense" (all but experts), "adamw"
    lr: float = 4e-3  # AdamW's, or of the embeddings, norms and routers
    muon_lr: float = 6e-3
    newton_schulz_steps: int = 3
    weight_decay: float = 0.05
    warmup: float = 0.02  # share of the minutes
    decay: float = 0.7  # share of the minutes, at the end, in which the rate falls linearly to 0
    batch: int = 4
    context: int = 512
    balance_weight: float = 0.01
    z_weight: float = 1e-4
    seed: int = 0
    vocab_size: int = 4096
    hidden: int = 192
    layers: int = 12
    experts: int = 32
    expert_width: int = 72
    records: int | None = None  # read only so many records of ShareGPT


SMOKE = Recipe(
    minutes=0.05, batch=2, context=32, vocab_size=400, hidden=32, layers=2, experts=4, expert_width=8, records=60
)


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen2MoeForCausalLM:
    """Return a randomly initialised model. Output projections start at zero, so every block starts as the identity."""
    torch.manual_seed(recipe.seed)
    heads = max(1, recipe.hidden // 48)
    config = Qwen2MoeConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden,
        intermediate_size=2 * recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=4 * recipe.context,
        moe_intermediate_size=recipe.expert_width,
        shared_expert_intermediate_size=recipe.expert_width,
        num_experts=recipe.experts,
        num_experts_per_tok=min(4, recipe.experts),
        norm_topk_prob=True,
        router_aux_loss_coef=recipe.balance_weight,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        experts_implementation="grouped_mm",
    )
    model = Qwen2MoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            torch.nn.init.zeros_(parameter)
    return model


def build_optimizers(model: torch.nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for the rest; each group remembers its peak rate."""
    muon: list[Tensor] = []
    fused: list[Tensor] = []
    decayed: list[Tensor] = []
    plain: list[Tensor] = []
    for name, parameter in model.named_parameters():
        is_expert = parameter.ndim == 3
        is_matrix = name.endswith("proj.weight") or is_expert
        if is_matrix and recipe.optimizer != "adamw" and not (is_expert and recipe.optimizer == "muon-dense"):
            muon.append(parameter)
            fused += [parameter] if "gate_up" in name else []
        else:
            (decayed if is_matrix else plain).append(parameter)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=recipe.lr,
            betas=(0.9, 0.95),
            fused=True,
        )
    ]
    if muon:
        optimizers.append(
            Muon(
                muon,
                lr=recipe.muon_lr,
                weight_decay=recipe.weight_decay,
                steps=recipe.newton_schulz_steps,
                fused=fused,
            )
        )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def rate_at(share: float, recipe: Recipe) -> float:
    """Learning rate, as a share of its peak, after `share` (0 to 1) of the minutes: warm up, hold, fall to 0."""
    return max(0.0, min(1.0, (share + 1e-3) / recipe.warmup, (1.0 - share) / recipe.decay))


def losses(model: Any, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy (nats per token), load-balance loss per layer (1 = uniform; mean), router z-loss (mean)."""
    output = model(input_ids=batch[:, :-1], use_cache=False, output_router_logits=True)
    entropy = F.cross_entropy(output.logits.flatten(0, 1), batch[:, 1:].flatten())
    logits = torch.stack(output.router_logits).float()  # [layers, tokens, experts]
    num_experts, top_k = logits.size(-1), model.config.num_experts_per_tok
    chosen = torch.zeros_like(logits).scatter(-1, logits.topk(top_k).indices, 1.0 / top_k)
    # transformers pools all layers before it balances, which lets single layers collapse.
    balance = num_experts * (chosen.mean(1) * logits.softmax(-1).mean(1)).sum(-1).mean()
    return entropy, balance, logits.logsumexp(-1).square().mean()


@torch.no_grad()
def heldout_loss(model: Any, tokens: NDArray[np.uint16], recipe: Recipe, num_windows: int) -> float:
    """Return the mean cross entropy in nats per token over the first `num_windows` windows of the held-out stream."""
    count = min(num_windows, (len(tokens) - 1) // recipe.context)
    inputs = torch.from_numpy(tokens[: count * recipe.context].astype(np.int64)).view(count, recipe.context)
    targets = torch.from_numpy(tokens[1 : count * recipe.context + 1].astype(np.int64)).view(count, recipe.context)
    total = 0.0
    for batch, target in zip(
        torch.split(inputs, EVALUATION_BATCH), torch.split(targets, EVALUATION_BATCH), strict=True
    ):
        logits = model(input_ids=batch, use_cache=False).logits
        total += float(F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"))
    return total / targets.numel()
