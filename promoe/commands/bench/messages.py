"""What a system is asked, and what it answers. These records are sent between processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from promoe.commands.bench.systems import System
from promoe.commands.measure import Generation
from promoe.config import ReadMode
from promoe.runtime.sizes import CacheSize
from promoe.scheduler import SchedulerConfig
from promoe.stats.routing import RoutedPass
from promoe.stats.totals import Stats
from promoe.stores.layout import ExpertLayout
from promoe.transfer.links import EmulatedLink
from promoe.transfer.links.probe import ProbeMode


@dataclass(frozen=True)
class Opening:
    """How a system is opened.

    Attributes:
        system: the system.
        checkpoint: folder of the model.
        dtype: of the weights, such as "bfloat16".
        cache: size of the expert cache of this library's systems, as `promoe.from_pretrained` takes it.
        link: an emulated link for this library's systems; None: their experts come from the disk.
        read_mode: how this library's systems read files; None: as the system says.
        folder: a peer's own files.
        context_tokens: of the longest prompt and its answer, for llama.cpp.
        num_experts: of each MoE layer, for the oracle.
        decode_visits: (layer, experts) of every layer visit of short passes, in order, for the oracle.
    """

    system: System
    checkpoint: Path
    dtype: str
    cache: CacheSize
    link: EmulatedLink | None = None
    read_mode: ReadMode | None = None
    folder: Path | None = None
    context_tokens: int = 0
    num_experts: Sequence[int] = ()
    decode_visits: Sequence[tuple[int, Sequence[int]]] = ()


@dataclass(frozen=True)
class Prompt:
    """A prompt to be answered, greedily.

    Attributes:
        ids: token ids of the prompt.
        new_tokens: to generate; the end of text is suppressed, so that all answers have the same length.
        pad_token_id: for `model.generate`.
        seconds: an answer that takes longer is cut short after a few tokens.
        record: also return the routing; such an answer is slower.
        in_place: run the experts of the unmodified model as this library does.
        packed: layouts with the formats that experts have for that; the others are plain.
    """

    ids: Sequence[int]
    new_tokens: int
    pad_token_id: int | None
    seconds: float = math.inf
    record: bool = False
    in_place: bool = False
    packed: frozenset[ExpertLayout] = frozenset()


@dataclass(frozen=True)
class Answer:
    """A timed answer, and its routing if that was recorded."""

    generation: Generation
    routing: Sequence[RoutedPass] = ()


@dataclass(frozen=True)
class Reader:
    """How a system of this library reads files: past the page cache or through it, and with how many threads."""

    mode: ProbeMode
    workers: int


@dataclass(frozen=True)
class Facts:
    """What a system has counted since it was opened or reset.

    Attributes:
        stats: of a system of this library; None for others.
        scheduler: sizes and policy of a system of this library.
        reader: how it reads files; None if it does not.
        peak_rss_bytes: the most memory that its process had in use, mapped files included.
        packed: layouts of its experts that have matrices in another format than the plain one, if its output is that of the
            unmodified model.
    """

    stats: Stats | None
    scheduler: SchedulerConfig | None
    reader: Reader | None
    peak_rss_bytes: int
    packed: frozenset[ExpertLayout] = frozenset()


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model.

    Attributes:
        num_experts: routed experts of each MoE layer.
        expert_bytes: bytes of one expert of each MoE layer.
        top_k: experts that each MoE layer chooses per token.
        other_bytes: bytes of everything but the routed experts.
        hidden_size: H.
    """

    num_experts: tuple[int, ...]
    expert_bytes: tuple[int, ...]
    top_k: tuple[int, ...]
    other_bytes: int
    hidden_size: int

    @property
    def experts_bytes(self) -> int:
        """Bytes of all routed experts."""
        return sum(count * nbytes for count, nbytes in zip(self.num_experts, self.expert_bytes, strict=True))

    @property
    def token_bytes(self) -> int:
        """Bytes of the routed experts that one token needs."""
        return sum(count * nbytes for count, nbytes in zip(self.top_k, self.expert_bytes, strict=True))
