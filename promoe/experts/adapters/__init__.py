"""Adapters: how the model families of Transformers store and call their experts. No other code names a family.

`adapter_for(module)` returns a module's adapter. Some families have an adapter of their own; all others follow one
contract (`stacked`).
"""

from __future__ import annotations

from torch import nn

from .base import Adapter, ExpertTensor, Run
from .dbrx import DbrxAdapter
from .expert_modules import ExpertModulesAdapter
from .finegrained_fp8 import FineGrainedFp8Adapter
from .jamba import JambaAdapter
from .jetmoe import JetMoeAdapter
from .llama4 import Llama4Adapter
from .longcat_flash import LongcatFlashAdapter
from .mxfp4 import Mxfp4Adapter
from .stacked import StackedAdapter
from .switch_transformers import SwitchTransformersAdapter

__all__ = ["Adapter", "ExpertTensor", "Run", "adapter_for"]

# Families with their own adapter, by the name of the experts' class.
_BY_CLASS: dict[str, Adapter] = {
    "DbrxExperts": DbrxAdapter(),
    "FP8Experts": FineGrainedFp8Adapter(),
    "JambaExperts": JambaAdapter(),
    "JetMoeParallelExperts": JetMoeAdapter(),
    "Llama4TextExperts": Llama4Adapter(),
    "LongcatFlashExperts": LongcatFlashAdapter(),
    "Mxfp4GptOssExperts": Mxfp4Adapter(),
    # NLLB-MoE passes a mask `[T, E]` of zeros and ones as ids, so it computes with its experts 0 and 1 only.
    # Transformers computes it like that, and the output has to be identical.
    "NllbMoeExperts": ExpertModulesAdapter(),
    "SwitchTransformersExperts": SwitchTransformersAdapter(),
}
_STACKED = StackedAdapter()


def adapter_for(module: nn.Module) -> Adapter:
    """Return the adapter of `module`. Its `problem` says whether the module can be served."""
    return _BY_CLASS.get(type(module).__name__, _STACKED)
