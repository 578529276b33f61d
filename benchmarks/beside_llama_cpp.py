"""Beside llama.cpp with everything in RAM: a random Qwen3-MoE with experts of real size, which both compute alike.

    python benchmarks/beside_llama_cpp.py [--layers 4] [--pairs 3] [--json FILE]

Prints the tables of `promoe bench` with a slot for every expert, then which operations the time of a token goes to, with
experts in int8. The model has hidden size 2048, and 64 experts of width 768 per layer, 8 of them for each token: with 4
layers 2.6 GB. It has the vocabulary of the demo model. Needs `pip install 'promoe[bench-llama]'`. Takes ten minutes on two
cores.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from common import DTYPE, OUT, heldout_prompts, make_parser
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

import promoe
from promoe.commands.bench.command import run_bench
from promoe.commands.bench.example import find_example
from promoe.commands.bench.options import Options
from promoe.commands.bench.peers import prepare_gguf
from promoe.commands.measure import generate
from promoe.units import format_ms

SYSTEMS = ("resident", "gate:q8_0-int8", "gate:q4_0", "llama-cpp:q8_0", "llama-cpp:q4_0")
PROFILED_TOKENS = 16
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def random_model(layers: int, folder: Path) -> Path:
    """Write the model, with the demo model's tokenizer, unless it is there. Returns its folder."""
    example = find_example().checkpoint
    if (folder / TOKENIZER_FILES[0]).is_file():
        return folder
    demo = AutoConfig.from_pretrained(example)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=demo.vocab_size,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=demo.bos_token_id,
        eos_token_id=demo.eos_token_id,
        pad_token_id=demo.pad_token_id,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=DTYPE).save_pretrained(folder)
    for name in reversed(TOKENIZER_FILES):
        shutil.copyfile(example / name, folder / name)
    return folder


def print_profile(checkpoint: Path) -> None:
    """Print the operations of a token and the time between them, of the Q8_0 file with all experts in slots in int8."""
    config = promoe.PromoeConfig(bypass=False)
    model = promoe.from_pretrained(checkpoint, cache="100%", experts="int8", dtype=DTYPE, config=config)
    ids = heldout_prompts(1)[0]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    generate(model, inputs, PROFILED_TOKENS)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        start_s = time.perf_counter()
        generate(model, inputs, PROFILED_TOKENS)
        wall_s = time.perf_counter() - start_s
    operations = profiler.key_averages()
    inside_s = sum(operation.self_cpu_time_total for operation in operations) / 1e6
    print(f"\n## What a token's time goes to: {PROFILED_TOKENS} tokens and their prompt, profiled, experts in int8\n")
    print(f"{format_ms(wall_s)} ms in all; {format_ms(inside_s)} ms in operations of torch, the rest in Python.\n")
    print(operations.table(sort_by="self_cpu_time_total", row_limit=15))
    model.promoe.close()


def main(arguments: Sequence[str]) -> None:
    parser = make_parser(__doc__, __file__)
    parser.add_argument("--layers", type=int, default=4, help="of the model (default: 4)")
    parser.add_argument("--pairs", type=int, default=3, help="prompts (default: 3)")
    parser.add_argument("--max-new-tokens", type=int, default=24, help="per prompt (default: 24)")
    asked = parser.parse_args(arguments)
    checkpoint = random_model(asked.layers, OUT / f"random-qwen3-moe-{asked.layers}")
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    run_bench(
        Options(
            model=str(checkpoint),
            cache=["100%"],
            systems=list(SYSTEMS),
            pairs=asked.pairs,
            max_new_tokens=asked.max_new_tokens,
            out=str(OUT / "beside-llama-cpp"),
            json=str(asked.json),
        )
    )
    print_profile(prepare_gguf("q8_0", DTYPE, checkpoint, OUT / "beside-llama-cpp" / "profiled"))


if __name__ == "__main__":
    main(sys.argv[1:])
