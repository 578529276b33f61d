"""One system in a process of its own, so that its memory can be limited and measured: answers what it is asked."""

from __future__ import annotations

import io
import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import StoppingCriteria

from promoe.commands.bench.in_place import in_place, rows_of
from promoe.commands.bench.peers import open_peer, prepare
from promoe.commands.bench.systems import ORACLE, ORACLE_LOOKAHEAD, Kind, System
from promoe.commands.contention import Contention, measure_contention
from promoe.commands.demo.systems import load_stock
from promoe.commands.measure import REPETITION_PENALTY, Generation, generate
from promoe.experts.kernels.formats import formats_in
from promoe.experts.moe_layers import find_moe_layers
from promoe.model.opening import open_without_experts
from promoe.predictors import PredictorContext
from promoe.predictors.reference import OraclePredictor
from promoe.runtime.loading import from_pretrained
from promoe.runtime.sizes import plan_pools
from promoe.scheduler import SchedulerConfig
from promoe.stats.routing import RoutedPass, RoutingRecorder
from promoe.stats.totals import Stats
from promoe.transfer.links import EmulatedLink, FileLink
from promoe.transfer.links.file import drop_files
from promoe.transfer.links.probe import ProbeMode
from promoe.transfer.rows import ExpertRows

# Of a system that takes seconds per token, a few tokens tell enough.
FEWEST_TOKENS = 4


@dataclass(frozen=True)
class Opening:
    """What a process opens.

    Attributes:
        system: which.
        checkpoint: the model's folder.
        dtype: of its weights, such as "bfloat16".
        cache: slots of this library's systems.
        folder: a peer's own files.
        link: an emulated link for this library's systems; None: the disk.
        threads: that compute.
        num_experts: of each MoE layer, for the oracle.
        decode_visits: (layer, experts) of every layer visit of short passes, in order, for the oracle.
    """

    system: System
    checkpoint: Path
    dtype: str
    cache: str
    folder: Path
    link: EmulatedLink | None
    threads: int
    num_experts: Sequence[int] = ()
    decode_visits: Sequence[tuple[int, Sequence[int]]] = ()


@dataclass(frozen=True)
class Prompt:
    """What to answer.

    Attributes:
        ids: of the prompt's tokens.
        new_tokens: to generate; the end of text is suppressed, so that all answers have the same length.
        seconds: stop after so long, from a few tokens on.
        pad_token_id: for `model.generate`.
        record: also return the routing; such an answer is slower.
        in_place: of the unmodified model: run its experts as this library does.
        packed: names of tensors that are packed then.
    """

    ids: Sequence[int]
    new_tokens: int
    seconds: float
    pad_token_id: int | None
    record: bool = False
    in_place: bool = False
    packed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Answer:
    """What came of it."""

    generation: Generation
    routing: list[RoutedPass]


@dataclass(frozen=True)
class Reader:
    """How a system of this library reads files: past the page cache or through it, from how many threads."""

    mode: ProbeMode
    workers: int


@dataclass(frozen=True)
class Facts:
    """What a process knows at its end.

    Attributes:
        stats: of a system of this library.
        scheduler: its sizes and policy.
        reader: how it reads files, if it does.
        packed: names of its experts' tensors that are packed.
        peak_rss_bytes: most memory that the process had in use, mapped files included.
    """

    stats: Stats | None
    scheduler: SchedulerConfig | None
    reader: Reader | None
    peak_rss_bytes: int
    packed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Sizes:
    """What a model takes: experts of each MoE layer and bytes of one, chosen per token, bytes of everything else, and H."""

    num_experts: tuple[int, ...]
    expert_bytes: tuple[int, ...]
    top_k: tuple[int, ...]
    other_bytes: int
    hidden_size: int

    @property
    def experts_bytes(self) -> int:
        """All routed experts."""
        return sum(count * nbytes for count, nbytes in zip(self.num_experts, self.expert_bytes, strict=True))

    @property
    def token_bytes(self) -> int:
        """The routed experts that one token needs."""
        return sum(count * nbytes for count, nbytes in zip(self.top_k, self.expert_bytes, strict=True))


@dataclass(frozen=True)
class Preparing:
    """A peer's files, to be written by the process that holds the unmodified model."""

    kind: Kind
    checkpoint: Path
    folder: Path


@dataclass(frozen=True)
class Contending:
    """How to find out what computing and reading lose to each other, in the process that holds the unmodified model."""

    checkpoint: Path
    dtype: str
    reader: Reader
    ids: Sequence[int]
    seconds: float


def serve(connection: Connection) -> None:
    """Answer requests until the other end closes. What a request raises is sent back."""
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    server = _Server()
    answers: dict[str, Callable[[Any], Any]] = {
        "open": server.open,
        "answer": server.answer,
        "sizes": server.sizes,
        "slots": server.slots_bytes,
        "prepare": server.prepare,
        "contention": server.contention,
        "reset": server.reset,
        "facts": server.facts,
    }
    connection.send(None)  # ready: from here on memory is the system's own
    while True:
        try:
            request, argument = connection.recv()
        except EOFError:
            break
        try:
            connection.send((True, answers[request](argument)))
        except Exception as error:
            connection.send((False, f"{type(error).__name__}: {error}"))
    server.close()


class _Server:
    """The system of one process."""

    def __init__(self) -> None:
        self._model: Any = None
        self._handle: Any = None
        self._rows: dict[frozenset[str], list[ExpertRows]] = {}  # for `in_place`, by what is packed

    def open(self, opening: Opening) -> None:
        torch.set_num_threads(opening.threads)
        # What others read or wrote of its files is still in the page cache, and would not count against its limit.
        for folder in (opening.checkpoint, opening.folder):
            drop_files(path for path in folder.rglob("*") if path.is_file())
        dtype = getattr(torch, opening.dtype)
        system = opening.system
        with _silent() if system.kind == "airllm" else nullcontext():
            if system.kind == "resident":
                self._model = load_stock(opening.checkpoint, dtype)
            elif system.kind == "promoe":
                self._model = _open_ours(opening, dtype)
                self._handle = self._model.promoe
            else:
                self._model = open_peer(system.kind, opening.checkpoint, dtype, opening.folder)

    def answer(self, prompt: Prompt) -> Answer:
        ids = torch.tensor([list(prompt.ids)])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with (
            self._in_place(prompt.packed) if prompt.in_place else nullcontext(),
            RoutingRecorder(self._model, self._layers()) if prompt.record else nullcontext() as recorder,
        ):
            generation = generate(
                self._model,
                inputs,
                prompt.new_tokens,
                min_new_tokens=prompt.new_tokens,
                repetition_penalty=REPETITION_PENALTY,
                pad_token_id=prompt.pad_token_id,
                stopping_criteria=[_TimeIsUp(prompt.seconds, ids.shape[1])],
            )
            return Answer(generation, [] if recorder is None else recorder.take())

    def _in_place(self, packed: frozenset[str]) -> AbstractContextManager[None]:
        layers = self._layers()
        if packed not in self._rows:
            self._rows[packed] = rows_of(layers, packed)
        return in_place(layers, self._rows[packed])

    def sizes(self, _: None) -> Sizes:
        layers = self._layers()
        experts = {id(tensor) for layer in layers for tensor in layer.experts.parameters()}
        others = (*self._model.parameters(), *self._model.buffers())
        return Sizes(
            tuple(layer.num_experts for layer in layers),
            tuple(layer.layout.payload_bytes for layer in layers),
            tuple(layer.top_k or 1 for layer in layers),
            sum(tensor.nbytes for tensor in others if id(tensor) not in experts),
            self._model.config.get_text_config().hidden_size,
        )

    def slots_bytes(self, cache: str) -> int:
        layers = self._layers()
        plans = plan_pools(cache, [layer.layout for layer in layers], [layer.num_experts for layer in layers])
        return sum(plan.nbytes for plan in plans)

    def prepare(self, what: Preparing) -> None:
        with _silent():
            prepare(what.kind, self._model, what.checkpoint, what.folder)

    def reset(self, _: None) -> None:
        if self._handle is not None:
            self._handle.reset_stats()

    def contention(self, how: Contending) -> Contention:
        with closing(open_without_experts(how.checkpoint, dtype=getattr(torch, how.dtype)).store) as store:
            return measure_contention(self._model, how.ids, store, how.reader.mode, how.reader.workers, how.seconds)

    def facts(self, _: None) -> Facts:
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        if self._handle is None:
            return Facts(None, None, None, peak_bytes)
        engine = self._handle.runtime.engine
        reader = Reader(engine.link.mode, engine.link.workers) if isinstance(engine.link, FileLink) else None
        packed = frozenset(name for matrices in formats_in(engine.store.layouts).values() for name in matrices)
        return Facts(self._handle.stats(), engine.scheduler.config, reader, peak_bytes, packed)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.close()

    def _layers(self) -> Any:
        return find_moe_layers(self._model) if self._handle is None else self._handle.runtime.layers


def _open_ours(opening: Opening, dtype: torch.dtype) -> Any:
    system = opening.system
    config = system.config if opening.link is None else replace(system.config, read_mode="page_cache")
    predictor: Any = system.predictor
    if predictor == ORACLE:
        count = len(opening.num_experts)
        context = PredictorContext(gates=(), num_experts=opening.num_experts, top_k=[1] * count)
        predictor = OraclePredictor(context, ORACLE_LOOKAHEAD, opening.decode_visits)
    return from_pretrained(
        opening.checkpoint,
        cache=opening.cache,
        predictor=predictor,
        dtype=dtype,
        link="auto" if opening.link is None else opening.link,
        config=config,
    )


class _TimeIsUp(StoppingCriteria):  # type: ignore[misc]
    """Stops an answer that takes too long, after a few tokens."""

    def __init__(self, seconds: float, prompt_tokens: int) -> None:
        self._end_s = time.monotonic() + seconds
        self._fewest = prompt_tokens + FEWEST_TOKENS

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        stop = input_ids.shape[1] >= self._fewest and time.monotonic() > self._end_s
        return torch.full((len(input_ids),), stop, dtype=torch.bool)


def _silent() -> Any:
    """AirLLM prints what it does, and draws a bar per layer."""
    return redirect_stdout(io.StringIO())
