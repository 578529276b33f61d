"""Tiny models served by promoe under any settings, and the references that they must equal bit for bit.

Models and references are made once per process. A served model is hostile to mistakes (`strict`): every slot holds NaN
until its expert has arrived, and again from the moment that its expert is evicted.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from predictors.trained_predictors import make, sizes_of
from tiny_models import build, left_padded, token_ids
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import promoe
from promoe.experts.gate_output import gate_indices
from promoe.predictors import Predictor
from promoe.predictors.folded import FoldedPredictor
from promoe.predictors.reference import OraclePredictor
from promoe.runtime.assembly import predictor_context
from promoe.scheduler.many_tokens import MOST_SHOWN
from promoe.stores import Store
from promoe.transfer.links import EmulatedLink, FaultyLink, FileLink, HostLink, Link
from promoe.transfer.links.faults import seeded

IN_MEMORY = ("host", "offloaded", "spooled")  # stores of a model that was in memory before
EVICTIONS = ("next_use", "lru", "lfru", "static")
PREDICTORS = (None, "gate", "previous", "popularity", "random", "oracle", "wrong", "trained")
PROMPTS: dict[str, dict[str, torch.Tensor]] = {
    "one": {"input_ids": token_ids(1, 12, seed=1), "attention_mask": torch.ones(1, 12, dtype=torch.long)},
    # Short enough that predictors see its prefill too.
    "short": {"input_ids": token_ids(1, 4, seed=2), "attention_mask": torch.ones(1, 4, dtype=torch.long)},
    "padded": left_padded((9, 6, 2), seed=3),
}
NEW_TOKENS = 3
TOP_K = 3


class LinkOver(EmulatedLink):
    """What to pass as `link=` to have any link: `make(store)` is called with the store that is served."""

    def __init__(self, make: Callable[[Store], Link]) -> None:
        super().__init__(bandwidth_bytes_per_s=1e12)
        object.__setattr__(self, "_make", make)

    def bind(self, store: Store, **kwargs: Any) -> Link:  # type: ignore[override]
        return self._make(store)  # type: ignore[attr-defined, no-any-return]


def plain_link(store: Store, workers: int = 2) -> Link:
    """The fastest link that fits the store; worker threads move also its shortest chunks, as they move long ones."""
    link = copying_link(store, workers)
    link.copies_from_ram = False
    return link


def copying_link(store: Store, workers: int = 2) -> Link:
    """The fastest link that fits the store; forwards copy the short chunks themselves."""
    return FileLink(store, "page_cache", workers) if store.files else HostLink(store, workers)


def delayed(seed: int, max_delay_s: float = 5e-4, workers: int = 2) -> LinkOver:
    """A link whose chunks take random times, and so arrive in any order."""
    plan = seeded(seed, {"slow": 1.0}, max_delay_s)
    return LinkOver(lambda store: FaultyLink(plain_link(store, workers), plan))


ABLATION = [field.name for field in dataclasses.fields(promoe.Ablation)]


def config(**fields: Any) -> promoe.PromoeConfig:
    """Settings under which the engine really serves, its invariants are checked, and prefetch stays on."""
    defaults = {"bypass": False, "strict": True, "governor": False, "min_probability": 0.3, "min_group_bytes": 0}
    given = defaults | fields
    switches = {name: given.pop(name) for name in ABLATION if name in given}
    return promoe.PromoeConfig(**given, ablation=promoe.Ablation(**switches))


def stock(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The unmodified model, never patched: what references come from. Loaded from `checkpoint`."""
    return _instance(family, dtype, "reference")


def resident(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Another instance of the same model: the one that `served` patches and unpatches."""
    return _instance(family, dtype, "served")


@functools.cache
def _instance(family: str, dtype: torch.dtype, purpose: str) -> PreTrainedModel:
    return load_stock(checkpoint(family, dtype))


def load_stock(folder: Path, **kwargs: Any) -> PreTrainedModel:
    """A new instance of a checkpoint's model; its tensors cloned, because mapped ones are not aligned."""
    model = AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    return model


def checkpoint(family: str, dtype: torch.dtype = torch.float32) -> Path:
    """Folder of a tiny model's checkpoint, several shards, in the layout that hub checkpoints have."""
    return _saved(family, dtype)


@functools.cache
def _saved(family: str, dtype: torch.dtype) -> Path:
    # Three experts per token: a sum of two rows is the same in any order, so fewer would not show a wrong one.
    folder = Path(_scratch().name) / f"{family}-{dtype}"
    build(family, dtype=dtype, top_k=TOP_K).save_pretrained(folder, max_shard_size="60KB")
    return folder


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@dataclass(frozen=True)
class Outputs:
    """What a model answered to a prompt: `[batch, tokens, vocabulary]` of the prompt, then of each new token."""

    logits: tuple[torch.Tensor, ...]

    @property
    def tokens(self) -> torch.Tensor:
        """Greedy tokens `[batch, new tokens]`."""
        return torch.cat([logits[:, -1:].argmax(-1) for logits in self.logits], dim=1)

    def assert_equals(self, expected: Outputs) -> None:
        """All bits and all tokens are those of `expected`, none of them NaN."""
        assert len(self.logits) == len(expected.logits)
        for step, (found, wanted) in enumerate(zip(self.logits, expected.logits, strict=True)):
            assert torch.equal(found, wanted), f"step {step}: {(found - wanted).abs().max():.3g} off"
        assert torch.equal(self.tokens, expected.tokens)


@torch.inference_mode()
def greedy(model: nn.Module, prompt: dict[str, torch.Tensor], new_tokens: int = NEW_TOKENS) -> Outputs:
    """The logits of a prompt, and of `new_tokens` greedy tokens after it, each from its own decode pass."""
    ids, mask = prompt["input_ids"], prompt["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    out = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True)
    logits = [out.logits]
    for _ in range(new_tokens):
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        out = model(
            input_ids=logits[-1][:, -1:].argmax(-1),
            attention_mask=mask,
            position_ids=mask.sum(-1, keepdim=True) - 1,
            past_key_values=out.past_key_values,
            use_cache=True,
        )
        logits.append(out.logits)
    return Outputs(tuple(logits))


@functools.cache
def expected(family: str, dtype: torch.dtype, implementation: str, prompt: str) -> Outputs:
    """What the unmodified model answers."""
    return record(family, dtype, implementation, prompt)[0]


@functools.cache
def record(
    family: str, dtype: torch.dtype, implementation: str, prompt: str
) -> tuple[Outputs, tuple[tuple[int, tuple[int, ...]], ...]]:
    """What the unmodified model answers, and (MoE layer, experts) of each visit that a predictor is asked about."""
    model = stock(family, dtype)
    assert not hasattr(model, "promoe"), "the reference must be the unmodified model's"
    model.set_experts_implementation(implementation)
    return watched(model, PROMPTS[prompt])


def watched(
    model: PreTrainedModel, prompt: dict[str, torch.Tensor]
) -> tuple[Outputs, tuple[tuple[int, tuple[int, ...]], ...]]:
    """What an unpatched model answers, and the visits as in `record`."""
    visits: list[tuple[int, tuple[int, ...]]] = []

    def tap(layer_idx: int) -> Callable[..., None]:
        def on_gate(gate: nn.Module, args: Any, output: Any) -> None:
            index = gate_indices(output)
            assert index is not None
            if len(index) <= MOST_SHOWN:
                visits.append((layer_idx, tuple(sorted(set(index.flatten().tolist())))))

        return on_gate

    hooks = [layer.gate.register_forward_hook(tap(layer.layer_idx)) for layer in promoe.find_moe_layers(model)]
    try:
        return greedy(model, prompt), tuple(visits)
    finally:
        for hook in hooks:
            hook.remove()


def predictor_of(name: str | None, model: nn.Module, visits: Sequence[Any], lookahead: int) -> str | Predictor | None:
    """What to pass as `predictor=`; "oracle" and "wrong" know the visits, "trained" has random weights, also for reuse."""
    context = predictor_context(promoe.find_moe_layers(model), model.config.model_type)
    if name == "trained":
        sizes = sizes_of(context)
        trained = make(**sizes, lookahead=min(lookahead, context.num_layers), foresees_reuse=True)
        trained.reuse_weights.normal_()
        return FoldedPredictor(trained, context, lookahead)
    if name not in ("oracle", "wrong"):
        return name
    return OraclePredictor(context, lookahead, visits, wrong=name == "wrong")


def slots_of(model: nn.Module, cache: str | int) -> str | int:
    """A cache argument: "top-k" and small numbers mean slots, "25%" itself."""
    layer = promoe.find_moe_layers(model)[0]
    if cache == "top-k":
        assert layer.top_k is not None
        cache = layer.top_k
    return cache * layer.layout.slot_bytes if isinstance(cache, int) else cache


@contextmanager
def served(
    family: str,
    dtype: torch.dtype = torch.float32,
    implementation: str = "grouped_mm",
    *,
    store: str = "host",
    cache: str | int = "25%",
    predictor: Any = None,
    link: Any = None,
    **fields: Any,
) -> Iterator[PreTrainedModel]:
    """A tiny model in promoe's hands for as long as the context lasts, or until it is unpatched inside.

    `store` is "host", "offloaded" to its own checkpoint, "spooled", or what stays in files from the start. `fields` are those
    of `config`.
    """
    link = link or LinkOver(plain_link)
    plain = resident(family, dtype)
    arguments = {"cache": slots_of(plain, cache), "predictor": predictor, "link": link, "config": config(**fields)}
    if store in IN_MEMORY:
        model = (
            promoe.patch(plain, store="host", **arguments) if store == "host" else offloaded(plain, store, arguments)
        )
    else:
        model = promoe.from_pretrained(checkpoint(family, dtype), **arguments)
    model.set_experts_implementation(implementation)
    try:
        yield model
        if hasattr(model, "promoe"):
            check_integrity(model)
    finally:
        if hasattr(model, "promoe") and store in IN_MEMORY:
            promoe.unpatch(model)
        elif hasattr(model, "promoe"):
            close(model)


def offloaded(model: PreTrainedModel, store: str, arguments: dict[str, Any]) -> PreTrainedModel:
    """A model that was in memory, served from its checkpoint or, as if it had none, from files written for it."""
    name = model.config._name_or_path
    model.config._name_or_path = name if store == "offloaded" else ""
    try:
        promoe.patch(model, store="disk", **arguments)
    finally:
        model.config._name_or_path = name
    assert model.promoe.stats().store == {"offloaded": "FileStore", "spooled": "SpooledStore"}[store]
    return model


DISTURBANCES = ("none", "gate called twice", "gate called alone", "exception", "interruption")


@torch.inference_mode()
def disturb(model: nn.Module, kind: str, prompt: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Do something to a served model that no forward expects, between a gate and its experts. Returns the undo.

    Args:
        model: served.
        kind: one of DISTURBANCES; "gate called twice" lasts until undone, the others are over when this returns.
        prompt: what an interrupted forward was about.
    """
    layers = promoe.find_moe_layers(model)
    if kind == "gate called twice":
        hooks = [layer.gate.register_forward_hook(_CallAgain()) for layer in layers]
        return lambda: [hook.remove() for hook in hooks].clear()
    if kind == "gate called alone":
        width = model.get_input_embeddings().weight.shape[1]
        for seed, layer in enumerate(layers):
            hidden = torch.randn(3, width, generator=torch.Generator().manual_seed(seed))
            layer.gate(hidden.to(next(layer.gate.parameters()).dtype))
    if kind in ("exception", "interruption"):
        error = RuntimeError if kind == "exception" else KeyboardInterrupt
        hook = layers[len(layers) // 2].experts.register_forward_pre_hook(_raising(error))
        try:
            greedy(model, prompt)
        except error:
            pass
        else:
            raise AssertionError("the forward was not interrupted")
        finally:
            hook.remove()
    return lambda: None


class _CallAgain:
    """A gate's hook that calls it again, with its tokens in another order: a hint for the same layer that is not meant."""

    def __init__(self) -> None:
        self.inside = False
        self.calls = 0

    def __call__(self, gate: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self.inside:
            self.inside = True
            self.calls += 1
            gate(-args[0], *args[1:])
            self.inside = False


def _raising(error: type[BaseException]) -> Callable[..., None]:
    def hook(*args: Any) -> None:
        raise error("between gate and experts")

    return hook


def close(model: nn.Module) -> None:
    """End a model that was opened from files, without reading its experts."""
    model.promoe.close()
    model.promoe._store.close()


def check_integrity(model: nn.Module) -> None:
    """The scheduler's conservation laws."""
    engine = model.promoe.runtime.engine
    with engine.lock:
        engine.scheduler.check_integrity()
