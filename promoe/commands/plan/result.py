"""What a plan found, and its JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from promoe.commands.plan.choice import Choice
from promoe.commands.plan.many_prompts import BatchPlan
from promoe.commands.plan.show_batch import as_numbers
from promoe.commands.plan.sizes import ModelSizes, Room
from promoe.commands.plan.time_model import ComputeTimes, LinkSpeed, Prediction
from promoe.commands.plan.verification import Verified
from promoe.files import PathLike, write_atomically
from promoe.transfer.cpu_contention import Taken
from promoe.transfer.links.probe import ProbeMode


@dataclass
class Result:
    """What a plan has found so far.

    Args:
        sizes: of the model.
        room: fast memory.
        context: tokens that the KV cache is for.
        compute: measured; None: it could not be.
        packed_compute_s: seconds of a token with every expert in memory, were they packed; None: they are, or nothing is
            gained by it.
        fewer_bits: what quantised experts would give with the memory of the chosen cache; None: they are quantised, or all fit.
        links: measured, by how files are read.
        predictions: for cache rates that fit, ascending.
        choice: among them; None without speeds.
        verified: those that were run.
        batch: how a file of prompts is best answered, by form of the experts; empty: that was not asked.
        taken: what others took of the cores while speeds were measured; None: unknown.
    """

    sizes: ModelSizes
    room: Room
    context: int
    compute: ComputeTimes | None = None
    packed_compute_s: float | None = None
    fewer_bits: Prediction | None = None
    links: Mapping[ProbeMode, LinkSpeed] = field(default_factory=dict)
    predictions: Sequence[Prediction] = ()
    choice: Choice | None = None
    verified: Sequence[Verified] = ()
    batch: Mapping[str, BatchPlan] = field(default_factory=dict)
    taken: Taken | None = None

    def to_json(self) -> dict[str, Any]:
        """Return all numbers, in bytes and seconds; what does not exist is null."""
        sizes, room = self.sizes, self.room
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
                "context": self.context,
                "kv_bytes": sizes.kv.nbytes(self.context),
                "kv_assumed": sizes.kv.assumed,
            },
            "room": {**asdict(room), "reserve_bytes": room.reserve_bytes, "slots_bytes": room.slots_bytes},
            "compute": None if self.compute is None else asdict(self.compute),
            "packed_compute_s": self.packed_compute_s,
            "fewer_bits": None if self.fewer_bits is None else asdict(self.fewer_bits),
            "links": {mode: asdict(link) for mode, link in self.links.items()},
            "predictions": [asdict(one) for one in self.predictions],
            "choice": None if self.choice is None else asdict(self.choice),
            "verified": [asdict(one) for one in self.verified],
            "batch": as_numbers(self.batch),
            "cores_taken": None if self.taken is None else asdict(self.taken),
        }
        numbers: dict[str, Any] = _without_nan(found)
        return numbers

    def write(self, path: PathLike) -> None:
        """Write the JSON to a file.

        Raises:
            ConfigError: that cannot be done.
        """
        write_atomically(path, [json.dumps(self.to_json(), indent=2, allow_nan=False), "\n"])


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
