"""Generate docs/support.md, the table of families, from the tiny models that the tests serve.

python tests/zoo/support.py > docs/support.md
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from gguf_converters import CONVERTERS
from packed_weights import FORMS
from stores.encodings.ranges import ranges
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from promoe.experts.adapters import Adapter
from promoe.experts.adapters.stacked import is_decorated
from promoe.experts.moe_layers import find_moe_layers
from promoe.stores.encodings.base import EncodedTensor
from promoe.stores.encodings.refused import REFUSED
from promoe.stores.encodings.schemes import find_weights
from zoo.families import build, family_of, names

PLAIN_FORMS = (
    "| fp8 | a scale for each block (like DeepSeek-V3) | decoded |",
    "| mxfp8 | an exponent for each 32 values | decoded |",
    "| mxfp4 | like gpt-oss | decoded |",
)
HEAD = """# Supported families

All Mixture-of-Experts families of Transformers work, except the two that the last table names. A family gets a row
here as soon as the installed Transformers has it, and every row is tested (`tests/zoo`). The test serves a tiny
random model of the family from a few slots, and compares it with the unmodified model, bit by bit:

- for a prompt and the next token, in fp32 and bf16, with each of its kernels;
- from a checkpoint as the hub has it, with the experts left in the files;
- and after unpatching, which must leave no trace.

Unless the note says otherwise, you can choose {implementations} as the kernel, and promoe can ask the gates of later
layers early (`predictor="gate"`). *Checkpoint* is the layout of the files: one tensor per expert and projection ("per
expert"), or as the model holds them ("stacked"), with the conversion that Transformers applies to each expert.
*Whole* is a model for images or sound with the family's language model inside.

| family | tested as | checkpoint | note |
|---|---|---|---|
"""
GGUF = """
## GGUF files

`promoe.from_pretrained` opens GGUF files of these architectures (`general.architecture`). Configuration and names come
from the file's metadata; what a file does not say is as in llama.cpp. A tensor or key that a table does not know is
refused by name, because the model may compute something else with it. Tests write tiny models as llama.cpp's converter
does, serve them, and compare every weight, the configuration, logits and tokens with the original. Where
llama-cpp-python is installed, they compare logits with llama.cpp, too.

| architecture | model | note |
|---|---|---|
"""
GGUF_NOTES = {
    "deepseek2": "also R1, Kimi-K2, GLM-4.7-Flash and others of this form; files without expert groups (before October "
    "2025) choose among all experts, as in llama.cpp",
    "gemma4": "with experts, for text",
    "glm4moe": "the layer that predicts a second token is not used",
    "gpt-oss": "the borders of yarn are not rounded, as published; llama.cpp rounds them",
    "hunyuan-moe": "the rotation for long texts is in the file's base frequency",
    "llama": "with experts; tensors of single experts (2023), too",
    "qwen2moe": "weights of the chosen experts add up to one only if the file says `expert_weights_norm`",
    "qwen35moe": "the layer that predicts a second token is not used",
    "qwen3vlmoe": "its language model, for text",
}
TAIL = """
## Quantised checkpoints

`promoe.from_pretrained` opens checkpoints in these forms. A weight is decoded to fp32 and rounded once to the model's
dtype. With `experts="checkpoint"`, the output is that of the model whose weights are decoded when it is loaded, bit by
bit. Each form is tested so with a tiny model that has all its linear layers in it, and every family above with a tensor
per expert in W4A16 of compressed-tensors. What Transformers dequantises itself (`dequantize=True`) is equal to its
weights.

*In slots* says what happens to experts by default: codes that a slot format can hold stay in fewer bits in memory, and
all others are decoded when they arrive.

| `quant_method` | form | in slots |
|---|---|---|
{forms}

Activations are never quantised, whatever a checkpoint says of them. Where its config.json says that codes are symmetric
(`sym`, `symmetric`, `zero_point`), the code in the middle means zero: a stored zero that is the same everywhere is not used,
as by kernels for symmetric codes, and stored zeros that differ are an error.

If Transformers loads a model with FP8 kernels (`FP8Experts`, which need a GPU), `promoe.patch` serves it with
`eager`. Tests cover this with torch's arithmetic in place of those kernels.

## Refused with an error

| what | what to do |
|---|---|
| other versions of AWQ than "gemm", of GPTQ than "gptq" and "gptq_v2"; 3 bits; packed for Marlin | open another checkpoint |
| weights in fewer bits whose scales, zeros or `g_idx` are missing or do not fit | compare the files with the original ones |
| NVFP4, sparse and rotated weights in compressed-tensors | open another checkpoint |
| `experts="int4"` for a family with a kernel of its own (notes above) | leave `experts` out |
| `quantization_config` (torchao, bitsandbytes) for the other weights | leave it out: they stay as they are |
| experts quantised in memory as swizzled MXFP4, megamoe or torchao | use `promoe.from_pretrained`, or dequantise |
| experts split over processes (expert parallelism, `tp_plan`, DTensor) | load the model in one process |
| accelerate's hooks on experts (`device_map`, `cpu_offload`) | load the model without them, or remove them |
| other kernels (`deepgemm`, `sonicmoe`) | `model.set_experts_implementation("grouped_mm")` |
| a checkpoint with code of its own (`trust_remote_code`) | load it with Transformers, then `promoe.patch` |
| `VitPoseBackbone`: a data set's number chooses its experts, not a gate | use the model as it is |
| `doge`: its experts are rows of an embedding | use the model as it is |

These quantised checkpoints are refused, too:

| `quant_method` | what the error says |
|---|---|
{refused}
"""


def support() -> str:
    """Return the page as Markdown."""
    rows = [_row(name) for name in sorted(names())]
    return (
        HEAD.format(implementations=", ".join(f"`{name}`" for name in Adapter.implementations))
        + "\n".join(rows)
        + "\n"
        + GGUF
        + "\n".join(_gguf_rows())
        + "\n"
        + TAIL.format(
            forms="\n".join([*PLAIN_FORMS, *(f"| {' | '.join(cells)} |" for cells in _forms())]),
            refused="\n".join(f"| {', '.join(methods)} | {sentence} |" for sentence, methods in _refused().items()),
        )
    )


def _forms() -> list[tuple[str, str, str]]:
    """Return the cells of each form in `packed_weights`: its method, its name, and what its experts are in slots."""
    cells = []
    for name, form in FORMS.items():
        weight = find_weights(ranges(form.make(64, 64, torch.Generator().manual_seed(0))), form.config)["layer.weight"]
        integers = weight.encoding.integers if isinstance(weight, EncodedTensor) else None
        cells.append((form.config["quant_method"], name, f"int{integers.bits}" if integers else "decoded"))
    return cells


def _refused() -> dict[str, list[str]]:
    """Return the methods that are refused, by what the error says of them."""
    by_sentence: dict[str, list[str]] = {}
    for method, sentence in REFUSED.items():
        by_sentence.setdefault(sentence, []).append(method)
    return by_sentence


def _row(name: str) -> str:
    model, family = build(name, torch.float32), family_of(name)
    layer = find_moe_layers(model)[0]
    notes = [family.note] if family.note else []
    if not family.forecasts:
        notes.insert(0, "no early gates")
    if not is_decorated(layer.experts):
        notes.insert(0, "the family's own kernel")
    cells = [name, f"`{type(model).__name__}`", checkpoint_form(model), "; ".join(notes)]
    return f"| {' | '.join(cells)} |"


def _gguf_rows() -> list[str]:
    """Return a row for each architecture of GGUF files that tests write."""
    models: dict[str, set[str]] = {}
    for converter in CONVERTERS.values():
        models.setdefault(converter.architecture, set()).add(f"`{converter.model_type}`")
    return [
        f"| {name} | {', '.join(sorted(found))} | {GGUF_NOTES.get(name, '')} |"
        for name, found in sorted(models.items())
    ]


def checkpoint_form(model: PreTrainedModel) -> str:
    """Return how files hold the first tensor of a layer's experts, judged by the conversions that saving would undo."""
    layer = find_moe_layers(model)[0]
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
