"""The real scheduler under a virtual clock: each layer computes for a given time, and the link moves bytes at a given speed.

What `promoe.transfer.engine` does with threads happens here in order of time; the scheduler cannot tell the difference.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from promoe.scheduler import Lease, Scheduler, SchedulerConfig, most_needed_first
from promoe.scheduler.eviction import Static
from promoe.scheduler.many_tokens import uses_most
from promoe.scheduler.reuse import LearnedReuse
from promoe.stats.counts import Phase
from promoe.stats.recorder import Recorder
from promoe.transfer.link_timetable import IN_FLIGHT, Wire

Forecasts = Callable[[int], "Sequence[tuple[int, int, npt.ArrayLike]]"]
"""What is forecast while a layer computes: `layer_idx -> [(steps_ahead, layer_idx, probabilities)]`."""
Work = Callable[[int, int, int], tuple[float, float]]
"""What computing takes: `(layer_idx, num_tokens, experts used) -> (seconds before the experts, seconds of each of them)`."""


class Simulator:
    """One machine that serves one model. Feed it passes; then read `recorder` and the clock, `now_s`.

    Args:
        config: the scheduler's.
        wire: the link.
        reuse: what the reuse prior starts from.
        slowdown: how many times as long computing takes while bytes are on their way. 1: a copy engine moves them; more: the
            cores that compute do.
        group_s: seconds that it costs to wake up for experts that arrive during a visit and to run them by themselves,
            however few they are.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        wire: Wire,
        reuse: LearnedReuse | None = None,
        slowdown: float = 1.0,
        group_s: float = 0.0,
    ) -> None:
        self.config = config
        self.recorder = Recorder(config.num_experts, config.expert_bytes)
        self.now_s = 0.0
        self.scheduler = Scheduler(config, self.recorder, reuse)
        self._wire = wire
        self._slowdown = slowdown
        self._group_s = group_s
        # Arrivals on the wire's timetable; the lease at its last chunk, None at the others.
        self._in_flight: deque[tuple[float, Lease | None]] = deque()
        self.recorder.prefetch_switched(config.prefetch)

    def fix_popularity(self, popularity: npt.NDArray[np.float64]) -> None:
        """Keep the most popular experts by these counts `[num_layers, num_experts]`; only for the policy `static`."""
        eviction = self.scheduler.eviction
        assert isinstance(eviction, Static), f"{self.config.eviction} learns by itself"
        eviction.fix(popularity)

    def run_pass(
        self,
        phase: Phase,
        visits: Sequence[tuple[int, Sequence[Sequence[int]]]],
        work: Work,
        *,
        forecasts: Forecasts | None = None,
        stream: bool = True,
        num_sequences: int = 1,
        after_visit: Callable[[int, Sequence[Sequence[int]]], None] | None = None,
    ) -> float:
        """Simulate one forward pass of the model, and return its seconds.

        Args:
            phase: whether it reads a prompt or decodes.
            visits: each MoE layer, and the experts of each token there, `[num_tokens][top_k]`.
            work: what computing takes.
            forecasts: asked in each layer once its gate has chosen, unless the next one's experts are fetched in order.
            stream: whether a long prompt fetches the next layer's experts ahead.
            num_sequences: tokens of the next pass.
            after_visit: called with each visit when it is over.
        """
        self.recorder.begin_pass(phase, len(visits[0][1]), num_sequences)
        start_s = self.now_s
        for layer_idx, tokens in visits:
            num_used = len({expert_idx for token in tokens for expert_idx in token})
            layer_s, expert_s = work(layer_idx, len(tokens), num_used)
            stream_next = stream and uses_most(len(tokens), num_used, self.config.num_experts[layer_idx])
            asked = None if stream_next else forecasts
            self.visit(layer_idx, tokens, layer_s, expert_s, asked, stream_next, num_sequences)
            if after_visit is not None:
                after_visit(layer_idx, tokens)
        seconds = self.now_s - start_s
        self.recorder.end_pass(seconds)
        return seconds

    def visit(
        self,
        layer_idx: int,
        tokens: Sequence[Sequence[int]],
        layer_s: float,
        expert_s: float,
        forecasts: Forecasts | None = None,
        stream_next: bool = False,
        num_sequences: int = 1,
    ) -> None:
        """Simulate one MoE layer of a pass, and what lies before its gate.

        Args:
            layer_idx: the layer.
            tokens: experts of each token `[num_tokens][top_k]`.
            layer_s: seconds of computing up to the gate.
            expert_s: seconds of computing one of its experts.
            forecasts: asked once the gate has chosen.
            stream_next: whether the next layer's experts are fetched in order: a long prompt will use nearly all of them.
            num_sequences: tokens of the layer's next visit.
        """
        scheduler, ids = self.scheduler, tokens[0] if len(tokens) == 1 else most_needed_first(tokens)
        self._compute(layer_s)
        hits = scheduler.hint(layer_idx, ids)
        if stream_next and layer_idx + 1 < self.config.num_layers:
            scheduler.stream(2, layer_idx + 1)
        self._send()
        stall_s, waited_for, waiting, start_s = 0.0, 0, False, 0.0
        visit = scheduler.begin_visit(layer_idx, ids, tokens, num_sequences)
        visit.admit()
        if forecasts is not None:
            for steps_ahead, target_idx, probabilities in forecasts(layer_idx):
                scheduler.forecast(steps_ahead, target_idx, probabilities)
        self._send()
        while not visit.finished:
            group = visit.ready()
            if group:
                waited_for += len(group) if waiting else 0
                self._compute(len(group) * expert_s + (self._group_s if waiting else start_s))
                waiting, start_s = False, self._group_s
                visit.release(group)
                visit.admit()
                if len(self._in_flight) < IN_FLIGHT:
                    self._send()
            else:
                waiting = True
                stall_s += self._wait()
        visit.close()
        self.recorder.visit(layer_idx, ids, hits, len(ids) - waited_for, stall_s)

    def _wait(self) -> float:
        """Wait until the next expert is complete, and return the seconds."""
        waited_s, completed = 0.0, False
        in_flight = self._in_flight
        while not completed:
            while len(in_flight) > IN_FLIGHT and in_flight[0][1] is None:
                in_flight.popleft()  # frees no place and completes nothing: only what comes after it is waited for
            arrival_s = in_flight[0][0]
            waited_s += arrival_s - self.now_s
            completed = self._advance(arrival_s)
        return waited_s

    def _compute(self, work_s: float) -> None:
        """Compute for so many seconds of work, while chunks arrive and others are sent."""
        while self._in_flight:
            end_s, arrival_s = self.now_s + self._slowdown * work_s, self._in_flight[0][0]
            if arrival_s > end_s:
                self.now_s = end_s
                return
            work_s -= (arrival_s - self.now_s) / self._slowdown
            self._advance(arrival_s)
        self.now_s += max(work_s, 0.0)

    def _send(self) -> None:
        scheduler, in_flight, reserve = self.scheduler, self._in_flight, self._wire.reserve
        while len(in_flight) < IN_FLIGHT and scheduler.has_orders:
            lease = scheduler.next_transfer(IN_FLIGHT - len(in_flight))
            if lease is None:
                return
            # The wire starts each chunk when the last but one has arrived, so those that follow can be put down at once.
            last_idx = lease.chunk_idx + lease.num_chunks - 1
            chunk_bytes = self.config.chunk_bytes[lease.key.layer_idx]
            for nbytes in chunk_bytes[lease.chunk_idx : last_idx]:
                in_flight.append((reserve(self.now_s, nbytes), None))
            in_flight.append((reserve(self.now_s, chunk_bytes[last_idx]), lease))

    def _advance(self, until_s: float) -> bool:
        """Let everything arrive that does until then, and return whether some expert is complete."""
        in_flight, completed = self._in_flight, False
        while in_flight and in_flight[0][0] <= until_s:
            self.now_s, lease = in_flight.popleft()
            if lease is not None:
                completed |= self.scheduler.chunk_done(lease)
            if len(in_flight) < IN_FLIGHT:
                self._send()
        self.now_s = until_s
        return completed
