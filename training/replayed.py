"""Which experts a cache would have held: a demand-only replay of a trace through the runtime's own scheduler."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm

from promoe.scheduler import PoolSpec, SchedulerConfig
from promoe.scheduler.config import EvictionName
from promoe.scheduler.replay import Replay
from promoe.training.routing_traces import RoutingTrace


def residency(trace: RoutingTrace, policy: EvictionName, cache_rate: float) -> npt.NDArray[np.bool_]:
    """Whether each expert was in a slot when its layer's gate had chosen, `[num_tokens, num_layers, num_experts]`.

    One global pool, empty at first; a layer's experts are one event; nothing is prefetched.
    """
    num_slots = max(1, round(cache_rate * trace.num_layers * trace.num_experts))
    config = SchedulerConfig(
        num_experts=[trace.num_experts] * trace.num_layers,
        chunk_bytes=[(1,)] * trace.num_layers,
        pools=[PoolSpec(num_slots, tuple(range(trace.num_layers)))],
        eviction=policy,
    )
    replay = Replay(config)
    held = np.zeros((trace.num_tokens, trace.num_layers, trace.num_experts), dtype=np.bool_)
    visits = tqdm(
        trace.visits(),
        total=trace.num_tokens * trace.num_layers,
        desc=f"replay {policy} {cache_rate:.1%}",
        unit="visit",
        disable=None,
        leave=False,
    )
    for token_idx, layer_idx, ids in visits:
        held[token_idx, layer_idx] = replay.residency(layer_idx)
        replay.visit(layer_idx, [ids])
    return held
