"""Helpers for the cases worked by hand: a driven scheduler of two small layers, and short calls on it."""

from __future__ import annotations

import numpy as np

from promoe.scheduler import Lease, PoolSpec, SchedulerConfig

from .driven import Driven


def config(
    num_slots: int = 4,
    num_layers: int = 2,
    num_experts: int = 8,
    num_chunks: int = 2,
    pools: list[PoolSpec] | None = None,
    **switches: object,
) -> SchedulerConfig:
    fields: dict[str, object] = {"calibrate": False, "strict": True, **switches}
    return SchedulerConfig(
        num_experts=[num_experts] * num_layers,
        chunk_bytes=[(10,) * num_chunks] * num_layers,
        pools=pools or [PoolSpec(num_slots, tuple(range(num_layers)))],
        **fields,  # type: ignore[arg-type]
    )


def driven(**fields: object) -> Driven:
    return Driven(config(**fields))  # type: ignore[arg-type]


def certain(*ids: int, num_experts: int = 8) -> np.ndarray:
    p = np.zeros(num_experts)
    p[list(ids)] = 1.0
    return p


def names(leases: list[Lease]) -> list[tuple[int, int, int]]:
    """(layer, expert, chunk) of each lease."""
    return [(*lease.key, lease.chunk_idx) for lease in leases]


def fetch(run: Driven, *keys: tuple[int, int]) -> None:
    """Make experts resident by visiting each of them."""
    for layer_idx, expert_idx in keys:
        opened = run.begin(layer_idx, [expert_idx])
        run.admit(opened)
        while not opened.visit.ready():
            for lease in run.issue():
                run.complete(lease)
        run.run_group(opened)
        run.close(opened)


def finish(run: Driven, leases: list[Lease]) -> None:
    for lease in leases:
        run.complete(lease)
