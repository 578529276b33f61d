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
# # Bring your own model
#
# promoe has three functions for a model: `promoe.from_pretrained` opens a checkpoint, `promoe.patch` takes a model that
# is already in memory, and `promoe.unpatch` restores it. This notebook uses all three on models that it makes itself.
# It also shows how to check that the answers stay the same, and what happens if promoe cannot serve a model.
#
# The models are tiny and random. They write nonsense, and take a second.

# %%
import copy
import tempfile
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3MoeConfig

import promoe
from promoe.transfer.memory import SLOT_ALIGNMENT_BYTES
from promoe.units import format_memory

work = Path(tempfile.mkdtemp(prefix="promoe-"))

# %% [markdown]
# ## 1. Open a checkpoint
#
# We make a Qwen3-MoE of four layers with 16 experts each, and save it as usual. `save_pretrained` writes files as the
# hub has them: one tensor for each expert and projection.

# %%
config = Qwen3MoeConfig(
    vocab_size=1000, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    num_experts=16, num_experts_per_tok=4, moe_intermediate_size=64, intermediate_size=256,
)  # fmt: skip
torch.manual_seed(0)
stock = AutoModelForCausalLM.from_config(config).eval()
stock.save_pretrained(work / "my-model")

model = promoe.from_pretrained(work / "my-model", cache="25%")
for layer in promoe.find_moe_layers(model)[:2]:
    print(
        f"{layer.name}: {layer.num_experts} experts, {layer.top_k} per token, {format_memory(layer.layout.payload_bytes)} each"
    )

# %% [markdown]
# `find_moe_layers` shows what promoe finds in a model. It changes nothing, so you can use it to ask whether a model is
# supported.
#
# ## 2. Are the answers the same?
#
# They are exactly the same. Compare the logits of a prompt and of the next tokens with `torch.equal`, not with
# `allclose`, and use the same number of threads.


# %%
@torch.inference_mode()
def logits_of(model, ids, steps=8):
    """Return the logits `[prompt + steps, vocabulary]` of a prompt and of greedy tokens after it."""
    output = model(ids)
    found = [output.logits[0]]
    for _ in range(steps):
        output = model(output.logits[:, -1:].argmax(-1), past_key_values=output.past_key_values)
        found.append(output.logits[0])
    return torch.cat(found)


ids = torch.randint(0, config.vocab_size, (1, 20))
expected = logits_of(stock, ids)
assert torch.equal(logits_of(model, ids), expected)
print(f"{expected.numel():,} logits, all equal")
stats = model.promoe.stats()
print(f"{stats.cache_slots} slots ({format_memory(stats.cache_bytes)}) served {stats.total.needed} needs of experts")
assert stats.cache_slots == 16
assert stats.total.hits < stats.total.needed

# %% [markdown]
# The slots hold a quarter of the experts, so many needed experts had to be fetched. The logits are the same
# nevertheless.
#
# **When they differ.** The bits of a product can depend on the number of threads, on the experts implementation
# (`eager`, `batched_mm`, `grouped_mm`), and on the address of a matrix. promoe's slots begin at multiples of 64 bytes,
# and so do tensors that torch allocates. Tensors that Transformers maps from a file may begin elsewhere. To compare
# with such a model, move its tensors first:


# %%
def aligned(model):
    """Return the model with every tensor moved to a multiple of 64 bytes, where torch allocates them."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.data_ptr() % SLOT_ALIGNMENT_BYTES:
            tensor.data = tensor.data.clone()
    return model


assert SLOT_ALIGNMENT_BYTES == 64
opened = aligned(AutoModelForCausalLM.from_pretrained(work / "my-model", dtype=torch.float32).eval())
assert torch.equal(logits_of(opened, ids), expected)

# %% [markdown]
# ## 3. Use it in your own script
#
# Nothing else changes. The model has its Transformers class, and `generate` works as before: sampling, beams, batches
# with padding, streaming. The same seed gives the same tokens.


# %%
def my_script(model):
    """Use a model in any way."""
    torch.manual_seed(7)
    return model.generate(ids, do_sample=True, temperature=0.8, max_new_tokens=12, pad_token_id=0)


assert type(model) is type(stock)
assert torch.equal(my_script(model), my_script(stock))
print(my_script(model)[0, -12:].tolist())

# %% [markdown]
# ## 4. Unpatch
#
# `promoe.unpatch` reads the experts into memory and removes everything that promoe added. You get an ordinary
# Transformers model, which you can save or train.

# %%
model = promoe.unpatch(model)
weights = model.state_dict()
assert not hasattr(model, "promoe")
assert all(torch.equal(weights[name], tensor) for name, tensor in stock.state_dict().items())
assert torch.equal(logits_of(model, ids), expected)
print(f"{len(weights)} tensors, all as in the model that was saved")

# %% [markdown]
# ## 5. Patch a model that is already in memory
#
# `promoe.patch` takes a model as it is, here a Mixtral. With a GPU, `promoe.patch(model, cache="6GiB", device="cuda")`
# leaves the experts in RAM and moves everything else to the GPU. Without a GPU, experts in RAM gain nothing from slots
# in RAM, and promoe says so. Here an emulated link stands in for the GPU's link.

# %%
config = MixtralConfig(
    vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
)  # fmt: skip
mixtral = AutoModelForCausalLM.from_config(config).eval()
before, state = logits_of(mixtral, ids), copy.deepcopy(mixtral.state_dict())

promoe.patch(mixtral, cache="40%", link=promoe.EmulatedLink(bandwidth_bytes_per_s=2e9))
assert torch.equal(logits_of(mixtral, ids), before)
print(mixtral.promoe)

promoe.unpatch(mixtral)
assert all(torch.equal(tensor, state[name]) for name, tensor in mixtral.state_dict().items())

# %% [markdown]
# ## 6. When a model is not supported
#
# promoe serves every MoE family of Transformers but two. It refuses what it does not understand, before it changes
# anything. A model without experts has nothing to offload:


# %%
def refusal(model):
    """Return what promoe says about a model."""
    try:
        promoe.find_moe_layers(model)
    except promoe.UnsupportedModelError as error:
        return str(error)
    return "supported"


llama = LlamaConfig(vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4)
print(refusal(AutoModelForCausalLM.from_config(llama)))

# %% [markdown]
# promoe also refuses a layer written by hand with a list of modules, because only the layer's own code knows which of
# them it uses:


# %%
class Gate(nn.Module):
    """A gate. It returns scores `[T, E]`, weights `[T, K]` and expert ids `[T, K]`."""

    def __init__(self, hidden, num_experts, top_k):
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.randn(num_experts, hidden))

    def forward(self, hidden_states):
        scores = hidden_states @ self.weight.T
        weights, ids = scores.softmax(-1).topk(self.top_k)
        return scores, weights, ids


class ListedMoE(nn.Module):
    """A layer whose experts are a list of modules, called one by one."""

    def __init__(self, hidden=64, num_experts=8, top_k=2):
        super().__init__()
        self.gate = Gate(hidden, num_experts, top_k)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, 128, bias=False), nn.SiLU(), nn.Linear(128, hidden, bias=False))
            for _ in range(num_experts)
        )

    def forward(self, hidden_states):
        _, weights, ids = self.gate(hidden_states)
        result = torch.zeros_like(hidden_states)
        for idx, expert in enumerate(self.experts):
            token, choice = (ids == idx).nonzero(as_tuple=True)
            result[token] += weights[token, choice, None] * expert(hidden_states[token])
        return result


class MyModel(nn.Module):
    """A model of an embedding, MoE layers and a head."""

    def __init__(self, layer, num_layers=3, hidden=64):
        super().__init__()
        self.embedding = nn.Embedding(1000, hidden)
        self.layers = nn.ModuleList(layer() for _ in range(num_layers))
        self.head = nn.Linear(hidden, 1000, bias=False)

    def forward(self, input_ids):
        hidden_states = self.embedding(input_ids).flatten(0, 1)
        for layer in self.layers:
            hidden_states = hidden_states + layer(hidden_states)
        return self.head(hidden_states)


print(refusal(MyModel(ListedMoE)))

# %% [markdown]
# To make it work, follow the contract of Transformers' own families. Keep the experts in a module of their own that has
#
# - `num_experts`, and each weight stacked in one parameter `[num_experts, ., .]`;
# - `forward(hidden_states, top_k_index, top_k_weights)`, which reads only the rows of the chosen experts;
# - beside it, a module called `gate` or `router` that returns the chosen ids.
#
# promoe recognises such a module by its structure, whatever its name is.


# %%
class StackedExperts(nn.Module):
    """The same experts with stacked weights."""

    def __init__(self, hidden, num_experts):
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, 128, hidden) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, hidden, 128) / 128**0.5)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states)
        for idx in top_k_index.unique().tolist():
            token, choice = (top_k_index == idx).nonzero(as_tuple=True)
            inner = nn.functional.silu(nn.functional.linear(hidden_states[token], self.up[idx]))
            rows = nn.functional.linear(inner, self.down[idx]) * top_k_weights[token, choice, None]
            result.index_add_(0, token, rows)
        return result


class StackedMoE(nn.Module):
    """The same layer with these experts."""

    def __init__(self, hidden=64, num_experts=8, top_k=2):
        super().__init__()
        self.gate = Gate(hidden, num_experts, top_k)
        self.experts = StackedExperts(hidden, num_experts)

    def forward(self, hidden_states):
        _, weights, ids = self.gate(hidden_states)
        return self.experts(hidden_states, ids, weights)


mine = MyModel(StackedMoE).eval()
print(refusal(mine))
with torch.inference_mode():
    before = mine(ids)
    promoe.patch(mine, cache="40%", link=promoe.EmulatedLink(bandwidth_bytes_per_s=2e9))
    assert torch.equal(mine(ids), before)
print(mine.promoe)
mine.promoe.close()

# %% [markdown]
# If promoe refuses a family that `docs/support.md` lists, please report it. Add the message, which names the module and
# what promoe found, and the output of `promoe doctor`.
