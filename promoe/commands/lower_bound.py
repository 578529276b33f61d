"""The least time per token that compute and link allow, `max(C, B / W)`, to be shown beside each measured time.

C: time per token of the unpatched model with everything resident. B: bytes that a demand-only replay of the same
eviction policy misses, where a layer's experts are one atomic event (replaying them one by one overstates misses).
W: best bandwidth of the link that a raw probe reaches in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from promoe.experts.moe_layers import MoELayer, find_moe_layers
from promoe.scheduler import SchedulerConfig
from promoe.scheduler.replay import Replay
from promoe.stats.counts import PhaseStats
from promoe.stores import Store
from promoe.transfer.links import FileStore, Link
from promoe.transfer.links.probe import best_bandwidth
from promoe.units import is_number, ratio

MIB = 1024 * 1024
PROBE_REQUEST_BYTES = (1 * MIB, 4 * MIB)
PROBE_SECONDS = 0.3  # per setting


@dataclass(frozen=True)
class RoutedPass:
    """One forward pass of a model as its gates saw it."""

    phase: Literal["prefill", "decode"]
    visits: list[tuple[int, list[list[int]]]] = field(default_factory=list)
    """(MoE layer, experts of each token `[num_tokens][top_k]`), in the order of execution."""


class RoutingRecorder:
    """Records the routing of a model's passes while its context lasts: one unpadded sequence at a time.

    The model may be patched or not; routing is the same. Costs a few microseconds per layer and pass, so record in a
    run that is not timed.
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
        """The passes since the start or the last `take`, in order."""
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


def missed_bytes(config: SchedulerConfig, passes: Sequence[RoutedPass]) -> list[int]:
    """Bytes that a demand-only, event-atomic replay fetches in each of `passes`, beginning with empty slots."""
    replay = Replay(config)
    return [_missed(replay, routed) for routed in passes]


def _missed(replay: Replay, routed: RoutedPass) -> int:
    return sum(replay.visit(layer_idx, tokens) for layer_idx, tokens in routed.visits)


def bytes_per_token(config: SchedulerConfig, generations: Sequence[Sequence[RoutedPass]]) -> list[float]:
    """B of each generation: mean missed bytes per decode pass; slots stay filled from one generation to the next.

    Args:
        config: as in `Replay`.
        generations: the passes of each, in the order in which the system ran them, warm-up included.

    Returns:
        One number per generation; nan where nothing was decoded.
    """
    replay, results = Replay(config), []
    for passes in generations:
        missed = [(routed.phase, _missed(replay, routed)) for routed in passes]
        decode = [nbytes for phase, nbytes in missed if phase == "decode"]
        results.append(ratio(sum(decode), len(decode)))
    return results


def token_bound_s(compute_s: float | None, missed_bytes_per_token: float, bandwidth_bytes_per_s: float) -> float:
    """`max(C, B / W)` in seconds per token; `compute_s` None (not measured): `B / W`, a weaker bound."""
    return max(compute_s or 0.0, missed_bytes_per_token / bandwidth_bytes_per_s)


def needed_bytes(replayed: float, decode: PhaseStats) -> float:
    """Return the bytes per token that a system cannot do without.

    Args:
        replayed: what its eviction policy misses on demand only (`bytes_per_token`).
        decode: what the system moved. Where its forecasts also keep experts from being evicted, it needed less.
    """
    used = ratio(decode.bytes_used, decode.tokens)
    return min(replayed, used) if is_number(used) else replayed


def link_bandwidth(link: Link, store: Store) -> float:
    """W, bytes per second: what an emulated link is set to, else the best of a raw probe of the store's files.

    The probe takes about 4 s. Disks drift: of several probes, and of what systems were seen to get, the largest is W.
    """
    if link.emulated_bytes_per_s is not None:
        return link.emulated_bytes_per_s
    assert link.mode is not None, f"no probe for {link.describe()}"
    assert isinstance(store, FileStore), f"a file link over a {type(store).__name__}"
    return best_bandwidth(store, link.mode, request_bytes=PROBE_REQUEST_BYTES, seconds=PROBE_SECONDS).bytes_per_s
