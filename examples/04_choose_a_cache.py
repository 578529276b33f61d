# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Choose a cache size and a policy
#
# How much memory should the experts get? Enough that waiting no longer matters, but not more. That depends on how the
# model routes, how fast it computes and how fast experts arrive. This notebook records the routing of a model once,
# tries every cache size in a simulator, and compares the simulator with a few real runs.
#
# The model is the small one of this repository. It is behind an *emulated link*, which delays real bytes so much that
# waiting matters, as it does for large models. The method works for any model. The numbers belong to this one.

# %%
# %matplotlib inline
import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

import numpy as np
import torch
from IPython.display import display

import promoe
from promoe.commands.bench.stock import load_stock
from promoe.commands.simulate.machine import Geometry, Machine
from promoe.commands.simulate.run import Scenario, simulate
from promoe.stats.figure_style import COLOURS, INK, new_figure, plain, set_title
from promoe.training.cli import main as promoe_train
from promoe.training.recorded_traces import RecordedTrace
from promoe.units import aligned, format_memory, format_ms

MODEL = Path(os.environ.get("PROMOE_MODEL", "sharegpt_moe/checkpoint"))
PROMPTS = Path(os.environ.get("PROMOE_PROMPTS", "sharegpt_moe/heldout_prompts.json"))
TOKENS = int(os.environ.get("PROMOE_TOKENS", "160"))
CACHES = [sixteenth / 16 for sixteenth in range(2, 17)]
REAL = (0.25, 0.5, 0.75)
work = Path(tempfile.mkdtemp(prefix="promoe-"))
torch.set_num_threads(1)  # leaves a core for the link

# %% [markdown]
# ## 1. Record
#
# One command records which experts a model chooses while it answers prompts. If your model does not fit in memory, add
# `--cache 25%`: then promoe runs it.

# %%
data = work / "prompts.jsonl"
data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in json.loads(PROMPTS.read_text())))
command = f"collect --model {MODEL} --data {data} --out {work / 'trace'} --max-tokens {TOKENS} --batch-size 1"
assert promoe_train(command.split()) == 0
recorded = RecordedTrace(work / "trace").routing
# Treat every token as generated, because the model reads prompts token by token here.
trace = replace(recorded, generated=None)
print(f"{trace.num_layers} layers of {trace.num_experts} experts, {trace.top_k} per token")

# %% [markdown]
# ## 2. Make a slow link
#
# The unmodified model reads the recorded tokens with everything in memory. Then we set the link so that moving all
# experts of a token takes six times as long as computing the token. (`promoe doctor` measures your disk.)


# %%
def read(model, tokens):
    """Return the seconds for each token of a prompt and its answer, read one token at a time."""
    times_s, cache = [], None
    with torch.inference_mode():
        for token in tokens.tolist():
            begin_s = time.perf_counter()
            cache = model(torch.tensor([[token]]), past_key_values=cache).past_key_values
            times_s.append(time.perf_counter() - begin_s)
    return times_s


texts = np.split(trace.token_ids, trace.prompt_starts[1:])
stock = load_stock(MODEL, torch.bfloat16)
read(stock, texts[0])  # warms up
first_s = median(read(stock, texts[0]))
layers = promoe.find_moe_layers(stock)
expert_bytes = layers[0].layout.payload_bytes
all_bytes = sum(layer.num_experts * layer.layout.payload_bytes for layer in layers)
link = promoe.EmulatedLink(bandwidth_bytes_per_s=len(layers) * trace.top_k * expert_bytes / (6 * first_s))
print(f"{format_memory(all_bytes)} of experts; {format_ms(first_s)} ms to compute a token")

# %% [markdown]
# ## 3. Run a few sizes
#
# For each of a few sizes, we run one model without prefetch and one with the default predictor. Their slots are empty
# at first. All models take turns, text by text, so that changes of the machine's speed affect all of them.

# %%
models = {("in memory", None): stock}
for share in REAL:
    for predictor in (None, "gate"):
        models[share, predictor] = promoe.patch(
            load_stock(MODEL, torch.bfloat16),
            cache=f"{share:.2%}",
            predictor=predictor,
            link=link,
            config=promoe.PromoeConfig(ablation=promoe.Ablation(governor=False)),
        )
times_s = {key: [] for key in models}
for text in texts:
    for key, model in models.items():
        times_s[key] += read(model, text)
tpot_s = {key: mean(found) for key, found in times_s.items()}
compute_s = tpot_s.pop(("in memory", None))
counted = {key: models[key].promoe.stats().decode for key in tpot_s}
for key in tpot_s:
    models[key].promoe.close()
print(f"{format_ms(compute_s)} ms per token with everything in memory")

# %% [markdown]
# ## 4. Simulate every size
#
# The simulator runs the recorded routing through the scheduler that serves real models, under a virtual clock. It needs
# two numbers: the time to compute a token, and the bandwidth of the link. We compare three policies, which choose the
# expert that makes room:
#
# - `lru` evicts the expert that was used longest ago. Each layer has its own slots, as in published caches.
# - `default` is what promoe does: it evicts the expert whose next use is expected last. All layers share the slots.
# - `belady` knows the future. With slots per layer nothing can miss less, so it shows how much a policy could still
#   gain.
#
# On the command line this is `promoe simulate --trace TRACE --cache 25% --policy lru`, with presets of GPUs and models.

# %%
machine = Machine(
    name="this processor behind the emulated link",
    bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
    latency_s=0.0,
    # One number per layer stands for all computing: such small experts take no time of their own.
    memory_bytes_per_s=1e18,
    flops=1e24,
    layer_overhead_s=compute_s / len(layers),
    chunk_bytes=4 << 20,
)
sizes = Geometry("demo model", len(layers), layers[0].num_experts, trace.top_k, expert_bytes / 2, 0.0)
POLICIES = ("lru", "default", "belady")
swept = {policy: [simulate(Scenario(machine, sizes, share, policy), trace) for share in CACHES] for policy in POLICIES}

rows = [("cache", "missed per token: simulated", "real", "ms per token: simulated", "real", "with prefetch", "bound")]
for share in REAL:
    found, phase = simulate(Scenario(machine, sizes, share), trace), counted[share, None]
    misses = (phase.needed - phase.hits) / phase.tokens
    times = (found["tpot_s"], tpot_s[share, None], tpot_s[share, "gate"], found["bound_s"])
    rows.append((f"{share:.1%}", f"{found['misses_per_token']:.2f}", f"{misses:.2f}", *map(format_ms, times)))
    assert abs(misses / found["misses_per_token"] - 1) < 0.02, "the same scheduler, so the same misses"
print("\n".join(aligned(rows)))

# %% [markdown]
# The simulated misses are within 2% of the real ones (the cell checks that), because both come from the same scheduler.
# The simulated times are too short here. They leave out the cost of waking threads each time a layer waits, which is
# large compared with layers and experts as small as these. With experts of real size, and this cost measured too,
# simulated times are within 15% of real ones ([docs/simulate.md](../docs/simulate.md)). So trust the misses and the
# shape of the curve, and measure the size that you choose.
#
# ## 5. Look at the result
#
# Left: how many experts have to be fetched. Right: what that costs. The *bound* is the least time possible with these
# misses: the time for computing or for moving the missing bytes, whichever is longer.

# %%
figure, (left, right) = new_figure(1, 2, (10.4, 4.3))
percent = [100 * share for share in CACHES]
look = {
    "lru": ("LRU", COLOURS[1], "bottom"),
    "default": ("default", COLOURS[0], "top"),
    "belady": ("Belady", COLOURS[2], "center"),
}
for policy, (label, colour, beside) in look.items():
    for axes, values in (
        (left, [one["misses_per_token"] for one in swept[policy]]),
        (right, [1e3 * one["tpot_s"] for one in swept[policy]]),
    ):
        axes.plot(percent, values, color=colour, linewidth=1.7)
        axes.text(percent[0] - 1.5, values[0], label, color=colour, ha="right", va=beside, fontsize=9)
bound_ms = [1e3 * one["bound_s"] for one in swept["default"]]
right.plot(percent, bound_ms, color=COLOURS[0], linestyle=":", linewidth=1.7, label="bound of default")
right.axhline(1e3 * compute_s, color=INK, linewidth=1, linestyle="--", label="everything in memory")
ring = {
    "linestyle": "",
    "marker": "o",
    "markersize": 7,
    "markerfacecolor": "white",
    "markeredgewidth": 1.6,
    "zorder": 4,
}
at = [100 * share for share in REAL]
for predictor, colour, label in ((None, COLOURS[0], "real, default"), ("gate", COLOURS[5], "real, with prefetch")):
    right.plot(at, [1e3 * tpot_s[share, predictor] for share in REAL], color=colour, label=label, **ring)
    found = [counted[share, predictor] for share in REAL]
    left.plot(at, [(one.needed - one.hits) / one.tokens for one in found], color=colour, **ring)
for axes, label in ((left, f"experts not there, of {len(layers) * trace.top_k} per token"), (right, "ms per token")):
    plain(axes)
    axes.set(xlim=(0, 103), xlabel="cache, % of the experts", ylabel=label)
    axes.set_ylim(0, 1.04 * axes.get_ylim()[1])
set_title(figure, "What a cache of each size costs", "demo model behind an emulated link; lines simulated, rings real")
figure.legend(loc="outside lower right", ncols=4, frameon=False, fontsize=9, labelcolor=INK)
display(figure)

# %% [markdown]
# ## 6. Choose
#
# You decide how long a token may take. For several limits, as multiples of the time with everything in memory, the
# table shows the smallest cache that is fast enough, as a share of the experts and in bytes.

# %%
rows = [("at most", *POLICIES)]
for times in (1.25, 1.5, 2, 2.5, 3, 4):
    cells = []
    for policy in POLICIES:
        quick = [share for share, one in zip(CACHES, swept[policy], strict=True) if one["tpot_s"] <= times * compute_s]
        cells.append(f"{quick[0]:.1%} = {format_memory(quick[0] * all_bytes)}" if quick else "none")
    rows.append((f"{times:g}x", *cells))
print("\n".join(aligned(rows)))

# %% [markdown]
# Compare two columns to see how much memory a better policy saves. The column `belady` shows what better predictions
# could still save.
#
# For your own model, record a trace of prompts like yours and let `promoe simulate` find the size, with `--hardware`
# and `--model`. Then measure it with `promoe bench MODEL --cache SIZE`.
