"""What a plan found, and its JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from promoe.commands.plan.choice import Choice
from promoe.commands.plan.fits import Room
from promoe.commands.plan.sizes import ModelSizes
from promoe.commands.plan.time_model import Prediction
from promoe.commands.plan.times import ComputeTimes, LinkSpeed
from promoe.commands.plan.verification import Verified
from promoe.files import PathLike, write_atomically
from promoe.transfer.cpu_contention import Taken


@dataclass(frozen=True)
class Result:
    """A whole plan.

    Args:
        sizes: of the model.
        room: fast memory.
        context: tokens that the KV cache is for.
        compute: measured; None: it could not be.
        packed_compute_s: of a token with every expert in memory, were they packed; None: they are, or nothing is gained by it.
        links: measured, by how files are read.
        predictions: for cache rates that fit, ascending.
        choice: among them; None without speeds.
        verified: those that were run.
        taken: by others of the cores, while speeds were measured; None: unknown.
    """

    sizes: ModelSizes
    room: Room
    context: int
    compute: ComputeTimes | None = None
    packed_compute_s: float | None = None
    links: Mapping[Any, LinkSpeed] = dataclasses.field(default_factory=dict)
    predictions: Sequence[Prediction] = ()
    choice: Choice | None = None
    verified: Sequence[Verified] = ()
    taken: Taken | None = None


def as_json(result: Result) -> dict[str, Any]:
    """Numbers, in bytes and seconds; what does not exist is null."""
    sizes, room, choice = result.sizes, result.room, result.choice
    found = {
        "model": {
            "name": sizes.name,
            "model_type": sizes.model_type,
            "dtype": sizes.dtype,
            "found_in": sizes.found_in,
            "layers": len(sizes.layers),
            "experts": sizes.num_experts,
            "expert_bytes": [layer.layout.payload_bytes for layer in sizes.layers],
            "routed_bytes": sizes.expert_bytes,
            "stored_bytes": sizes.stored_bytes,
            "other_bytes": sizes.other_bytes,
            "context": result.context,
            "kv_bytes": sizes.kv.nbytes(result.context),
            "kv_assumed": sizes.kv.assumed,
        },
        "room": {**dataclasses.asdict(room), "reserve_bytes": room.reserve_bytes, "slots_bytes": room.slots_bytes},
        "compute": None if result.compute is None else dataclasses.asdict(result.compute),
        "packed_compute_s": result.packed_compute_s,
        "links": {mode: dataclasses.asdict(link) for mode, link in result.links.items()},
        "predictions": [dataclasses.asdict(one) for one in result.predictions],
        "choice": None if choice is None else dataclasses.asdict(choice),
        "verified": [dataclasses.asdict(one) for one in result.verified],
        "cores_taken": None if result.taken is None else dataclasses.asdict(result.taken),
    }
    numbers: dict[str, Any] = _without_nan(found)
    return numbers


def write_result(result: Result, path: PathLike) -> None:
    """Write it. Raises ConfigError where that cannot be done."""
    write_atomically(path, [json.dumps(as_json(result), indent=2, allow_nan=False), "\n"])


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
