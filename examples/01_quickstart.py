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
# # Quickstart
#
# A Mixture-of-Experts model has many experts and uses few of them per token. promoe leaves them in the checkpoint's
# files, keeps a fixed number of *slots* for them in memory, and fills the slots before the experts are needed. The
# answers stay the same, bit by bit.
#
# This notebook opens the small model of this repository, shows what happened, compares the answers with the unmodified
# model's, and tries several cache sizes. With a model this small nothing is slow, so nothing is gained. Notebooks 03
# and 04 put it behind a slow link.

# %%
# %matplotlib inline
import os

import torch
from IPython.display import display
from transformers import AutoTokenizer

import promoe
from promoe.commands.bench.stock import load_stock
from promoe.commands.charts.parts import NEEDS
from promoe.stats.figure_style import HATCHED, INK, MEANING, new_figure, plain, set_title
from promoe.units import aligned, format_megabytes, format_share

MODEL = os.environ.get("PROMOE_MODEL", "sharegpt_moe/checkpoint")
NEW_TOKENS = int(os.environ.get("PROMOE_NEW_TOKENS", "60"))

# %% [markdown]
# ## 1. Open a model and let it write
#
# Use `promoe.from_pretrained` instead of `AutoModelForCausalLM.from_pretrained`. You get a model of the same class.
# `cache` is the memory for experts, as a share of all experts or as a size such as `"6GiB"`. (The model is tiny, so its
# text makes little sense.)

# %%
model = promoe.from_pretrained(MODEL, cache="25%")
tokenizer = AutoTokenizer.from_pretrained(MODEL)
inputs = tokenizer("The best way to learn", return_tensors="pt")
options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "repetition_penalty": 1.15}
answer = model.generate(**inputs, **options)
print(tokenizer.decode(answer[0]))

# %% [markdown]
# ## 2. See what happened
#
# A **hit** is a needed expert that was in a slot when the gate chose it. **Ready** also counts the experts that arrived
# before their turn. **Stall** is the time in which the model waited for the others.

# %%
print(model.promoe.report())

# %% [markdown]
# ## 3. Check that the answer is the same
#
# `load_stock` opens the unmodified model with Transformers' `from_pretrained`, and aligns its tensors like slots. The
# bits of a product can depend on that (notebook 05).

# %%
stock = load_stock(MODEL, model.dtype)
assert torch.equal(stock.generate(**inputs, **options), answer)
with torch.inference_mode():
    assert torch.equal(stock(answer).logits, model(answer).logits)
print("same tokens, same logits")
model.promoe.close()

# %% [markdown]
# ## 4. Try other cache sizes
#
# The model gives the same answer with more and with less memory. The picture shows how many of the needed experts were
# there, how many arrived in time, and for how many the model waited.

# %%
decode = {}
for cache in ("12.5%", "25%", "50%", "75%"):
    model = promoe.from_pretrained(
        MODEL, cache=cache, config=promoe.PromoeConfig(ablation=promoe.Ablation(governor=False))
    )
    assert torch.equal(model.generate(**inputs, **options), answer)
    decode[cache] = model.promoe.stats().decode
    model.promoe.close()
rows = [("cache", "hits", "ready", "MB per token")]
for cache, phase in decode.items():
    rows.append(
        (cache, format_share(phase.hit_rate), format_share(phase.ready_rate), format_megabytes(phase.bytes_per_token))
    )
print("\n".join(aligned(rows)))
assert decode["75%"].hit_rate > decode["12.5%"].hit_rate

# %%
figure, (axes,) = new_figure(1, 1, (8.4, 3.1))
plain(axes)
starts = [0.0] * len(decode)
for part in NEEDS:
    shares = [100 * part.of(phase) / phase.needed for phase in decode.values()]
    if not any(shares):
        continue  # such small experts seldom arrive between the gate and their turn
    bars = axes.barh(
        list(decode), shares, 0.62, left=starts, color=MEANING[part.css], edgecolor="white", hatch=HATCHED.get(part.css),
        label=part.label, zorder=3,
    )  # fmt: skip
    starts = [start + share for start, share in zip(starts, shares, strict=True)]
axes.invert_yaxis()
axes.set(xlim=(0, 100), xlabel="share of the experts that the answer needed, %", ylabel="cache")
set_title(figure, "Where needed experts were", "demo model, one answer; each cache begins empty")
figure.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=9, labelcolor=INK)
display(figure)

# %% [markdown]
# ## 5. Next
#
# On the command line, `promoe run MODEL "PROMPT" --cache 25% --report report.html` streams an answer and draws all of
# this. `promoe demo` compares ways to serve the model behind a slow link. `promoe doctor` describes your machine.
#
# - 02: train a predictor that knows better than the gates what comes next.
# - 03: read a timeline to see where the time goes.
# - 04: choose a cache size and a policy.
# - 05: bring your own model.
