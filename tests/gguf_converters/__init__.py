"""What llama.cpp's converter makes of each family's configuration and weights, written down family by family.

Independent of promoe's tables, which read such files: names come from the `gguf` package, and what is written follows
`convert_hf_to_gguf.py`.
"""

from __future__ import annotations

from .base import Converter
from .deepseek import DeepSeek, FusedDeepSeek, OldDeepSeek
from .gemma import Gemma4
from .granite import Granite, GraniteHybrid
from .llama import Mixtral, OldMixtral, Olmoe
from .nemotron import NemotronH
from .others import Glm4Moe, GptOss, MiniMaxM2
from .qwen import Qwen2Moe, Qwen3Moe, Qwen3VlMoe
from .qwen_linear import FirstQwen3Next, Qwen3Next, Qwen35Moe
from .smaller import Dots1, Ernie45Moe, HunyuanMoe, Lfm2Moe

# By name: a `model_type` of Transformers, and "old" where files of earlier years differ.
CONVERTERS: dict[str, Converter] = {
    "deepseek_v2": DeepSeek("deepseek_v2"),
    "deepseek_v2 old": OldDeepSeek("deepseek_v2"),
    "deepseek_v3": DeepSeek("deepseek_v3"),
    "deepseek_v3 fused": FusedDeepSeek("deepseek_v3"),
    "dots1": Dots1("dots1"),
    "ernie4_5_moe": Ernie45Moe("ernie4_5_moe"),
    "gemma4": Gemma4("gemma4_text"),
    "glm4_moe": Glm4Moe("glm4_moe"),
    "gpt_oss": GptOss("gpt_oss"),
    "granitemoe": Granite("granitemoe"),
    "granitemoehybrid": GraniteHybrid("granitemoehybrid"),
    "granitemoeshared": Granite("granitemoeshared"),
    "hunyuan_v1_moe": HunyuanMoe("hunyuan_v1_moe"),
    "lfm2_moe": Lfm2Moe("lfm2_moe"),
    "minimax_m2": MiniMaxM2("minimax_m2"),
    "mixtral": Mixtral("mixtral"),
    "mixtral old": OldMixtral("mixtral"),
    "nemotron_h": NemotronH("nemotron_h"),
    "olmoe": Olmoe("olmoe"),
    "qwen2_moe": Qwen2Moe("qwen2_moe"),
    "qwen3_moe": Qwen3Moe("qwen3_moe"),
    "qwen3_moe vision": Qwen3VlMoe("qwen3_moe"),
    "qwen3_next": Qwen3Next("qwen3_next"),
    "qwen3_next first": FirstQwen3Next("qwen3_next"),
    "qwen3_5_moe": Qwen35Moe("qwen3_5_moe_text"),
}
