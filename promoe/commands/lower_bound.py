"""Finds the least time per token that compute and link allow, `max(C, B / W)`, to be shown beside each measured time.

C: time per token of the unpatched model with everything resident. B: bytes that a demand-only replay of the same
eviction policy misses, where a layer's experts are one atomic event (replaying them one by one overstates misses).
W: the best bandwidth of the link that a raw probe reaches in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from promoe.experts.moe_layers import MoELayer, find_moe_layers
from promoe.scheduler import SchedulerConfig
from promoe.scheduler.replay import Replay
from promoe.stats.counts import PhaseStats
from promoe.stores import Store
from promoe.transfer.links import BoundEmulatedLink, FileLink, FileStore, Link
from promoe.transfer.links.probe import BandwidthProbe, best_bandwidth
from promoe.transfer.links.verified import VerifiedLink
from promoe.units import is_number, ratio

MIB = 1024 * 1024
PROBE_REQUEST_BYTES = (1 * MIB, 4 * MIB)
PROBE_SECONDS = 0.3  # of each setting


@dataclass(frozen=True)
class RoutedPass:
    """The experts that the gates chose in one forward pass of a model."""

    phase: Literal["prefill", "decode"]
    visits: list[tuple[int, list[list[int]]]] = field(default_factory=list)
    """(MoE layer, experts of each token `[num_tokens][top_k]`), in the order of execution."""


class RoutingRecorder:
    """Records the routing of a model's passes while its context lasts, for one unpadded sequence at a time.

    The model may be patched or not. Recording costs a few microseconds per layer and pass, so record in a run that is not
    timed.
    """

    def __init__(self, model: nn.Module, layers: Sequence[MoELayer] | None = None) -> None:
        self._model = model
        self._layers = find_moe_layers(model) if layers is None else layers
        self._raw: list[list[tuple[int, torch.Tensor]]] = []
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> RoutingRecorder:
        self._undo = [self._model.register_forward_pre_hook(self._begin).remove]
        self._undo += [layer.gate.register_forward_hook(self._on_gate(layer)).remove for layer in self._layers]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for undo in self._undo:
            undo()

    def take(self) -> list[RoutedPass]:
        """Return the passes since the start or the last `take`, in order."""
        raw, self._raw = self._raw, []
        passes = []
        for visits in raw:
            tokens = [(layer_idx, index.tolist()) for layer_idx, index in visits]
            decode = all(len(rows) == 1 for _, rows in tokens)
            passes.append(RoutedPass("decode" if decode else "prefill", tokens))
        return passes

    def _begin(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        self._raw.append([])

    def _on_gate(self, layer: MoELayer) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def on_gate(gate: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            index = layer.chosen(output)
            if index is not None:
                self._raw[-1].append((layer.layer_idx, index))

        return on_gate


class Missed(NamedTuple):
    """Bytes that one answer misses on demand only: of its prompt, and per token after it (nan without any)."""

    prompt_bytes: float
    token_bytes: float


def missed_bytes(config: SchedulerConfig, passes: Sequence[RoutedPass]) -> list[int]:
    """Return the bytes that a demand-only, event-atomic replay fetches in each of `passes`, beginning with empty slots."""
    replay = Replay(config)
    return [sum(replay.visit(layer_idx, tokens) for layer_idx, tokens in routed.visits) for routed in passes]


def missed_by_answer(config: SchedulerConfig, answers: Sequence[Sequence[RoutedPass]]) -> list[Missed]:
    """Return B of each answer: what its prompt misses, and the mean over the passes after it.

    Args:
        config: as in `Replay`.
        answers: the passes of each answer, the prompt's first, in the order in which the system ran them, warm-up included.
            Slots stay filled from one answer to the next.
    """
    missed = iter(missed_bytes(config, [routed for passes in answers for routed in passes]))
    found = []
    for passes in answers:
        prompt_bytes, *token_bytes = [next(missed) for _ in passes]
        found.append(Missed(prompt_bytes, ratio(sum(token_bytes), len(token_bytes))))
    return found


def needed_share(replayed: Sequence[float], decode: PhaseStats) -> float:
    """Return the share of the replayed misses that a system cannot do without, at most 1.

    Where its forecasts also keep experts from being evicted, a system moves less than its eviction policy misses on demand
    only. What it moved and used is then all that it needed.

    Args:
        replayed: bytes per token that its eviction policy misses, of each answer (`missed_by_answer`).
        decode: what the system moved for these answers.
    """
    known = [nbytes for nbytes in replayed if is_number(nbytes)]
    share = ratio(ratio(decode.bytes_used, decode.tokens), ratio(sum(known), len(known)))
    return min(1.0, share) if is_number(share) else 1.0


def link_bandwidth(link: Link, store: Store) -> float:
    """Return W in bytes per second: the speed of an emulated link, else the best of a raw probe of the store's files.

    The probe takes about 4 s. Disks drift, so W is the largest of several probes and of what systems were seen to get.
    """
    if isinstance(link, VerifiedLink):
        link = link.link
    if isinstance(link, BoundEmulatedLink):
        return link.spec.bandwidth_bytes_per_s
    assert isinstance(link, FileLink), f"no probe for a {type(link).__name__}"
    assert isinstance(store, FileStore), f"a file link over a {type(store).__name__}"
    return probe(store, link).best.bytes_per_s


def probe(store: FileStore, link: FileLink) -> BandwidthProbe:
    """Read the store's files in the link's mode, with several request sizes and depths."""
    return best_bandwidth(store, link.mode, request_bytes=PROBE_REQUEST_BYTES, seconds=PROBE_SECONDS, rounds=2)
