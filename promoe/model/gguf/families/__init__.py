"""The MoE architectures of GGUF files: what llama.cpp calls each, and how it becomes a model of Transformers.

A GGUF file has no config.json, and its tensors have other names than the model's parameters. A `Family` turns the file's
metadata into the fields of a configuration, and gives the conversions from the file's tensors to the parameters. What
a file does not say follows llama.cpp, which all of them are written for. What the model of Transformers cannot do, and
tensors or keys that nobody asked for, are refused.
"""

from __future__ import annotations

from .base import Family
from .deepseek import DEEPSEEK2
from .dots import DOTS1
from .ernie import ERNIE4_5_MOE
from .gemma import GEMMA4
from .glm import GLM4_MOE
from .gpt_oss import GPT_OSS
from .granite import GRANITE_HYBRID, GRANITE_MOE
from .hunyuan import HUNYUAN_MOE
from .lfm2 import LFM2_MOE
from .llama import MIXTRAL, OLMOE
from .minimax import MINIMAX_M2
from .nemotron import NEMOTRON_H_MOE
from .qwen import QWEN2_MOE, QWEN3_MOE
from .qwen_linear import QWEN3_NEXT, QWEN35_MOE

__all__ = ["FAMILIES", "Family"]

# By `general.architecture`.
FAMILIES: dict[str, Family] = {
    "deepseek2": DEEPSEEK2,
    "dots1": DOTS1,
    "ernie4_5-moe": ERNIE4_5_MOE,
    "gemma4": GEMMA4,
    "glm4moe": GLM4_MOE,
    "gpt-oss": GPT_OSS,
    "granitehybrid": GRANITE_HYBRID,
    "granitemoe": GRANITE_MOE,
    "hunyuan-moe": HUNYUAN_MOE,
    "lfm2moe": LFM2_MOE,
    "llama": MIXTRAL,
    "minimax-m2": MINIMAX_M2,
    "nemotron_h_moe": NEMOTRON_H_MOE,
    "olmoe": OLMOE,
    "qwen2moe": QWEN2_MOE,
    "qwen35moe": QWEN35_MOE,
    "qwen3moe": QWEN3_MOE,
    "qwen3next": QWEN3_NEXT,
    "qwen3vlmoe": QWEN3_MOE,
}
