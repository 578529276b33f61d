"""compressed-tensors, as llm-compressor writes it (`quant_method` "compressed-tensors").

Linear layers are in one of several forms. Which one it is, and the size of groups, can be seen from the tensors:

* `X.weight_packed [out, in * bits / 32]`, int32: codes in words from their lowest bits on, plus 2^(bits - 1). Zeros,
  `X.weight_zero_point [out * bits / 32, groups]`, are words of outputs, or int8 `[out, groups]`. `X.weight_g_idx [in]`
  says each input's group, where it was quantised in the order of activations. Only the bits stand in config.json.
* `X.weight [out, in]`, int8, and zeros `[out, groups]`, int8.
* `X.weight [out, in]`, FP8, and `X.weight_packed [out, in / 2]`, two FP4 values in a byte: `promoe.stores.encodings.fp8`.

`X.weight_scale` has floats, or exponents in bytes, for each group `[out, groups]`, output `[out, 1]`, or block, or one for
all. The weight is `(code - zero) * scale`. Tensors that say how activations are quantised are left out: activations are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from promoe.errors import CheckpointError
from promoe.stores.encodings.base import EncodedTensor, Integers, StoredTensor
from promoe.stores.encodings.compressed_tensors_schemes import Scheme, of_module, schemes_of, unreadable
from promoe.stores.encodings.fp8 import fp8_of
from promoe.stores.encodings.packed_integers import (
    SCALE_DTYPES,
    PackedIntegers,
    as_integers,
    codes_in,
    named,
    other_order,
    parts_of_modules,
    replaced,
    wrong_parts,
)
from promoe.stores.safetensors_header import TensorRange

PACKED, WEIGHT, SCALE, ZEROS, ORDER = "weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_g_idx"
_OF_NVFP4, SHAPE = "weight_global_scale", "weight_shape"
# What else modules have: the shape, which the other tensors have too, and what is of activations.
_LEFT_OUT = (SHAPE, *(f"{what}_{name}" for what in ("input", "output") for name in ("scale", "zero_point")))
_EXPECTED = (
    "expected are weight_packed I32 or U8, or weight I8 or F8_E4M3, a weight_scale, and if the scheme is not symmetric a "
    "weight_zero_point (with actorder group: a weight_g_idx), of shapes that belong together, as config_groups in config.json "
    "say"
)


@dataclass(frozen=True)
class IntegerRows(PackedIntegers):
    """Rows of codes, in words or one in a byte.

    Attributes:
        bits: of a code.
        group: inputs that share a scale and a zero; None: all.
        is_packed: whether codes are in words, with a positive offset.
        has_zeros: whether the second part is followed by zeros.
        in_order: whether groups are inputs one after the other. If not, the last part says each input's group.
        is_symmetric: see `PackedIntegers`.
        name, integers: see `Encoding`.
    """

    bits: int
    group: int | None
    is_packed: bool
    has_zeros: bool
    in_order: bool
    is_symmetric: bool
    name: str
    integers: Integers | None

    @property
    def middle(self) -> int:
        """See `PackedIntegers.middle`."""
        return 1 << self.bits - 1 if self.is_packed else 0

    def num_outputs(self, parts: Sequence[torch.Tensor]) -> int:
        """See `PackedIntegers.num_outputs`."""
        return len(parts[0])

    def codes(self, parts: Sequence[torch.Tensor], outputs: slice) -> torch.Tensor:
        """See `PackedIntegers.codes`."""
        rows = parts[0][outputs]
        if not self.is_packed:
            return rows
        codes = codes_in(rows, self.bits)
        return codes if self.group is None else codes[:, : self.group * parts[1].shape[-1]]

    def scales(self, parts: Sequence[torch.Tensor], outputs: slice) -> torch.Tensor:
        """See `PackedIntegers.scales`."""
        return _of_outputs(parts[1], outputs)

    def zeros(self, parts: Sequence[torch.Tensor], outputs: slice) -> torch.Tensor | None:
        """See `PackedIntegers.zeros`."""
        if not self.has_zeros:
            return None
        if parts[2].dtype != torch.int32:
            return _of_outputs(parts[2], outputs) + self.middle
        words = parts[2][outputs.start * self.bits // 32 : -(-outputs.stop * self.bits // 32)]
        return codes_in(words.t().contiguous(), self.bits)[:, : outputs.stop - outputs.start].t().float()

    def group_of_input(self, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """See `PackedIntegers.group_of_input`."""
        if self.in_order or bool((parts[-1] == -1).any()):  # it was made, but never filled
            return None
        return other_order(parts[-1], num_groups=parts[1].shape[-1])


def _of_outputs(numbers: torch.Tensor, outputs: slice) -> torch.Tensor:
    """Return the numbers of some outputs, fp32 `[outputs, groups]`, of `[out, groups]`, `[out]`, or one for all."""
    if numbers.numel() == 1:
        return numbers.float().view(1, 1).expand(outputs.stop - outputs.start, 1)
    return numbers[outputs].float().view(outputs.stop - outputs.start, -1)


def find_compressed_tensors(
    tensors: Mapping[str, TensorRange], quantization: Mapping[str, Any]
) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint, with the parts of each weight as one, and without those of activations.

    Raises:
        CheckpointError: the format cannot be read, or a weight's tensors do not belong together.
    """
    schemes = schemes_of(quantization)
    modules = parts_of_modules(tensors, (PACKED, WEIGHT, SCALE, ZEROS, ORDER, _OF_NVFP4, *_LEFT_OUT))
    quantised = {module: parts for module, parts in modules.items() if set(parts) & {PACKED, SCALE, ZEROS, ORDER}}
    weights = []
    left_out: set[str] = set()
    for module, parts in quantised.items():
        if (shape := parts.get(SHAPE)) is not None and (shape.shape, shape.dtype_name) not in (
            ((2,), "I64"),
            ((2,), "I32"),
        ):
            raise wrong_parts(module, parts, _EXPECTED)
        left_out.update(parts.pop(name).name for name in _LEFT_OUT if name in parts)
        weights.append(_weight(module, parts, schemes))
    kept = {name: tensor for name, tensor in tensors.items() if name not in left_out}
    return replaced(kept, weights)


def _weight(module: str, parts: Mapping[str, TensorRange], schemes: Sequence[Scheme]) -> EncodedTensor:
    if _OF_NVFP4 in parts:
        raise unreadable("nvfp4-pack-quantized")
    values, scales = parts.get(PACKED) or parts.get(WEIGHT), parts.get(SCALE)
    wrong = partial(wrong_parts, module, parts, _EXPECTED)
    if values is None or scales is None or len(values.shape) != 2 or (PACKED in parts and WEIGHT in parts):
        raise wrong()
    if any(0 in part.shape for part in parts.values()):
        raise wrong()
    is_packed = PACKED in parts
    if values.dtype_name == ("U8" if is_packed else "F8_E4M3") and len(parts) == 2:
        return _fp8(module, values, scales, schemes, wrong)
    if values.dtype_name != ("I32" if is_packed else "I8") or scales.dtype_name not in SCALE_DTYPES:
        raise wrong()
    outputs, columns = values.shape
    groups = scales.shape[1] if len(scales.shape) == 2 else 1
    if scales.shape not in ((), (1,), (outputs,), (1, 1), (outputs, groups)):
        raise wrong()
    fitting = [scheme for scheme in schemes if scheme.is_symmetric or ZEROS in parts]
    if schemes and not fitting:
        raise wrong()
    bits, inputs = _bits_and_inputs(module, columns, groups, fitting, wrong) if is_packed else (8, columns)
    order, zeros = parts.get(ORDER), parts.get(ZEROS)
    if inputs % groups or (order is not None and (order.shape, order.dtype_name) != ((inputs,), "I32")):
        raise wrong()
    packed_zeros = ((-(-outputs * bits // 32), groups), "I32") if is_packed else None
    if zeros is not None and (zeros.shape, zeros.dtype_name) not in ((scales.shape, "I8"), packed_zeros):
        raise wrong()
    stated = [scheme for scheme in schemes if not is_packed or scheme.shape(columns, groups) == (bits, inputs)]
    if schemes and not _are_stated(module, parts, stated, (outputs, inputs)):
        raise wrong()
    # Words may have more codes than there are inputs. Then the group says how many there are.
    group = None if groups == 1 and (not is_packed or columns * 32 // bits == inputs) else inputs // groups
    in_file = tuple(part for part in (values, scales, zeros, order) if part is not None)
    own = of_module(stated, module) or stated
    is_symmetric = bool(own) and all(scheme.is_symmetric for scheme in own)
    integers = as_integers(bits, group, zeros is None or is_symmetric, order is None)
    name = named("compressed-tensors", bits, group)
    encoding = IntegerRows(bits, group, is_packed, zeros is not None, order is None, is_symmetric, name, integers)
    return EncodedTensor(f"{module}.{WEIGHT}", (outputs, inputs), in_file, encoding)


def _are_stated(
    module: str, parts: Mapping[str, TensorRange], schemes: Sequence[Scheme], shape: tuple[int, int]
) -> bool:
    """Return whether a scheme of the module says that a weight of this shape has such scales, and these other parts."""
    fitting = [scheme for scheme in schemes if scheme.is_integer and scheme.has_scales(parts[SCALE].shape, *shape)]
    return any(
        (scheme.is_symmetric or ZEROS in parts)
        and (ORDER in parts or not scheme.is_ordered or parts[SCALE].shape[-1:] in ((), (1,)))
        for scheme in of_module(fitting, module) or fitting
    )


def _bits_and_inputs(
    module: str, words: int, groups: int, schemes: Sequence[Scheme], wrong: Callable[[], CheckpointError]
) -> tuple[int, int]:
    """Return the bits and inputs of a packed weight: by the schemes that it fits, and if these differ, by its name."""
    fitting = [(scheme, shape) for scheme in schemes if (shape := scheme.shape(words, groups)) is not None]
    if len({shape for _, shape in fitting}) > 1:
        own = of_module([scheme for scheme, _ in fitting], module)
        fitting = [(scheme, shape) for scheme, shape in fitting if scheme in own]
    shapes = {shape for _, shape in fitting}
    if len(shapes) == 1:
        return shapes.pop()
    if not shapes:
        raise wrong()
    raise CheckpointError(
        f"The checkpoint's {module!r} can be read in {' or '.join(f'{bits} bits' for bits, _ in sorted(shapes))}, since it is "
        "a target of several config_groups in config.json. Remove it from the targets of all but one."
    )


def _fp8(
    module: str,
    values: TensorRange,
    scales: TensorRange,
    schemes: Sequence[Scheme],
    wrong: Callable[[], CheckpointError],
) -> EncodedTensor:
    """Return a weight of FP8 values, or of two FP4 values in a byte, with a scale for each block."""
    is_fp4 = values.dtype_name == "U8"
    shape = (values.shape[0], values.shape[1] * (2 if is_fp4 else 1))
    fitting = [one for one in schemes if not one.is_integer and one.has_scales(scales.shape, *shape)]
    blocks = [scheme.block for scheme in fitting if scheme.block and not is_fp4]
    encoding = fp8_of(shape, scales.shape, blocks)
    if (
        encoding is None
        or (schemes and not fitting)
        or scales.dtype_name not in ("U8", *(() if is_fp4 else SCALE_DTYPES))
    ):
        raise wrong()
    return EncodedTensor(f"{module}.{WEIGHT}", shape, (values, scales), encoding)
