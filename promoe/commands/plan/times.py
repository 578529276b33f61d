"""What was measured of a machine with a model's layers: time against rows, links. Numbers only."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Curve:
    """Seconds measured at some numbers of rows; between them on a line, beyond the last on the last line.

    Args:
        points: `(rows, seconds)` by ascending rows, at least one.
    """

    points: tuple[tuple[float, float], ...]

    def __call__(self, rows: float) -> float:
        """Seconds for so many rows; never less than for the fewest that were measured."""
        counts, seconds = zip(*self.points, strict=True)
        if len(counts) > 1 and rows > counts[-1]:
            slope = max(0.0, (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2]))
            return float(seconds[-1] + slope * (rows - counts[-1]))
        return float(np.interp(rows, counts, seconds))

    def quicker(self, other: Curve) -> Curve:
        """Of two curves the shorter time at each point of this one."""
        return Curve(tuple((rows, min(seconds, other(rows))) for rows, seconds in self.points))


@dataclass(frozen=True)
class ComputeTimes:
    """What a pass takes where nothing has to be fetched.

    Args:
        layer: tokens of a pass -> seconds of everything but routed experts, for each MoE layer.
        expert: rows of an expert -> its seconds.
        expert_bytes: of the expert that was measured.
        group_s: what it costs to run experts that arrive during a visit by themselves, however few they are.
        how: how this was measured, in words.
    """

    layer: Curve
    expert: Curve
    expert_bytes: int
    group_s: float
    how: str

    def quicker(self, other: ComputeTimes) -> ComputeTimes:
        """Of two measurements the shorter times: what else runs on a machine only ever adds to them."""
        return replace(
            self,
            layer=self.layer.quicker(other.layer),
            expert=self.expert.quicker(other.expert),
            group_s=min(self.group_s, other.group_s),
        )


@dataclass(frozen=True)
class LinkSpeed:
    """What experts come over.

    Args:
        name: "O_DIRECT", "page cache" or "pinned RAM".
        alone_bytes_per_s: while nothing computes.
        bytes_per_s: while the model computes.
        slowdown: times as long that computing takes meanwhile, at least 1.
        convert_s: to dequantise one expert when it has come, beside the reads; 0: as it is stored.
        how: what was read, in words.
    """

    name: str
    alone_bytes_per_s: float
    bytes_per_s: float
    slowdown: float
    convert_s: float
    how: str
