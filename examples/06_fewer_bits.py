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
# # Fewer bits
#
# Reading experts takes most of a token's time when few of them fit in memory. A quantised expert has a half or a
# quarter of the bytes. So more experts stay in memory, each one arrives sooner, and a CPU multiplies by it faster, too.
#
# The price is that answers change. This notebook quantises a model, measures how much its answers change, and how much
# time it saves in the same memory.
#
# The model is the small one of this repository, with experts that are eight times as wide and compute the same: the
# sizes of its own experts are no multiples of 64, which quantised products need.

# %%
# %matplotlib inline
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from IPython.display import Image, display
from transformers import AutoTokenizer

import promoe
from promoe.commands.bench.example import find_example
from promoe.commands.quality import options as quality
from promoe.commands.quality.command import run_quality
from promoe.commands.quantize import options as quantize
from promoe.commands.quantize.command import run_quantize
from promoe.stats.figure_style import COLOURS, INK, new_figure, plain, set_title
from promoe.units import aligned, format_megabytes, format_memory, format_ms, format_percent

work = Path(tempfile.mkdtemp(prefix="promoe-"))
MODEL = os.environ.get("PROMOE_MODEL") or str(find_example().widen(work / "model", 8, torch.bfloat16))
PROMPTS = Path(os.environ.get("PROMOE_PROMPTS", "sharegpt_moe/heldout_prompts.json"))
NEW_TOKENS = int(os.environ.get("PROMOE_NEW_TOKENS", "40"))
FORMS = ("int8", "int4", "int2")
torch.set_num_threads(1)  # leaves a core for the link

# %% [markdown]
# ## 1. Quantise
#
# One command per form. It reads one expert after the other, so it works for models that do not fit in memory, and if it
# is interrupted it goes on where it was. Without `--out` it writes into the model's folder, where `experts="int4"` finds
# it. 2 bits are worth a try with `--method hqq` only.

# %%
folders = {form: str(work / form) for form in FORMS}
run_quantize(quantize.Options(MODEL, bits=8, out=folders["int8"]))
run_quantize(quantize.Options(MODEL, bits=4, group=32, out=folders["int4"]))
run_quantize(quantize.Options(MODEL, bits=2, group=32, method="hqq", out=folders["int2"]))

# %% [markdown]
# ## 2. Open it
#
# The promise is the same as without quantisation, with another reference: the output is, bit by bit, that of the same
# model with all experts *in this form* in memory. It depends neither on the cache nor on the predictor.

# %%
tokenizer = AutoTokenizer.from_pretrained(MODEL)
inputs = tokenizer("The best way to learn", return_tensors="pt")


def logits_of(experts, cache):
    """Return the logits of a prompt."""
    model = promoe.from_pretrained(MODEL, experts=experts, cache=cache)
    with torch.inference_mode():
        found = model(**inputs).logits
    model.promoe.close()
    return found


assert torch.equal(logits_of(folders["int4"], "100%"), logits_of(folders["int4"], "20%"))
assert not torch.equal(logits_of(folders["int4"], "20%"), logits_of("checkpoint", "20%"))
print("the same bits with all experts in memory and with a fifth of them; other bits than in bf16")

# %% [markdown]
# ## 3. Measure what changes
#
# `promoe quality` reads texts with each form, and compares every prediction with that of the checkpoint's own experts.
# The loss alone misleads: it hardly moves where predictions already differ. *KL* says how far predictions move, *top-1*
# how often the most likely token stays the same, and *same tokens* how far two greedy answers agree. Here there is
# little text; give it yours with `--data`.

# %%
data, plot = work / "texts.jsonl", work / "quality.png"
texts = json.loads(PROMPTS.read_text())
data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
results = run_quality(
    quality.Options(
        MODEL, experts=list(folders.values()), data=str(data), window=128, max_new_tokens=NEW_TOKENS, plot=str(plot)
    )
)
kl = {result.form.name: result.figures.kl for result in results}

# %%
display(Image(plot.read_bytes()))

# %% [markdown]
# ## 4. Measure what it gains
#
# The experts come over an emulated link. It is so slow that moving all 16-bit experts of a token takes six times as long
# as computing the token, as on a machine with a large model and a disk. All forms get the same memory: a quarter of the
# 16-bit experts.


# %%
def decode(experts, cache, **settings):
    """Return the median seconds per token of an answer, and what the model counted while it decoded."""
    model = promoe.from_pretrained(
        MODEL, experts=experts, cache=cache, config=promoe.PromoeConfig(bypass=False), **settings
    )
    times_s = []
    with torch.inference_mode():
        found = model(**inputs, use_cache=True)
        for _ in range(NEW_TOKENS):
            start_s = time.perf_counter()
            token = found.logits[:, -1:].argmax(-1)
            found = model(input_ids=token, past_key_values=found.past_key_values, use_cache=True)
            times_s.append(time.perf_counter() - start_s)
    stats = model.promoe.stats()
    model.promoe.close()
    return median(times_s), stats


in_memory_s, stats = decode("checkpoint", "100%")
layers = promoe.find_moe_layers(promoe.from_pretrained(MODEL, cache="100%"))
token_bytes = sum(layer.top_k * layer.layout.payload_bytes for layer in layers)
expert_bytes = sum(layer.num_experts * layer.layout.slot_bytes for layer in layers)
link = promoe.transfer.links.EmulatedLink(token_bytes / (6 * in_memory_s))
cache = expert_bytes // 4
found = {form: decode(experts, cache, link=link) for form, experts in {"checkpoint": "checkpoint", **folders}.items()}
rows = [("experts", "slots", "hits", "MB per token", "ms per token")]
for form, (seconds, stats) in found.items():
    phase = stats.decode
    rows.append(
        (
            form,
            f"{stats.cache_slots} of {sum(stats.num_experts)}",
            f"{format_percent(phase.hit_rate)}%",
            format_megabytes(phase.bytes_per_token),
            format_ms(seconds),
        )
    )
print(f"{format_memory(cache)} of slots; with all 16-bit experts in memory a token takes {format_ms(in_memory_s)} ms")
print("\n".join(aligned(rows)))

# %%
figure, (axes,) = new_figure(1, 1, (8.4, 3.0))
plain(axes)
names, times_ms = list(found), [1e3 * seconds for seconds, _ in found.values()]
axes.barh(names, times_ms, 0.62, color=COLOURS[0], zorder=3)
axes.axvline(1e3 * in_memory_s, color=INK, linestyle=":", linewidth=1.2)
axes.annotate(
    "all 16-bit experts in memory", (1e3 * in_memory_s, -0.42), xytext=(4, 0), textcoords="offset points", fontsize=9
)
axes.invert_yaxis()
axes.set(xlabel="ms per token", ylabel="experts")
set_title(figure, "The same memory, fewer bits", f"demo model x8, {format_memory(cache)} of slots, emulated link")
display(figure)

# %% [markdown]
# ## 5. Choose
#
# Take 8 bits if that is enough: answers hardly change. Take 4 bits where memory is short. Below that, products take longer,
# because codes are put together first, and answers change a lot: 3 and 2 bits are for links that are very slow.
#
# `promoe plan MODEL` says what fewer bits would gain on your machine before anything is written.
