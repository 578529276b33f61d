"""Measures what computing and fetching lose to each other in promoe itself.

Some blocks of the model are served from its files for a few tokens, and the simulator's two numbers for that (a slowdown of
computing, and the link's speed) are fitted to the time that it takes.

Reading at full speed beside a model that computes (`promoe.commands.contention`) says less: what was just read may still be in
the processor's caches when it is needed, and the engine's threads sleep while there is nothing to fetch.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from promoe.commands.plan.stand_in import EXPERTS_BYTES, StandIn, token_ids
from promoe.commands.plan.time_model import ComputeTimes, LinkSpeed
from promoe.commands.simulate.answers import simulate_answers
from promoe.config import PromoeConfig
from promoe.runtime.assembly import Parts, assemble, scheduler_config
from promoe.runtime.patching import unpatch
from promoe.runtime.sizes import plan_pools
from promoe.stats.routing import RoutedPass, RoutingRecorder
from promoe.stores.file_store import FileStore
from promoe.transfer.link_timetable import Wire
from promoe.transfer.links.probe import ProbeMode

# A small cache, so that most experts have to be fetched.
CACHE_SHARE = 1 / 8
WARM_UP, MOST_PASSES, FEWEST_PASSES, SECONDS = 8, 32, 6, 4.0
# The most by which the link's speed may differ from what was measured alone.
MOST_FACTOR = 3.0
ROUNDS = 16


def fit_overlap(
    stand_in: StandIn, store: FileStore, mode: ProbeMode, compute: ComputeTimes, link: LinkSpeed
) -> LinkSpeed:
    """Return the link with the slowdown with which the simulator takes as long as a real run, and if need be another speed.

    Args:
        stand_in: its blocks are served; it can only be served again afterwards.
        store: the model's files.
        mode: how they are read.
        compute: the times of these blocks.
        link: measured.
    """
    stand_in.close()
    config = PromoeConfig(read_mode=mode, bypass=False)
    layers = stand_in.layers
    layouts, counts = store.layouts[: len(layers)], [layer.num_experts for layer in layers]
    most = max(layer.top_k or 1 for layer in layers) + 1
    nbytes = sum(layout.slot_bytes * count for layout, count in zip(layouts, counts, strict=True))
    least = most * len(set(layouts)) * nbytes // sum(counts)
    plans = plan_pools(int(max(least, min(EXPERTS_BYTES, CACHE_SHARE * nbytes))), layouts, counts)
    parts = Parts(layers, _borrowed(store), plans, config, None, None)
    assemble(stand_in.model, parts, "file", restore=lambda: None)
    try:
        warm, tokens, token_s = _run(stand_in.model, layers)
    finally:
        unpatch(stand_in.model)
    scale = [layout.payload_bytes / compute.expert_bytes for layout in layouts]

    def work(layer_idx: int, num_tokens: int, num_used: int) -> tuple[float, float]:
        return stand_in.layer_s, scale[layer_idx] * compute.expert(1)

    settings = scheduler_config(parts)

    def simulated_s(bytes_per_s: float, slowdown: float) -> float:
        wire = Wire(bytes_per_s, 0.0)
        return simulate_answers(settings, [warm, *tokens], wire, work, slowdown, compute.group_s).tpot_s

    return fitted(link, token_s, simulated_s)


def fitted(link: LinkSpeed, token_s: float, simulated_s: Callable[[float, float], float]) -> LinkSpeed:
    """Return the link with which the simulator gives a measured time, as far as anything sensible does.

    Computing is slowed down by no more than what reading at full speed beside it does; what is left is the link's, whose speed
    was measured with requests always waiting.

    Args:
        link: measured.
        token_s: measured seconds per token.
        simulated_s: `(bytes per second, slowdown) -> seconds per token`.
    """
    speed, most = link.bytes_per_s, link.slowdown
    if simulated_s(speed, 1.0) < token_s < simulated_s(speed, most):
        return replace(link, slowdown=_bisect(1.0, most, lambda value: simulated_s(speed, value) < token_s))
    slowdown = 1.0 if simulated_s(speed, 1.0) >= token_s else most
    factor = _bisect(1 / MOST_FACTOR, MOST_FACTOR, lambda value: simulated_s(value * speed, slowdown) > token_s)
    return replace(link, slowdown=slowdown, bytes_per_s=factor * speed)


def _borrowed(store: FileStore) -> FileStore:
    """Return the same store, whose files stay open when the model is unpatched: they are the lender's."""
    borrowed = copy.copy(store)
    object.__setattr__(borrowed, "close", lambda: None)
    return borrowed


def _bisect(low: float, high: float, too_low: Callable[[float], bool]) -> float:
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if too_low(middle) else (low, middle)
    return low


def _run(model: Any, layers: Sequence[Any]) -> tuple[list[RoutedPass], list[list[RoutedPass]], float]:
    """Return the routing of the tokens that fill the slots and of each of the others, and the median seconds of the others."""
    cache, seconds = None, []
    started_s = time.perf_counter()
    with RoutingRecorder(model, layers) as recorder, torch.inference_mode():
        for ids in token_ids(model, MOST_PASSES)[0].split(1):
            start_s = time.perf_counter()
            cache = model(input_ids=ids[None], past_key_values=cache, use_cache=True).past_key_values
            seconds.append(time.perf_counter() - start_s)
            if len(seconds) >= FEWEST_PASSES and time.perf_counter() - started_s > SECONDS:
                break
        passes = recorder.take()
    warm = min(WARM_UP, len(seconds) // 2)
    return passes[:warm], [[one] for one in passes[warm:]], median(seconds[warm:])
