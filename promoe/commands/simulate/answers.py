"""Simulates whole answers, one after the other, with the cache as the one before left it.

The inputs are measured: a layer's seconds, an expert's, what a group costs, the link. Predictions are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from promoe.commands.simulate.simulator import Simulator, Work
from promoe.scheduler import SchedulerConfig
from promoe.stats.routing import RoutedPass
from promoe.transfer.link_timetable import Wire
from promoe.units import ratio


@dataclass(frozen=True)
class AnswerTimes:
    """What the answers took: medians over those after the first, which fills the slots.

    Args:
        ttft_s: seconds of a prompt's pass; nan without prompts.
        tpot_s: mean seconds per decoded token.
        hit_rate: share of the experts of decoded tokens that were in a slot when the gate had chosen.
        stall_s: seconds of waiting for experts, per decoded token.
        bytes_per_token: bytes moved into slots.
    """

    ttft_s: float
    tpot_s: float
    hit_rate: float
    stall_s: float
    bytes_per_token: float


def simulate_answers(
    config: SchedulerConfig,
    answers: Sequence[Sequence[RoutedPass]],
    wire: Wire,
    work: Work,
    slowdown: float = 1.0,
    group_s: float = 0.0,
    stream: bool = True,
) -> AnswerTimes:
    """Simulate answers, the first of which only fills the slots (unless it is the only one).

    Args:
        config: the scheduler's.
        answers: the passes of each.
        wire: the link.
        work: what computing takes.
        slowdown: see `Simulator`.
        group_s: see `Simulator`.
        stream: whether long prompts fetch the next layer's experts ahead, as `Ablation.stream` says.
    """
    simulator = Simulator(config, wire, slowdown=slowdown, group_s=group_s)
    prompts_s: list[float] = []
    tokens_s: list[float] = []
    for number, passes in enumerate(answers):
        if number == 1:
            simulator.recorder.reset()
        steps_s: list[float] = []
        for one in passes:
            seconds = simulator.run_pass(one.phase, one.visits, work, stream=stream)
            (steps_s if one.phase == "decode" else prompts_s).append(seconds)
        tokens_s.append(ratio(sum(steps_s), len(steps_s)))
    stats = simulator.recorder.phase_stats("decode")
    return AnswerTimes(
        ttft_s=median(prompts_s[1:] or prompts_s) if prompts_s else float("nan"),
        tpot_s=median(tokens_s[1:] or tokens_s),
        hit_rate=stats.hit_rate,
        stall_s=stats.stall_per_pass_s,
        bytes_per_token=ratio(stats.bytes_total, stats.passes),
    )
