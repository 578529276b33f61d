"""The name of an expert."""

from __future__ import annotations

from typing import NamedTuple


class ExpertKey(NamedTuple):
    """One routed expert. `layer_idx` counts the model's MoE layers in model order, 0..L-1; `expert_idx` its experts."""

    layer_idx: int
    expert_idx: int
