"""Ways to quantise a checkpoint that cannot be read: why, and what to open instead."""

from __future__ import annotations

_QUANTIZE = "Open the original checkpoint in 16 bits, and write its experts in fewer bits with `promoe quantize`."
_OWN_CODE = f"Only its own library decodes it. {_QUANTIZE}"
_CODEBOOKS = f"Its codes stand for vectors of a codebook. {_QUANTIZE}"
_ROTATED = f"Its weights are rotated, and need activations that are rotated, too. {_QUANTIZE}"
_EXLLAMA = "Only ExLlama decodes it. Open a GPTQ or AWQ checkpoint of the model, of which there often is one."
_NVFP4 = (
    "NVFP4 is not implemented. Open a checkpoint of the model in FP8, MXFP4 or W4A16, or the original one in 16 bits."
)

# By quant_method.
REFUSED: dict[str, str] = {
    "bitsandbytes": f"It was made from the original checkpoint without calibration, as `promoe quantize` does. {_QUANTIZE}",
    "hqq": "Open the original checkpoint in 16 bits: `promoe quantize MODEL --method hqq` quantises experts in this way.",
    "nvfp4": _NVFP4,
    "modelopt": _NVFP4,
    "modelopt_fp4": _NVFP4,
    "fouroversix": _NVFP4,
    "exl2": _EXLLAMA,
    "exl3": _EXLLAMA,
    "mlx": "Only MLX decodes it. Open the checkpoint that it was made from, which its model card names.",
    "torchao": _OWN_CODE,
    "quanto": _OWN_CODE,
    "eetq": _OWN_CODE,
    "quark": _OWN_CODE,
    "metal": _OWN_CODE,
    "sinq": _OWN_CODE,
    "gemma": _OWN_CODE,
    "fbgemm_fp8": "Open a checkpoint of the model in FP8 of compressed-tensors, or the original one in 16 bits.",
    "aqlm": _CODEBOOKS,
    "vptq": _CODEBOOKS,
    "higgs": _CODEBOOKS,
    "spqr": f"Its outliers lie apart from its codes. {_QUANTIZE}",
    "quip": _ROTATED,
    "fp_quant": _ROTATED,
    "bitnet": f"Its weights have three values, and its activations are quantised, too. {_QUANTIZE}",
}


def refusal(quant_method: str) -> str:
    """Return what a message says of a checkpoint that is quantised in another way."""
    return REFUSED.get(quant_method, _QUANTIZE)
