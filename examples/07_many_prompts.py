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
# # Many prompts
#
# When nobody waits for one answer (evaluation, labels, summaries, synthetic data), prompts can be answered together. Each
# step computes a token of every sequence, and an expert is loaded once for all of them. So with enough sequences loading
# hardly costs time, however few experts are in memory.
#
# This notebook answers a file of prompts, stops and goes on, and shows how the number of sequences changes the speed, beside
# what the plan expects.

# %%
# %matplotlib inline
import io
import json
import os
import sys
import tempfile
import time
from contextlib import redirect_stderr
from pathlib import Path

import torch
from IPython.display import display
from transformers import AutoTokenizer

import promoe
from promoe.commands.batch import options as batch
from promoe.commands.batch.command import run_batch
from promoe.commands.bench.example import find_example
from promoe.commands.plan import options as plan
from promoe.commands.plan.command import run_plan
from promoe.commands.plan.throughput import Setting
from promoe.stats.figure_style import COLOURS, new_figure, plain, set_title
from promoe.units import aligned, format_number, format_percent

texts = json.loads(Path(os.environ.get("PROMOE_PROMPTS", "sharegpt_moe/heldout_prompts.json")).read_text())
example = find_example()
os.chdir(tempfile.mkdtemp(prefix="promoe-"))
MODEL = os.environ.get("PROMOE_MODEL") or str(example.widen(Path("model"), 8, torch.bfloat16))
NEW_TOKENS = int(os.environ.get("PROMOE_NEW_TOKENS", "16"))
GROUPS = [int(number) for number in os.environ.get("PROMOE_GROUPS", "1 4 16 48").split()]

# %% [markdown]
# ## 1. A file of prompts
#
# A JSON object per line: a `prompt` or `messages`, with the fields of an OpenAI request beside it, or a whole line of an
# OpenAI batch file. Lines that cannot be answered get an error of their own.

# %%
count = max(GROUPS)
lines = [
    {"custom_id": f"q{number}", "prompt": texts[number % len(texts)][: 80 + 5 * number]} for number in range(count)
]
lines.append({"custom_id": "too long", "prompt": "Why?", "max_tokens": 10**9})
source, out = Path("questions.jsonl"), Path("answers.jsonl")
source.write_text("".join(json.dumps(line) + "\n" for line in lines))

# %% [markdown]
# ## 2. Plan
#
# `promoe plan MODEL --batch questions.jsonl` times a few of the model's blocks, and says how many sequences at once, with how
# much memory for slots and for the KV cache, give most, and what limits them.

# %%
found = run_plan(plan.Options(MODEL, batch=str(source), cache=["25%"], max_tokens=NEW_TOKENS))

# %% [markdown]
# ## 3. Answer
#
# `promoe batch MODEL questions.jsonl --out answers.jsonl`. Answers are written as they are completed. When the same command is
# given again, after Ctrl-C, a crash or a power cut, it answers what is missing.

# %%
settings = {"cache": "25%", "at_once": 16, "step_tokens": 256, "kv_tokens": 8192, "max_tokens": NEW_TOKENS}
with redirect_stderr(sys.stdout):
    run_batch(batch.Options(MODEL, str(source), out=str(out), **settings))

# %%
answers = out.read_text().splitlines(keepends=True)
out.write_text("".join(answers[: len(answers) // 2]))  # as if it had been stopped in the middle
with redirect_stderr(io.StringIO()):
    again = run_batch(batch.Options(MODEL, str(source), out=str(out), **settings))
print(
    f"{again.kept} lines were kept, {again.answers + again.errors} answered anew. The first and the one that cannot be:"
)
for line in map(json.loads, out.read_text().splitlines()):
    if line["custom_id"] == "q0":
        print(repr(line["response"]["body"]["choices"][0]["text"]))
    elif line["error"] is not None:
        print(line["error"]["message"])

# %% [markdown]
# ## 4. In Python, and how many at once
#
# `promoe.generate_batch` takes token ids and yields answers. The same prompts, a quarter of the experts in memory, and more and
# more sequences at once. The plan leaves out what weighs much in a model as small as this one: the bookkeeping of each layer,
# and the programs that oneDNN makes for each new number of rows. With experts of real size it was within 10%
# (`docs/throughput.md`).

# %%
tokenizer = AutoTokenizer.from_pretrained(MODEL)
prompts = [promoe.BatchPrompt(tokenizer(line["prompt"])["input_ids"], NEW_TOKENS) for line in lines[:-1]]
model = promoe.from_pretrained(MODEL, cache="25%")
model.generation_config.eos_token_id = None  # so that all answers have the length that the plan assumes
expected = found.batch["auto"].model
rows, speeds, planned = [("at once", "tokens/s", "planned", "MB per token", "waiting")], [], []
for at_once in GROUPS:
    some = prompts[: max(8, at_once)]
    model.promoe.reset_stats()
    start_s = time.perf_counter()
    tokens = sum(len(answer.tokens) for answer in promoe.generate_batch(model, some, at_once=at_once, step_tokens=256))
    took_s, total = time.perf_counter() - start_s, model.promoe.stats().total
    speeds.append(tokens / took_s)
    planned.append(expected.expected(Setting(at_once, 256, 16384, 0.25, "exact")).tokens_per_s)
    rows.append(
        (
            str(at_once),
            format_number(speeds[-1]),
            format_number(planned[-1]),
            format_number(total.bytes_total / tokens / 1e6),
            f"{format_percent(total.stall_s / took_s)}%",
        )
    )
model.promoe.close()
print("\n".join(aligned(rows)))

# %%
figure, (axes,) = new_figure(1, 1, (8.4, 3.2))
plain(axes)
axes.plot(GROUPS, speeds, "o-", color=COLOURS[0], label="measured", zorder=3)
axes.plot(GROUPS, planned, "o:", color=COLOURS[1], label="planned", zorder=3)
axes.set(xlabel="sequences at once", ylabel="tokens/s", xscale="log")
axes.set_xticks(GROUPS, [str(number) for number in GROUPS])
axes.legend(frameon=False)
set_title(figure, "More sequences at once", "demo model x8, a quarter of the experts in memory")
display(figure)

# %% [markdown]
# ## 5. What to do with your model
#
# - Give `promoe batch` the file, and let it plan. It says what limits it: the link, memory, products, or attention.
# - Where products limit it, try `--kernels fast`: on processors without 16-bit products it is several times as fast. The
#   last bits of the output change, and the report says how far.
# - Fewer bits (`promoe quantize`) leave room for more slots, and int8 multiplies fast on most processors.
# - The page on throughput (`docs/throughput.md`) has figures, and says how several machines share a file.
