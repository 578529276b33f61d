"""What `promoe plan` assumes of routing without a trace, beside real routing: hits of a cache, and how often tokens agree.

    python benchmarks/planned_routing.py TRACE ... [--rates 12.5 25 50] [--answers 12] [--habits 0.5,2 ...]

Each trace, and routing made up by each habit for a model of its sizes: prompts of 32 tokens, 64 tokens decoded after
each, one cache for all, the default's policy and LRU. The habits are those of `promoe.commands.plan.routing`, or
`popularity,recency` as given.
"""

from __future__ import annotations

import argparse
import itertools
from statistics import mean

import torch

from promoe.commands.plan.routing import OFTEN, SELDOM, Answers, Habit, from_trace, made_up
from promoe.commands.plan.sizes import ExpertsOfLayer, KvCache, ModelSizes, cache_argument
from promoe.scheduler import SchedulerConfig
from promoe.scheduler.config import EvictionName
from promoe.scheduler.replay import Replay
from promoe.stores.layout import ExpertLayout
from promoe.training.evaluate_command import open_trace
from promoe.training.routing_traces import RoutingTrace
from promoe.units import aligned, format_percent

PROMPT_TOKENS, NEW_TOKENS = 32, 64


def sizes_of(trace: RoutingTrace) -> ModelSizes:
    """As many experts, of a byte each."""
    layout = ExpertLayout.of({"weight": ((1,), torch.uint8)})
    layer = ExpertsOfLayer(trace.num_experts, trace.top_k, layout, 1, (1,))
    return ModelSizes("trace", "", "", (layer,) * trace.num_layers, 0, KvCache((), ""), "")


def hits(sizes: ModelSizes, answers: Answers, rate: float, policy: EvictionName) -> float:
    """Share of the experts of decoded tokens that were in a slot."""
    config = SchedulerConfig(
        num_experts=[layer.num_experts for layer in sizes.layers],
        chunk_bytes=[(1,) for _ in sizes.layers],
        pools=[plan.spec for plan in sizes.pools(cache_argument(rate))],
        eviction=policy,
        prefetch=False,
    )
    replay, missed, needed = Replay(config), 0, 0
    for number, passes in enumerate(answers):
        for one in passes:
            found = sum(replay.visit(layer_idx, tokens) for layer_idx, tokens in one.visits)
            if number and one.phase == "decode":
                missed, needed = missed + found, needed + sum(len(tokens[0]) for _, tokens in one.visits)
    return 1 - missed / needed


def agreement(answers: Answers) -> float:
    """Share of a token's experts that the token before used too."""
    shares = []
    for passes in answers:
        decoded = [[set(tokens[0]) for _, tokens in one.visits] for one in passes if one.phase == "decode"]
        for before, after in itertools.pairwise(decoded):
            shares += [len(a & b) / len(b) for a, b in zip(before, after, strict=True)]
    return mean(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--rates", type=float, nargs="+", default=[12.5, 25, 50])
    parser.add_argument("--answers", type=int, default=12)
    parser.add_argument("--habits", nargs="*", default=[])
    options = parser.parse_args()
    given = [Habit(text, text, *map(float, text.split(","))) for text in options.habits]
    for path in options.traces:
        trace = open_trace(path)
        sizes = sizes_of(trace)
        found = {path: from_trace(trace, sizes, path, PROMPT_TOKENS, NEW_TOKENS, options.answers).answers}
        for habit in given or (SELDOM, OFTEN):
            found[habit.name] = made_up(sizes, habit, PROMPT_TOKENS, NEW_TOKENS, options.answers).answers
        columns = [(rate, policy) for rate in options.rates for policy in ("next_use", "lru")]
        rows = [["hits, %", "as before", *(f"{policy} {rate:g}%" for rate, policy in columns)]]
        for name, answers in found.items():
            shares = [hits(sizes, answers, rate / 100, policy) for rate, policy in columns]  # type: ignore[arg-type]
            rows.append([name, format_percent(agreement(answers)), *map(format_percent, shares)])
        print("\n".join(aligned(rows)), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
