"""Made-up sizes, times and links for plans."""

from __future__ import annotations

import torch

from promoe.commands.plan.routing import Habit, made_up
from promoe.commands.plan.sizes import CacheLayer, ExpertsOfLayer, KvCache, ModelSizes
from promoe.commands.plan.time_model import ComputeTimes, Curve, LinkSpeed, TimeModel
from promoe.stores.layout import ExpertLayout

MIB = 2**20
HABIT = Habit("drawn", "nothing", 0.5, 2.0)


def sizes(layers: int = 2, experts: int = 8, top_k: int = 2, expert_mib: int = 4, other_mib: int = 16) -> ModelSizes:
    """A model whose experts are one matrix each, bf16, moved in two chunks."""
    layout = ExpertLayout.of({"weight": ((expert_mib * MIB // 2 // 1024, 1024), torch.bfloat16)})
    half = layout.payload_bytes // 2
    layer = ExpertsOfLayer(experts, top_k, layout, layout.payload_bytes, (half, half))
    kv = KvCache((CacheLayer("full attention", 0, 1024, None, "2 heads x (128 + 128)"),) * layers, "one sequence")
    return ModelSizes("model", "made_up", "bfloat16", (layer,) * layers, other_mib * MIB, kv, "nothing")


def times(layer_s: float = 0.002, expert_s: float = 0.001, group_s: float = 0.0) -> ComputeTimes:
    """Of a token; 64 of them, or 64 rows, take ten times as long."""
    return ComputeTimes(
        Curve(((1, layer_s), (64, 10 * layer_s))),
        Curve(((1, expert_s), (64, 10 * expert_s))),
        4 * MIB,
        group_s,
        "made up",
    )


def link(megabytes_per_s: float = 1000.0, slowdown: float = 1.0, convert_s: float = 0.0) -> LinkSpeed:
    """As fast beside computing as alone."""
    return LinkSpeed("O_DIRECT", megabytes_per_s * 1e6, megabytes_per_s * 1e6, slowdown, convert_s, "made up")


def time_model(
    of: ModelSizes | None = None, over: LinkSpeed | None = None, compute: ComputeTimes | None = None
) -> TimeModel:
    """With one kind of routing."""
    model = of or sizes()
    found = over or link()
    return TimeModel(model, compute or times(), lambda rate: found, [made_up(model, HABIT, 16, 12)])
