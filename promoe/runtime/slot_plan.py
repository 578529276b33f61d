"""The third step of `patch` and `from_pretrained`: plan the slots, and make the predictor."""

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
    """The slots and the predictor that a model will get."""

    pools: Sequence[PoolPlan]
    """Empty: the model's experts need no slots."""
    predictor: Predictor | None
    predictor_name: str | None


def plan_slots(found: Found, checked: Checked) -> SlotPlan:
    """Plan the slots of a model, and make its predictor. The model is not changed.

    Raises:
        ConfigError: the size of the cache does not work for this model, or the predictor belongs to another model.
    """
    free = free_bytes(found.model, found.layers, checked.device)
    if free is not None and checked.device is None:
        free += found.freed_bytes
    pools = plan_pools(checked.asked.cache, found.layouts, found.num_experts, free, found.hot)
    predictor, name = resolve_predictor(
        checked.asked.predictor, found.layers, checked.config, model_type_of(found.model)
    )
    all_fit = sum(plan.spec.num_slots for plan in pools) == sum(found.num_experts)
    return SlotPlan(() if found.need_no_slots(checked, all_fit) else pools, predictor, name)
