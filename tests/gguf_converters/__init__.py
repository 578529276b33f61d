"""What llama.cpp's converter makes of each family's configuration and weights, written down family by family.

Independent of promoe's tables, which read such files: names come from the `gguf` package, and what is written follows
`convert_hf_to_gguf.py`.
"""

from __future__ import annotations

from .base import Converter
from .deepseek import DeepSeek, OldDeepSeek
from .llama import Granite, Mixtral, OldMixtral, Olmoe
from .others import Glm4Moe, GptOss, MiniMaxM2
from .qwen import Qwen2Moe, Qwen3Moe

# By name: a `model_type` of Transformers, and "old" where files of earlier years differ.
CONVERTERS: dict[str, Converter] = {
    "deepseek_v2": DeepSeek("deepseek_v2"),
    "deepseek_v2 old": OldDeepSeek("deepseek_v2"),
    "deepseek_v3": DeepSeek("deepseek_v3"),
    "glm4_moe": Glm4Moe("glm4_moe"),
    "gpt_oss": GptOss("gpt_oss"),
    "granitemoe": Granite("granitemoe"),
    "granitemoeshared": Granite("granitemoeshared"),
    "minimax_m2": MiniMaxM2("minimax_m2"),
    "mixtral": Mixtral("mixtral"),
    "mixtral old": OldMixtral("mixtral"),
    "olmoe": Olmoe("olmoe"),
    "qwen2_moe": Qwen2Moe("qwen2_moe"),
    "qwen3_moe": Qwen3Moe("qwen3_moe"),
}
