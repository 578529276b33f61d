"""gpt-oss in MXFP4 in memory: when its weights are there, they lie in an order that only its kernel knows."""

from __future__ import annotations

from torch import nn

from .base import Adapter


class Mxfp4Adapter(Adapter):
    """`Mxfp4GptOssExperts`: never served."""

    def problem(self, experts: nn.Module) -> str:
        """Its bytes cannot be told apart by expert."""
        return (
            "it keeps them in MXFP4, swizzled for its kernel, so that one expert's bytes cannot be moved by themselves. Open "
            "the checkpoint with promoe.from_pretrained, which leaves them in MXFP4 in the files and moves them so, or load "
            "it with quantization_config=Mxfp4Config(dequantize=True)"
        )
