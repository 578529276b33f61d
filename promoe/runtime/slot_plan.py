"""The third step of both front doors: how many slots there will be, and who predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from promoe.experts.moe_layers import model_type_of
from promoe.model.placement import free_bytes
from promoe.predictors import Predictor
from promoe.runtime.assembly import resolve_predictor
from promoe.runtime.checking import Checked
from promoe.runtime.finding import Found
from promoe.runtime.sizes import PoolPlan, plan_pools


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """What is to be put under a model."""

    pools: Sequence[PoolPlan]
    """Empty: its experts need no slots."""
    predictor: Predictor | None
    predictor_name: str | None


def plan_slots(found: Found, checked: Checked) -> SlotPlan:
    """Plan the slots of a model, and make its predictor. Changes nothing of the model.

    Raises:
        ConfigError: the cache does not fit, or the predictor is none for this model.
    """
    free = free_bytes(found.model, found.layers, checked.device)
    if free is not None and checked.device is None:
        free += found.freed_bytes
    pools = plan_pools(checked.asked.cache, found.layouts, found.num_experts, free)
    predictor, name = resolve_predictor(
        checked.asked.predictor, found.layers, checked.config, model_type_of(found.model)
    )
    all_fit = sum(plan.spec.num_slots for plan in pools) == sum(found.num_experts)
    return SlotPlan(() if found.need_no_slots(checked, all_fit) else pools, predictor, name)
