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

from promoe.experts.adapters import Adapter
from promoe.experts.adapters.stacked import is_decorated
from promoe.experts.moe_layers import MoELayer, find_moe_layers
from zoo.families import build, family_of, names

HEAD = """# Supported families

Every Mixture-of-Experts family of Transformers but two, which the last table names. Nobody keeps the list: whatever has a
class of routed experts in the installed package gets a row, and a row has been checked. For each, a tiny random model with
the family's own configuration is served from a few slots and compared with itself unpatched, bit by bit (`tests/zoo`):

- a prompt and a token after it, in fp32 and bf16, with every kernel that its experts have;
- the gate announces exactly the experts that are then used, and unpatching leaves no trace;
- a checkpoint in the layout that hub checkpoints have opens with its experts left in the files; the model answers and
  generates as the one that Transformers' `from_pretrained` gives, with its weights at multiples of 64 bytes.

*Kernels*: "all" are {implementations}, whichever the model is set to; "own" is the family's own loop.
*Foresight*: later gates can be asked early what they will choose (`predictor="gate"`). *Checkpoint*: "per expert" is one
tensor per expert and projection, "stacked" is as the model holds them. Both are read in place; where a conversion of
Transformers is named, it puts experts side by side, or is applied to each when it arrives. "whole" is a model that takes
images or sounds, with the family's language model inside.

| family | tested as | experts | gate | kernels | foresight | checkpoint | note |
|---|---|---|---|---|---|---|---|
"""
TAIL = """
## Quantised checkpoints

FP8 with scales per block (as DeepSeek-V3 on the hub) and MXFP4 (as gpt-oss): `promoe.from_pretrained` leaves the experts
quantised in the files and moves them so; each is dequantised by Transformers' own code when it arrives, to the dtype that
the model has. The model is the one that Transformers gives with `dequantize=True`. Bytes in reports are those in slots.

## FP8 in memory

Models that Transformers loads with FP8 kernels (`FP8Experts`, which need a GPU) are served with their weights and scales as
they are, FP4 and static scales too, when set to `eager`, which computes one expert at a time. Tested: what is moved, and
that the loop sees it, with the kernels' arithmetic replaced by torch's. Not tested: those kernels themselves.

## Refused, with an error that says why

| what | instead |
|---|---|
| checkpoints quantised otherwise (AWQ, GPTQ, bitsandbytes, compressed-tensors, ...) | open one in FP8, MXFP4 or unquantised |
| experts quantised in memory otherwise: swizzled MXFP4, megamoe, torchao | `promoe.from_pretrained`; or dequantise |
| experts split over processes: expert parallelism, `tp_plan`, DTensor | load the model in one process |
| accelerate's hooks (`device_map`, `cpu_offload`, ...) on experts | load the model without; or remove the hooks |
| other experts kernels (`deepgemm`, `sonicmoe`, ...) | `model.set_experts_implementation("grouped_mm")` |
| checkpoints with code of their own (`trust_remote_code`) | load it with Transformers and patch it |
| `VitPoseBackbone`: its experts are chosen by a data set's number, not by a gate | use the model as it is |
| `doge`: its experts are rows of an embedding | use the model as it is |
"""


def support() -> str:
    """The whole document."""
    rows = [_row(name) for name in sorted(names())]
    return (
        HEAD.format(implementations=", ".join(f"`{name}`" for name in Adapter.implementations))
        + "\n".join(rows)
        + "\n"
        + TAIL
    )


def _row(name: str) -> str:
    model, family = build(name, torch.float32), family_of(name)
    layer = find_moe_layers(model)[0]
    cells = [
        name,
        f"`{type(model).__name__}`",
        f"`{type(layer.experts).__name__}`",
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
