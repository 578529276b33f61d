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
# # Read a timeline: where does the time go?
#
# A token of a Mixture-of-Experts model takes time for two reasons: the processor computes, or it waits for experts. A
# timeline shows which. This notebook records timelines with and without prefetch, draws one token of each as lanes, and
# then draws a prompt.
#
# The small model of this repository is never slow, so its experts come over an *emulated link*, which delays real bytes
# as a slow link would. The picture looks like that of a large model. The milliseconds belong to no real machine.

# %%
# %matplotlib inline
import json
import os
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer

import promoe
from promoe.commands.bench.stock import load_stock
from promoe.commands.charts.lanes_figure import draw_lanes
from promoe.commands.measure import generate
from promoe.stats.lanes import lanes_of, median_pass
from promoe.units import aligned, format_ms, format_share

MODEL = os.environ.get("PROMOE_MODEL", "sharegpt_moe/checkpoint")
NEW_TOKENS = int(os.environ.get("PROMOE_NEW_TOKENS", "48"))
TURNS = int(os.environ.get("PROMOE_TURNS", "3"))
PROMPT_TOKENS = int(os.environ.get("PROMOE_PROMPT_TOKENS", "256"))
PROMPTS = Path(os.environ.get("PROMOE_PROMPTS", "sharegpt_moe/heldout_prompts.json"))
work = Path(tempfile.mkdtemp(prefix="promoe-"))
torch.set_num_threads(1)  # leaves a core for the link

# %% [markdown]
# ## 1. Make a link that is slow for this model
#
# First the unmodified model answers with everything in memory, which measures computing alone. Then we set the link so
# that moving all experts of a token takes three times as long as computing the token. A quarter of the experts fits
# into slots. The model waits for the others.

# %%
tokenizer = AutoTokenizer.from_pretrained(MODEL)
question = tokenizer("What is the best way to learn to play the piano?", return_tensors="pt")
options = {"min_new_tokens": NEW_TOKENS, "repetition_penalty": 1.15, "pad_token_id": tokenizer.eos_token_id}

stock = load_stock(Path(MODEL), torch.bfloat16)
generate(stock, question, NEW_TOKENS, **options)  # the first answer warms everything up
expected = generate(stock, question, NEW_TOKENS, **options)
layers = promoe.find_moe_layers(stock)
token_bytes = sum(layer.top_k * layer.layout.payload_bytes for layer in layers)
link = promoe.EmulatedLink(bandwidth_bytes_per_s=token_bytes / (3 * expected.tpot_s))
print(f"{len(layers)} MoE layers, {layers[0].top_k} of {layers[0].num_experts} experts per token and layer")
print(f"computing a token takes {format_ms(expected.tpot_s)} ms, moving all of its experts three times that")


# %% [markdown]
# ## 2. Record
#
# `model.promoe.trace(path)` records while its context lasts, and writes a file for <https://ui.perfetto.dev>. You can
# also read the recording directly: `lanes_of` returns one object per forward pass.
#
# Without prefetch, an expert is fetched after its layer's gate has chosen it. With prefetch, promoe asks the next
# layer's gate one layer early. (`governor=False` keeps prefetch on while we measure.) The two models take turns, so
# that changes of the machine's speed affect both.

# %%
PREDICTORS = {"without prefetch": None, "with prefetch": "gate"}
models = {
    name: promoe.patch(
        load_stock(Path(MODEL), torch.bfloat16),
        cache="25%",
        predictor=predictor,
        link=link,
        config=promoe.PromoeConfig(ablation=promoe.Ablation(governor=False)),
    )
    for name, predictor in PREDICTORS.items()
}
decode = {name: [] for name in models}
for turn in range(1 + TURNS):
    for name, model in models.items():
        with model.promoe.trace(work / f"{name}.json") as tracer:
            answer = generate(model, question, NEW_TOKENS, **options)
        assert answer.tokens == expected.tokens, "prediction changes when bytes move, never what is computed"
        if turn:  # the first fills the slots
            decode[name] += [one for one in lanes_of(tracer.spans()) if one.phase == "decode"]
        else:
            model.promoe.reset_stats()
stats = {name: model.promoe.stats().decode for name, model in models.items()}
for model in models.values():
    model.promoe.close()
print({name: f"{len(found)} tokens recorded" for name, found in decode.items()})

# %% [markdown]
# ## 3. Look at one token
#
# Both panels show the same token on the same scale. We picked the token whose gain is the median. Each MoE layer begins
# with attention and the gate (pale). Its experts follow (dark).
#
# - A gap in the **computing** lane means that the processor waits. The **waiting** lane shows the same gap.
# - A **reader** fetches one chunk of an expert at a time. Two chunks are under way at once, so that the link is never
#   idle.
# - *On demand* means that the gate had already chosen the expert, so the layer has to wait. *Ahead of need* means that
#   it was predicted, and travels while the previous layer computes.

# %%
without, ahead = decode.values()
gains_s = [a.duration_s - b.duration_s for a, b in zip(without, ahead, strict=True)]
median_idx = sorted(range(len(gains_s)), key=gains_s.__getitem__)[len(gains_s) // 2]
draw_lanes(
    {name: found[median_idx] for name, found in decode.items()},
    "One token",
    "demo model, a quarter of its experts in slots, behind an emulated link",
)

# %% [markdown]
# ## 4. Look at all tokens
#
# One token proves nothing. These are means over all recorded tokens: the sums of the lanes, and the counters of
# `model.promoe.stats()`, which are always on.

# %%
rows = [("ms per token", *decode)]
parts = {
    "experts": lambda one: one.experts_s,
    "all else": lambda one: one.rest_s,
    "waiting": lambda one: one.stall_s,
    "together": lambda one: one.duration_s,
    "fetching on demand": lambda one: one.fetching_s("demand"),
    "fetching ahead of need": lambda one: one.fetching_s("prefetch"),
}
for label, part in parts.items():
    rows.append((label, *(format_ms(sum(map(part, found)) / len(found)) for found in decode.values())))
rows.append(("there when the gate chose", *(format_share(one.hit_rate) for one in stats.values())))
rows.append(("there when the layer began", *(format_share(one.ready_rate) for one in stats.values())))
print("\n".join(aligned(rows)))

# %% [markdown]
# ## 5. Look at a prompt
#
# A prompt of many tokens uses nearly all experts of a layer, so there is nothing to predict. While a layer computes,
# promoe streams the next layer's missing experts in order. Below is the same prompt with streaming off and on. The link
# is a different one: moving all experts of the model takes four times as long as the unmodified model takes to read the
# prompt.
#
# Without streaming, the readers are idle from a layer's last expert until the next layer's gate. With streaming, they
# go on.

# %%
prompts = json.loads(PROMPTS.read_text())
text = tokenizer(" ".join(prompts), return_tensors="pt")["input_ids"][:, :PROMPT_TOKENS]
with torch.inference_mode():
    stock(text)
    begin_s = time.perf_counter()
    stock(text)
    prompt_s = time.perf_counter() - begin_s
all_bytes = sum(layer.num_experts * layer.layout.payload_bytes for layer in layers)
prompt_link = promoe.EmulatedLink(bandwidth_bytes_per_s=all_bytes / (4 * prompt_s))

models = {
    name: promoe.patch(
        load_stock(Path(MODEL), torch.bfloat16),
        cache="25%",
        predictor=None,
        link=prompt_link,
        config=promoe.PromoeConfig(ablation=promoe.Ablation(stream=stream)),
    )
    for name, stream in {"each layer fetches what it needs": False, "streamed": True}.items()
}
prefill = {name: [] for name in models}
for turn in range(1 + TURNS):
    for name, model in models.items():
        with torch.inference_mode(), model.promoe.trace(work / f"{name}.json") as tracer:
            model(text)
        prefill[name] += lanes_of(tracer.spans()) if turn else []
for model in models.values():
    model.promoe.close()
draw_lanes(
    {name: median_pass(found, "prefill") for name, found in prefill.items()},
    f"A prompt of {text.shape[1]} tokens",
    f"demo model, a quarter of its experts in slots; computing takes {format_ms(prompt_s)} ms, moving all experts 4 times that",
)

# %% [markdown]
# ## 6. On your own model
#
# ```python
# with model.promoe.trace("timeline.json") as tracer:
#     model.generate(**inputs, max_new_tokens=50)
# draw_lanes({"mine": median_pass(lanes_of(tracer.spans()))}, "A token", "my model, my disk")
# ```
#
# - Much **waiting**, readers always busy: the link is the limit. Only fewer bytes help, so use a larger cache (notebook
#   04).
# - Much **waiting**, readers often idle: the link could do more. Predict farther ahead (`PromoeConfig(lookahead=2)`),
#   or train a predictor (notebook 02).
# - Hardly any **waiting**: computing takes the time, and promoe cannot help further.
