"""A system that is open in this process and answers prompts: the unmodified model, this library, or a peer."""

from __future__ import annotations

import io
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteria

from promoe.commands.bench.in_place import in_place, rows_of
from promoe.commands.bench.llama_cpp import LlamaCpp
from promoe.commands.bench.many import Many, ManyAnswers, answer_many
from promoe.commands.bench.messages import Answer, Facts, Opening, Prompt, Reader, Sizes
from promoe.commands.bench.peers import GGUF, open_llama_cpp, open_peer, prepare
from promoe.commands.bench.stock import load_stock
from promoe.commands.bench.systems import FROM_GGUF, ORACLE, ORACLE_LOOKAHEAD, System
from promoe.commands.bench.whole_layers import read_whole_layers
from promoe.commands.contention import Contention, measure_contention
from promoe.commands.lower_bound import link_bandwidth
from promoe.commands.measure import REPETITION_PENALTY, generate
from promoe.experts.moe_layers import MoELayer, find_moe_layers
from promoe.model.opening import open_without_experts
from promoe.predictors import PredictorContext
from promoe.predictors.reference import OraclePredictor
from promoe.runtime.loading import from_pretrained
from promoe.runtime.sizes import plan_pools
from promoe.stats.routing import RoutingRecorder
from promoe.stores.layout import ExpertLayout
from promoe.transfer.links import FileLink
from promoe.transfer.rows import ExpertRows

# A system that takes seconds per token is judged by this many tokens at least.
FEWEST_TOKENS = 4


class Served:
    """A system that is open in this process.

    Args:
        opening: what to open.

    Raises:
        PromoeError: it cannot be opened.
    """

    def __init__(self, opening: Opening) -> None:
        self.system = opening.system
        self.model: Any = _open(opening)
        self.handle: Any = getattr(self.model, "promoe", None)
        """The handle of the patched model; None for other systems."""
        self._rows: dict[frozenset[ExpertLayout], list[ExpertRows]] = {}  # for `in_place`, by what is packed

    @property
    def peak_limited_bytes(self) -> int | None:
        """None: the memory of this process is not limited."""
        return None

    def answer(self, prompt: Prompt) -> Answer:
        """Answer a prompt, and time it."""
        if isinstance(self.model, LlamaCpp):
            generated = self.model.generate(
                prompt.ids, prompt.new_tokens, seconds=prompt.seconds, fewest_tokens=FEWEST_TOKENS
            )
            return Answer(generated)
        ids = torch.tensor([list(prompt.ids)])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with (
            self._in_place(prompt.packed) if prompt.in_place else nullcontext(),
            RoutingRecorder(self.model, self.layers()) if prompt.record else nullcontext() as recorder,
        ):
            generation = generate(
                self.model,
                inputs,
                prompt.new_tokens,
                min_new_tokens=prompt.new_tokens,
                repetition_penalty=REPETITION_PENALTY,
                pad_token_id=prompt.pad_token_id,
                stopping_criteria=[_TimeIsUp(prompt.seconds, ids.shape[1])],
            )
            return Answer(generation, [] if recorder is None else recorder.take())

    def answer_many(self, many: Many, pad_token_id: int) -> ManyAnswers:
        """Answer many prompts, and time it."""
        return answer_many(self.model, many, pad_token_id)

    def layers(self) -> list[MoELayer]:
        """Return the MoE layers of the model."""
        return find_moe_layers(self.model) if self.handle is None else list(self.handle.runtime.layers)

    def sizes(self) -> Sizes:
        """Return the sizes of the model."""
        layers = self.layers()
        experts = {id(tensor) for layer in layers for tensor in layer.experts.parameters()}
        others = (*self.model.parameters(), *self.model.buffers())
        return Sizes(
            tuple(layer.num_experts for layer in layers),
            tuple(layer.layout.payload_bytes for layer in layers),
            tuple(layer.top_k or 1 for layer in layers),
            sum(tensor.nbytes for tensor in others if id(tensor) not in experts),
            self.model.config.get_text_config().hidden_size,
        )

    def slots_bytes(self, cache: str) -> int:
        """Return the bytes of the slots of a cache of this size.

        Raises:
            ConfigError: the size is malformed, or too small for one expert.
        """
        layers = self.layers()
        plans = plan_pools(cache, [layer.layout for layer in layers], [layer.num_experts for layer in layers])
        return sum(plan.nbytes for plan in plans)

    def bandwidth(self) -> float:
        """Return the bytes per second that the link of this library's system can reach; see `link_bandwidth`."""
        engine = self.handle.runtime.engine
        return link_bandwidth(engine.link, engine.store)

    def prepare(self, system: System, checkpoint: Path, folder: Path) -> None:
        """Write a peer's files, unless they are there. This system is the unmodified model."""
        with _silent():
            prepare(system, self.model, checkpoint, folder)

    def contention(
        self, checkpoint: Path, dtype: str, reader: Reader, ids: Sequence[int], seconds: float
    ) -> Contention:
        """Measure how much computing and reading slow each other. This system is the unmodified model."""
        with closing(open_without_experts(checkpoint, dtype=getattr(torch, dtype)).store) as store:
            return measure_contention(self.model, ids, store, reader.mode, reader.workers, seconds)

    def reset(self) -> None:
        """Forget what was counted."""
        if self.handle is not None:
            self.handle.reset_stats()

    def facts(self) -> Facts:
        """Return what was counted."""
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        if not self.system.is_ours:
            return Facts(None, None, None, peak_bytes)
        engine = self.handle.runtime.engine
        reader = Reader(engine.link.mode, engine.link.workers) if isinstance(engine.link, FileLink) else None
        formatted = frozenset(layout for layout in engine.store.layouts if layout.formats)
        packed = frozenset[ExpertLayout]() if self.system.is_quantised else formatted
        return Facts(self.handle.stats(), engine.scheduler.config, reader, peak_bytes, packed)

    def close(self) -> None:
        """Stop the engine. Safe to repeat."""
        if self.handle is not None:
            self.handle.close()
        if isinstance(self.model, LlamaCpp):
            self.model.close()

    def _in_place(self, packed: frozenset[ExpertLayout]) -> AbstractContextManager[None]:
        layers = self.layers()
        if packed not in self._rows:
            self._rows[packed] = rows_of(layers, packed)
        return in_place(layers, self._rows[packed])


def _open(opening: Opening) -> Any:
    dtype, kind = getattr(torch, opening.dtype), opening.system.kind
    if kind == "promoe":
        return _open_ours(opening, dtype)
    if kind == "resident":
        return _open_filled(opening, dtype) if opening.system.is_quantised else load_stock(opening.checkpoint, dtype)
    assert opening.folder is not None, f"{opening.system.name} reads files of its own"
    if opening.system.is_llama_cpp:
        return open_llama_cpp(opening.system, opening.checkpoint, opening.folder, opening.context_tokens)
    with _silent() if kind == "airllm" else nullcontext():
        return open_peer(kind, opening.checkpoint, dtype, opening.folder)


def _open_ours(opening: Opening, dtype: torch.dtype) -> Any:
    predictor: Any = opening.system.predictor
    if predictor == ORACLE:
        count = len(opening.num_experts)
        context = PredictorContext(gates=(), num_experts=opening.num_experts, top_k=[1] * count)
        predictor = OraclePredictor(context, ORACLE_LOOKAHEAD, opening.decode_visits)
    config, experts, source = opening.system.config, opening.system.experts, opening.checkpoint
    if experts in FROM_GGUF:
        assert opening.folder is not None, f"{opening.system.name} reads a file of its own"
        source, experts = opening.folder / GGUF, FROM_GGUF[experts][1]
    model: Any = from_pretrained(
        source,
        experts=experts,
        cache=opening.cache,
        predictor=predictor,
        dtype=dtype,
        link="auto" if opening.link is None else opening.link,
        config=replace(config, read_mode=opening.read_mode or config.read_mode),
    )
    if opening.system.slots == "one layer":
        read_whole_layers(model.promoe.runtime.engine)
    return model


def _open_filled(opening: Opening, dtype: torch.dtype) -> Any:
    """Open a model with all experts in slots, and fetch them all."""
    model = _open_ours(replace(opening, cache="100%"), dtype)
    num_experts = [layer.num_experts for layer in model.promoe.runtime.layers]
    filled = model.promoe.warm([[1] * count for count in num_experts])
    assert filled == sum(num_experts), f"{filled} of {sum(num_experts)} experts are in slots"
    return model


class _TimeIsUp(StoppingCriteria):  # type: ignore[misc]
    """Stops an answer that takes too long, after a few tokens."""

    def __init__(self, seconds: float, prompt_tokens: int) -> None:
        self._end_s = time.monotonic() + seconds
        self._fewest = prompt_tokens + FEWEST_TOKENS

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        stop = input_ids.shape[1] >= self._fewest and time.monotonic() > self._end_s
        return torch.full((len(input_ids),), stop, dtype=torch.bool)


def _silent() -> AbstractContextManager[Any]:
    """Hide what AirLLM prints: what it does, and a bar per layer."""
    return redirect_stdout(io.StringIO())
