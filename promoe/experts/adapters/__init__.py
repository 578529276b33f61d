"""How the families of Transformers keep and call their experts. One file per way; nothing else names a family.

`adapter_for(module)` says which way a module is: first the families that have one of their own, then the contract that
all others follow (`stacked`).
"""

from __future__ import annotations

from torch import nn

from .base import Adapter, ExpertTensor, Run
from .dbrx import DbrxAdapter
from .finegrained_fp8 import FineGrainedFp8Adapter
from .jamba import JambaAdapter
from .jetmoe import JetMoeAdapter
from .llama4 import Llama4Adapter
from .longcat_flash import LongcatFlashAdapter
from .mxfp4 import Mxfp4Adapter
from .nllb_moe import NllbMoeAdapter
from .stacked import StackedAdapter
from .switch_transformers import SwitchTransformersAdapter

__all__ = ["Adapter", "ExpertTensor", "Run", "adapter_for"]

# Where a family has a way of its own, its class says so; no other module is ever taken for one of them.
_BY_CLASS: dict[str, Adapter] = {
    "DbrxExperts": DbrxAdapter(),
    "FP8Experts": FineGrainedFp8Adapter(),
    "JambaExperts": JambaAdapter(),
    "JetMoeParallelExperts": JetMoeAdapter(),
    "Llama4TextExperts": Llama4Adapter(),
    "LongcatFlashExperts": LongcatFlashAdapter(),
    "Mxfp4GptOssExperts": Mxfp4Adapter(),
    "NllbMoeExperts": NllbMoeAdapter(),
    "SwitchTransformersExperts": SwitchTransformersAdapter(),
}
_STACKED = StackedAdapter()


def adapter_for(module: nn.Module) -> Adapter:
    """What says how `module` is to be served, if it can be (`Adapter.problem`)."""
    return _BY_CLASS.get(type(module).__name__, _STACKED)
