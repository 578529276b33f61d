"""Whole answers through the simulator, one after the other with the cache as the one before left it.

What is told is measured: a layer's seconds, an expert's, what a group costs, the link. Predictions are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, Protocol

from promoe.commands.simulate.simulator import Simulator
from promoe.config import MAX_PREDICTED_TOKENS, STREAMED_SHARE
from promoe.scheduler import SchedulerConfig
from promoe.transfer.link_timetable import Wire
from promoe.units import ratio


class Pass(Protocol):
    """One forward pass and what its gates chose; see `promoe.stats.routing.RoutedPass`."""

    @property
    def phase(self) -> Literal["prefill", "decode"]:
        """A prompt, or one token."""
        ...

    @property
    def visits(self) -> list[tuple[int, list[list[int]]]]:
        """(MoE layer, experts of each token `[num_tokens][top_k]`), in the order of execution."""
        ...


Work = Callable[[int, int, int], tuple[float, float]]
"""`(layer_idx, num_tokens, experts used) -> (seconds before the experts, seconds of each of them)`."""


@dataclass(frozen=True)
class Answers:
    """What came of them: medians over the answers after the first, which fills the slots.

    Args:
        ttft_s: of a prompt's pass; nan without prompts.
        tpot_s: mean seconds per decoded token.
        hit_rate: experts of decoded tokens that were in a slot when the gate had chosen.
        stall_s: waiting for experts, per decoded token.
        bytes_per_token: moved into slots.
    """

    ttft_s: float
    tpot_s: float
    hit_rate: float
    stall_s: float
    bytes_per_token: float


def simulate_answers(
    config: SchedulerConfig,
    answers: Sequence[Sequence[Pass]],
    wire: Wire,
    work: Work,
    slowdown: float = 1.0,
    group_s: float = 0.0,
    stream: bool = True,
) -> Answers:
    """Simulate answers, the first of which only fills the slots (unless it is the only one).

    Args:
        config: of the scheduler.
        answers: the passes of each.
        wire: the link.
        work: what computing takes.
        slowdown: see `Simulator`.
        group_s: see `Simulator`.
        stream: whether long prompts fetch the next layer's experts ahead, as `PromoeConfig.stream` says.
    """
    simulator = Simulator(config, wire, slowdown=slowdown, group_s=group_s)
    first: list[float] = []
    decoded: list[float] = []
    for number, passes in enumerate(answers):
        if number == 1:
            simulator.recorder.reset()
        steps: list[float] = []
        for one in passes:
            tokens = len(one.visits[0][1])
            simulator.recorder.begin_pass(one.phase, tokens, 1)
            start_s = simulator.now_s
            for layer_idx, chosen in one.visits:
                used = len({idx for token in chosen for idx in token})
                layer_s, expert_s = work(layer_idx, len(chosen), used)
                long = len(chosen) > MAX_PREDICTED_TOKENS and used >= STREAMED_SHARE * config.num_experts[layer_idx]
                simulator.visit(layer_idx, chosen, layer_s, expert_s, stream_next=stream and long)
            duration_s = simulator.now_s - start_s
            simulator.recorder.end_pass(duration_s)
            (steps if one.phase == "decode" else first).append(duration_s)
        decoded.append(ratio(sum(steps), len(steps)))
    measured = decoded[1:] or decoded
    stats = simulator.recorder.phase_stats("decode")
    return Answers(
        ttft_s=median(first[1:] or first) if first else float("nan"),
        tpot_s=median(measured),
        hit_rate=ratio(stats.hits, stats.needed),
        stall_s=ratio(stats.stall_s, stats.passes),
        bytes_per_token=ratio(stats.bytes_demand + stats.bytes_prefetched, stats.passes),
    )
