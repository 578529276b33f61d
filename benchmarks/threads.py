"""How often a layer that runs in groups differs from the unmodified model in a last bit, by threads and dtype.

    python benchmarks/threads.py [--threads 1 2 3 4] [--dtypes float32 bfloat16] [--activations silu gelu_pytorch_tanh]
        [--prompts 100] [--tokens 7] [--cache 50%]

torch gives a large elementwise operation to several threads, which may cut a row of the activation in the middle; what is
left of a piece after whole vectors goes through other code, whose last bit can differ. The unmodified model computes all
rows of a layer in one operation, groups theirs in several. So such a layer waits for all its experts and runs at once; as far
as there are slots for them, else in groups whose activations are computed with zeros in place of what is missing
(`promoe.experts.activation`). Half of the experts of these two layers, with random weights and as wide as large models', are
all of one layer's; with `--cache 25%` there are not enough slots.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2MoeConfig

import promoe

WIDTH, EXPERTS, TOP_K = 14336, 8, 3


def make(dtype: torch.dtype, activation: str) -> PreTrainedModel:
    """The same weights each time."""
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=500,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        hidden_act=activation,
        moe_intermediate_size=WIDTH,
        shared_expert_intermediate_size=64,
        intermediate_size=64,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.data = torch.randn_like(tensor) * 0.1
    return model


@torch.inference_mode()
def differing(dtype: torch.dtype, activation: str, prompts: list[torch.Tensor], cache: str) -> int:
    """Prompts whose logits are not those of the unmodified model."""
    plain = make(dtype, activation)
    expected = [plain(prompt).logits for prompt in prompts]
    config = promoe.PromoeConfig(min_group_bytes=0, governor=False)
    link = promoe.EmulatedLink(bandwidth_bytes_per_s=2e9)
    patched = promoe.patch(make(dtype, activation), cache=cache, link=link, config=config)
    found = [patched(prompt).logits for prompt in prompts]
    promoe.unpatch(patched)
    return sum(not torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--activations", nargs="+", default=["silu", "gelu_pytorch_tanh"])
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=7, help="in each prompt")
    parser.add_argument("--cache", default="50%", help="50%% of the experts are as many slots as a layer has experts")
    options = parser.parse_args()
    torch.manual_seed(1)
    prompts = [torch.randint(0, 500, (1, options.tokens)) for _ in range(options.prompts)]
    for name, activation, threads in itertools.product(options.dtypes, options.activations, options.threads):
        torch.set_num_threads(threads)
        count = differing(getattr(torch, name), activation, prompts, options.cache)
        print(
            f"{name}, {activation}, {threads} threads: {count} of {len(prompts)} prompts differ in some bit", flush=True
        )


if __name__ == "__main__":
    main()
