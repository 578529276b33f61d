"""gpt-oss in MXFP4 in memory: its weights are in an order that only its kernel knows."""

from __future__ import annotations

from torch import nn

from .base import Adapter


class Mxfp4Adapter(Adapter):
    """The adapter of `Mxfp4GptOssExperts`, which cannot be served."""

    def problem(self, experts: nn.Module) -> str:
        """Return why the module cannot be served: the bytes of one expert cannot be separated from the others."""
        return (
            "it keeps them in MXFP4, swizzled for its kernel, so that one expert's bytes cannot be moved separately. Open "
            "the checkpoint with promoe.from_pretrained, which moves experts in MXFP4 from the files, or load "
            "it with quantization_config=Mxfp4Config(dequantize=True)"
        )
