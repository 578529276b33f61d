"""Open a checkpoint in fewer bits so that its experts stay in fewer bits in slots, where a kernel multiplies them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from promoe.experts.kernels.formats import matrices
from promoe.experts.kernels.relaying import Relay, kept_format, relay_of
from promoe.experts.moe_layers import MoELayer
from promoe.stores.encodings.base import Integers
from promoe.stores.file_store import FileStore
from promoe.stores.layer_plan import LayerPlan, decoded_rows, relaid
from promoe.stores.layout import ExpertLayout


def relaid_store(layers: Sequence[MoELayer], store: FileStore, *, to_int8: bool = False) -> FileStore:
    """Return a store of the same experts, which shares its files with `store`; or `store`, if nothing can stay as it is.

    Args:
        layers: the model's MoE layers.
        store: the checkpoint.
        to_int8: quantise those of its matrices in fewer bits whose codes cannot be kept to 8 bits.
    """
    plans = [_relaid(layer, plan, to_int8) for layer, plan in zip(layers, store.layers, strict=True)]
    return store if plans == list(store.layers) else store.replanned(plans)


def kept_layout(layer: MoELayer, integers: Mapping[str, Integers | None]) -> ExpertLayout:
    """Return how a layer's experts lie in slots if a checkpoint has its matrices as integers.

    Args:
        layer: the layer.
        integers: the integers by the name of the matrix; None, or no entry: it is not in integers.
    """
    formats = {
        spec.name: kept_format(spec, transposed, integers.get(spec.name)) for spec, transposed in matrices(layer)
    }
    return layer.layout.in_formats({name: kept for name, kept in formats.items() if kept is not None})


def _relaid(layer: MoELayer, plan: LayerPlan, to_int8: bool) -> LayerPlan:
    found: dict[str, Relay] = {}
    for spec, transposed in matrices(layer):
        rows = decoded_rows(plan, spec)
        relay = None if rows is None else relay_of(spec, transposed, rows, to_int8)
        if relay is not None:
            found[spec.name] = relay
    if not found:
        return plan
    layout = layer.layout.in_formats({name: relay.format for name, relay in found.items()})
    return relaid(plan, layout, found)
