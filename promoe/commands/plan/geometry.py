"""A checkpoint's sizes as the simulator wants them: `promoe simulate --model FOLDER`."""

from __future__ import annotations

import torch

from promoe.commands.plan.reading import ReadModel, read_model
from promoe.commands.simulate.machine import Geometry
from promoe.errors import ConfigError
from promoe.model.placement import other_tensors
from promoe.stores.layout import ExpertLayout


def read_geometry(path_or_id: str) -> Geometry:
    """From the headers of a checkpoint's files, or from its config.json alone. Reads no weights.

    Args:
        path_or_id: folder of a checkpoint, or a hub id.

    Raises:
        PromoeError: there is neither, it is not of a model that promoe can serve, or its layers are not of one size.
    """
    read = read_model(path_or_id)
    if read.store is not None:
        read.store.close()
    sizes = {(layer.num_experts, layer.top_k, layer.layout, layer.stored_bytes) for layer in read.sizes.layers}
    if len(sizes) > 1:
        raise ConfigError(
            f"The MoE layers of {path_or_id} are not all of one size, which the simulator takes them to be. Give --model a "
            "preset that comes near, or leave it out."
        )
    ((num_experts, top_k, layout, stored_bytes),) = sizes
    parameters = _parameters(layout)
    return Geometry(
        name=path_or_id,
        num_layers=len(read.layers),
        num_experts=num_experts,
        top_k=top_k,
        expert_parameters=parameters,
        other_parameters=_read_by_every_token(read),
        bits_per_weight=8 * stored_bytes / parameters,
    )


def _parameters(layout: ExpertLayout) -> float:
    return float(sum(torch.Size(spec.shape).numel() for spec in layout.tensors))


def _read_by_every_token(read: ReadModel) -> float:
    """Parameters of all but the routed experts, and but the table of which a token reads one row."""
    count = sum(tensor.numel() for tensor in other_tensors(read.model, read.layers))
    table, head = read.model.get_input_embeddings().weight, read.model.get_output_embeddings()
    return float(count if head is not None and head.weight is table else count - table.numel())
