"""docs/support.md: what is served, family by family, from the tiny models themselves.

python tests/zoo/support.py > docs/support.md
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from promoe.adapters.stacked import is_decorated
from promoe.moe_layers import IMPLEMENTATIONS, MoELayer, find_moe_layers
from zoo.families import build, family_of, names

HEAD = """# Supported families

Every Mixture-of-Experts family of Transformers, found by reading the installed package: whatever has a class of routed
experts has a row here. For each, a tiny random model with the family's own configuration is served from three slots and
compared bit by bit with itself unpatched (`tests/zoo`): a prompt and a token after it, in fp32 and bf16, with every
kernel its experts have; the gate announces exactly what the experts then use; unpatching leaves no trace; and a
checkpoint saved in the layout that hub checkpoints have opens with its experts left in the files and answers and
generates as the model that Transformers' `from_pretrained` gives. Versions: Transformers 5.17 and later.

- **kernels**: `all` are {implementations}, whichever the model is set to; `own` is the loop of the family itself.
- **foresight**: whether later gates can be asked early what they will choose (`predictor="gate"`).
- **checkpoint**: `per expert`: one tensor per expert and projection; `stacked`: as the model holds them; either is read in place.

| family | tested as | experts | an expert's tensors | gate | kernels | foresight | checkpoint | |
|---|---|---|---|---|---|---|---|---|
"""
TAIL = """
## Refused, with an error that says why

| what | instead |
|---|---|
| experts split over processes (`enable_expert_parallel`, `tp_plan`), DTensor | load the model in one process |
| tensor subclasses (torchao and the like), experts in 8 or 4 bits once loaded (FP8, MXFP4, bitsandbytes) | load it in bf16, fp16 or fp32 |
| accelerate's `device_map` hooks on experts | load it without `device_map` |
| other experts kernels (`deepgemm`, `sonicmoe`, ...) | `model.set_experts_implementation("grouped_mm")` |
| `VitPoseBackbone`: its experts are parts chosen by a data set's number, not by a gate | use the model as it is |
| `doge`: its experts are rows of an embedding; no module of experts | use the model as it is |
| models with code of their own (`trust_remote_code`), unless they follow the contract of Transformers' experts | – |
"""


def support() -> str:
    """The whole document."""
    rows = [_row(name) for name in sorted(names())]
    return (
        HEAD.format(implementations=", ".join(f"`{name}`" for name in IMPLEMENTATIONS)) + "\n".join(rows) + "\n" + TAIL
    )


def _row(name: str) -> str:
    model, family = build(name, torch.float32), family_of(name)
    layer = find_moe_layers(model)[0]
    cells = [
        name,
        f"`{type(model).__name__}`",
        f"`{type(layer.experts).__name__}`",
        ", ".join(f"`{tensor.name}`" for tensor in layer.tensors),
        f"`{type(layer.gate).__name__}`",
        "all" if is_decorated(layer.experts) else "own",
        "yes" if family.forecasts else "no",
        _checkpoint(model, layer),
        family.note,
    ]
    return f"| {' | '.join(cells)} |"


def _checkpoint(model: PreTrainedModel, layer: MoELayer) -> str:
    """How the files have the first tensor of a layer's experts, by the conversions that saving would undo."""
    target = f"{layer.name}.{layer.paths[0]}"
    for conversion in get_model_conversion_mapping(model):
        if isinstance(conversion, WeightConverter) and any(
            pattern.replace("\\", "").strip(".$^") in target for pattern in conversion.target_patterns
        ):
            operations = {type(operation).__name__ for operation in conversion.operations}
            return "per expert" if "MergeModulelist" in operations else f"stacked, {'+'.join(sorted(operations))}"
    return "per expert" if len(layer.tensors[0].paths) > 1 else "stacked"


if __name__ == "__main__":
    print(support(), end="")
