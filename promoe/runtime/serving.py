"""The last step of `patch` and `from_pretrained`: attach the planned parts to the model, or change nothing."""

from __future__ import annotations

from promoe.model.placement import Placed, place
from promoe.runtime.assembly import Parts, assemble
from promoe.runtime.checking import Checked
from promoe.runtime.finding import Found
from promoe.runtime.resident import ResidentHandle
from promoe.runtime.slot_plan import SlotPlan


def serve(found: Found, plan: SlotPlan, checked: Checked) -> None:
    """Give the model its handle and, if its experts need slots, the parts that serve them.

    Raises:
        PromoeError: as for `patch` and `from_pretrained`. The model was not changed.
    """
    model, layers, device = found.model, found.layers, checked.device
    if not plan.pools:
        found.keep_all()
        placed = Placed() if device is None else place(model, layers, device, with_experts=True)
        model.promoe = ResidentHandle(type(model).__name__, layers, checked.config, found.home, placed)  # type: ignore[assignment]
        return
    freed_bytes = found.freed_bytes
    with found.serving(checked.config, on_device=device is not None) as served:
        parts = Parts(
            layers, served.store, plan.pools, checked.config, plan.predictor, plan.predictor_name, device, freed_bytes
        )
        assemble(model, parts, checked.asked.link, served.restore)
