"""Ways to quantise a checkpoint that cannot be read: why, and what to open instead."""

from __future__ import annotations

_QUANTIZE = "Open the original checkpoint in 16 bits, and write its experts in fewer bits with `promoe quantize`."
_OWN_CODE = f"Only its own library can decode it. {_QUANTIZE}"
_CODEBOOKS = f"Its codes stand for vectors of a codebook. {_QUANTIZE}"
_ROTATED = f"Its weights are rotated, and need activations that are rotated, too. {_QUANTIZE}"
_NVFP4 = (
    "Its weights have scales of scales, with which Transformers 5.23 itself computes something else. Open a checkpoint of the "
    "model in FP8 or MXFP4, or the original one in 16 bits."
)

# By quant_method. "none" is that of a quantization_config without one.
REFUSED: dict[str, str] = {
    "bitsandbytes": f"It was made from the original checkpoint without calibration, as `promoe quantize` does. {_QUANTIZE}",
    "hqq": "`promoe quantize --method hqq` makes the same from the original checkpoint in 16 bits: open that.",
    "nvfp4": _NVFP4,
    "modelopt": _NVFP4,
    "modelopt_fp4": _NVFP4,
    "fouroversix": _NVFP4,
    "exl2": "Only ExLlama can decode it. Open a GPTQ or AWQ checkpoint of the model, of which there often is one.",
    "exl3": "Only ExLlama can decode it. Open a GPTQ or AWQ checkpoint of the model, of which there often is one.",
    "mlx": "Only MLX can decode it. Open the checkpoint that it was made from, which its model card names.",
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
