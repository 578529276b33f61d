"""Klotski's table on a recorded trace: whether the K experts that it expects take part, and are the hot ones.

    python benchmarks/hot_experts.py --trace TRACE [--groups 1 8 64 512] [--warm-up 0.2] [--json FILE]

Prints a row for each number of sequences at once, of that many prompts' tokens at the same place: the share of the K most
expected experts (K: top-k) that some token of the group uses, and of the K most used ones that are among them. The table
learns the first part of the prompts, and goes on learning. Beside it: a table of paths through two layers, the K experts used
most so far, and any K experts.
Takes a minute.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from common import make_parser
from torch import nn

from promoe.predictors import Forecast, LayerVisit, PredictorContext
from promoe.predictors.base import any_token
from promoe.predictors.correlation import CorrelationPredictor
from promoe.predictors.history import PopularityPredictor
from promoe.predictors.reference import RandomPredictor
from promoe.training.evaluate import open_trace
from promoe.training.routing_traces import RoutingTrace
from promoe.units import aligned, format_percent


class PathPredictor:
    """The table with path length 2: what tokens used after a pair of experts of the two layers before."""

    def __init__(self, context: PredictorContext, lookahead: int) -> None:
        count, top_k = context.num_experts[0], context.top_k[0]
        # As many made-up uses as the pairs of one token, so that rare pairs say little.
        self._uses = np.full((context.num_layers, count, count, count), top_k / count, dtype=np.float32)
        self._tokens = np.ones((context.num_layers, count, count), dtype=np.float32)
        self._before: list[list[list[int]]] = []

    def predict(self, visit: LayerVisit) -> list[Forecast]:
        """Learn from this layer and the two before, and forecast the next one."""
        chosen = [list(token) for token in visit.chosen]
        if visit.layer_idx == 0:
            self._before = []
        if len(self._before) == 2:
            for one, two, used in zip(*self._before, chosen, strict=True):
                self._uses[visit.layer_idx][np.ix_(one, two, used)] += 1
                self._tokens[visit.layer_idx][np.ix_(one, two)] += 1
        self._before = [*self._before[-1:], chosen]
        after, count = visit.layer_idx + 1, self._uses.shape[-1]
        if len(self._before) < 2 or after == len(self._uses):
            return [Forecast(1, after, np.zeros(count))]
        per_token = []
        for one, two in zip(*self._before, strict=True):
            pairs = np.ix_(one, two)
            per_token.append((self._uses[after][pairs] / self._tokens[after][pairs][..., None]).mean(axis=(0, 1)))
        return [Forecast(1, after, any_token(np.minimum(1.0, np.array(per_token, dtype=np.float64))))]


KINDS = {
    "table": CorrelationPredictor,
    "path of 2": PathPredictor,
    "popularity": PopularityPredictor,
    "any": RandomPredictor,
}
MOST_PASSES = 400  # of a group that are measured


def passes(trace: RoutingTrace, prompts: Sequence[int], group: int) -> Iterator[np.ndarray]:
    """Yield the experts `[num_tokens, num_layers, top_k]` of steps in which each sequence of a group has one token."""
    starts, lengths = trace.prompt_starts, trace.prompt_lengths
    for first in range(0, len(prompts) - group + 1, group):
        some = prompts[first : first + group]
        for place in range(min(int(lengths[prompt]) for prompt in some)):
            yield trace.experts[[int(starts[prompt]) + place for prompt in some]]


def measured(make: Callable[..., object], trace: RoutingTrace, warm_up: float, group: int) -> tuple[float, float]:
    """Return the shares of expected experts that take part, and of hot ones that were expected."""
    count, top_k = trace.num_experts, trace.top_k
    context = PredictorContext(
        [nn.Identity()] * trace.num_layers, [count] * trace.num_layers, [top_k] * trace.num_layers
    )
    predictor = make(context, 1)
    order = np.random.default_rng(0).permutation(len(trace.prompt_lengths)).tolist()
    learned = int(warm_up * len(order))
    number = took_part = hit = total = 0
    for prompts, counted in ((order[:learned], False), (order[learned:], True)):
        for experts in passes(trace, prompts, group if counted else 1):
            number += 1
            expected: list[int] = []
            for layer_idx in range(trace.num_layers):
                chosen = experts[:, layer_idx].tolist()
                if counted and layer_idx:
                    used = np.bincount(experts[:, layer_idx].ravel(), minlength=count)
                    hottest = np.argsort(-used, kind="stable")[:top_k]
                    took_part += int((used[expected] > 0).sum())
                    hit += len(set(hottest.tolist()) & set(expected))
                    total += top_k
                visit = LayerVisit(number, "decode", layer_idx, torch.empty(len(chosen), 0), chosen)
                forecasts = [one for one in predictor.predict(visit) if one.steps_ahead == 1]
                expected = np.argsort(-forecasts[0].probabilities, kind="stable")[:top_k].tolist()
            if counted and total >= MOST_PASSES * top_k * (trace.num_layers - 1):
                return took_part / total, hit / total
    return took_part / max(1, total), hit / max(1, total)


def main(arguments: Sequence[str]) -> None:
    parser = make_parser(__doc__, __file__)
    parser.add_argument("--trace", required=True, help="recorded routing: an .npz, or a folder of promoe-train collect")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 8, 64], help="sequences at once (default: 1 8 64)")
    parser.add_argument("--warm-up", type=float, default=0.2, help="share of the prompts that are learned first")
    options = parser.parse_args(arguments)
    trace = open_trace(options.trace)
    table = [["at once", *(f"{kind}: {what}" for kind in KINDS for what in ("take part, %", "hot, %"))]]
    rows = []
    for group in options.groups:
        found = {kind: measured(make, trace, options.warm_up, group) for kind, make in KINDS.items()}
        rows.append({"group": group, **found})
        table.append([str(group), *(format_percent(share) for pair in found.values() for share in pair)])
    print("\n".join(aligned(table)))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"arguments": list(arguments), "rows": rows}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
