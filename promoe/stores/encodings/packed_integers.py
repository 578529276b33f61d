"""What formats with integer codes have in common: a weight is `(code - zero) * scale`, and several codes share a word.

The scale and the zero are those of an output and a group of inputs. Formats differ in where codes lie in the words, and in
the shapes of scales and zeros: each has a subclass that returns rows of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from promoe.errors import CheckpointError
from promoe.stores.encodings import slices
from promoe.stores.encodings.base import EncodedTensor, Encoding, Integers, StoredTensor
from promoe.stores.encodings.companions import WHAT_TO_DO
from promoe.stores.encodings.overrides import NOT_QUANTISED, of_one
from promoe.stores.encodings.slices import values_of
from promoe.stores.safetensors_header import TensorRange

# Bits of a code that divide a byte.
BITS = (2, 4, 8)
SCALE_DTYPES = ("F16", "BF16", "F32")
# No format packs more outputs into a word.
_MOST_PACKED = 32


class PackedIntegers(Encoding):
    """Codes of 2, 4 or 8 bits with scales and zeros.

    Attributes:
        bits: of a code.
        group: inputs that share a scale and a zero; None: all.
        is_symmetric: whether config.json says that the code in the middle means zero. Then stored zeros are not used: writers
            differ in what they store there, and the kernels for symmetric codes do not read it.
    """

    bits: int
    group: int | None
    is_symmetric: bool

    @abstractmethod
    def num_outputs(self, parts: Sequence[torch.Tensor]) -> int:
        """Return how many outputs the weight has."""

    @abstractmethod
    def codes(self, parts: Sequence[torch.Tensor], outputs: slice) -> torch.Tensor:
        """Return the codes of some outputs, `[outputs, in]`, uint8 or int8. The slice begins at a multiple of 32."""

    @abstractmethod
    def scales(self, parts: Sequence[torch.Tensor], outputs: slice) -> torch.Tensor:
        """Return the scales of some outputs, `[outputs, groups]`, fp32."""

    @abstractmethod
    def zeros(self, parts: Sequence[torch.Tensor], outputs: slice) -> torch.Tensor | None:
        """Return the codes of some outputs that mean zero, `[outputs, groups]`, fp32; None: all are `middle`."""

    @property
    def middle(self) -> int:
        """The code that means zero if the format does not say it."""
        return 1 << self.bits - 1

    def group_of_input(self, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the number of each input's group, `[in]`, int64; None: one after the other, `group` inputs each."""
        return None

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """See `Encoding.decode`."""
        group_of_input = self.group_of_input(parts)
        for outputs in _slices(*out.shape):
            codes = self.codes(parts, outputs)
            values = values_of(tuple(codes.shape)).copy_(codes)
            scales, zeros = self.scales(parts, outputs), self._used_zeros(parts, outputs)
            if zeros is None:
                zeros = scales.new_full((1, scales.shape[1]), self.middle)
            if group_of_input is None:
                grouped = values.unflatten(1, (scales.shape[1], -1))
                grouped.sub_(zeros.unsqueeze(2)).mul_(scales.unsqueeze(2))
            else:
                values.sub_(zeros.index_select(1, group_of_input)).mul_(scales.index_select(1, group_of_input))
            out[outputs].copy_(values)

    def unpack(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See `Encoding.unpack`.

        Raises:
            CheckpointError: the weight is not what `integers` says: the tensors contradict config.json.
        """
        assert self.integers is not None, self
        every = slice(0, self.num_outputs(parts))
        codes, scales, zeros = self.codes(parts, every), self.scales(parts, every), self._used_zeros(parts, every)
        if self.group_of_input(parts) is not None:
            raise self._contradiction("the groups of inputs in another order (g_idx), and not desc_act")
        if self.bits == 4:
            return codes, scales, None if zeros is None else (self.middle - zeros) * scales
        assert zeros is None, "codes of 8 bits that are kept are symmetric"
        return codes if codes.dtype == torch.int8 else codes.view(torch.int8) ^ -128, scales, None

    def _used_zeros(self, parts: Sequence[torch.Tensor], outputs: slice) -> torch.Tensor | None:
        """Return the codes of some outputs that mean zero; None: all are `middle`.

        Raises:
            CheckpointError: the weight has zeros that differ, and config.json says that it is symmetric.
        """
        zeros = self.zeros(parts, outputs)
        if zeros is None or not self.is_symmetric:
            return zeros
        # Weights are decoded in slices: each is compared with the weight's first zero, not with its own.
        first = self.zeros(parts, slice(0, min(_MOST_PACKED, self.num_outputs(parts))))
        assert first is not None, self
        if not bool((zeros == first[0, 0]).all()):
            found = torch.stack((first[0, 0], *torch.aminmax(zeros)))
            raise CheckpointError(
                f"The checkpoint has a weight in {self.name} with zeros from {int(found.min())} to {int(found.max())}, but its "
                "config.json says that codes are symmetric (sym, zero_point or symmetric), so that zero is always "
                f"{self.middle}. One of the two is wrong: correct config.json, or open another checkpoint of the model."
            )
        return None

    def _contradiction(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"The checkpoint has a weight in {self.name} with {what} in config.json. So its codes cannot stay as they are in "
            'memory: open it with experts="checkpoint", which decodes them, or correct config.json.'
        )


def as_integers(bits: int, group: int | None, is_symmetric: bool, in_order: bool = True) -> Integers | None:
    """Return `Encoding.integers` of codes that the quantised slot formats can take over; None: they cannot.

    Args:
        bits: of a code.
        group: inputs that share a scale and a zero; None: all.
        is_symmetric: whether zero is always the code in the middle.
        in_order: whether groups are inputs one after the other.
    """
    return Integers(bits, group) if in_order and (bits == 4 or (bits == 8 and is_symmetric and group is None)) else None


def named(method: str, bits: int, group: int | None) -> str:
    """Return `Encoding.name` of codes of so many bits."""
    return f"{method} ({bits} bits{'' if group is None else f', groups of {group}'})"


def codes_in(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes in words, the first in the lowest bits.

    Args:
        words: `[..., n]`, int32, contiguous.
        bits: of a code: 2, 4 or 8.

    Returns:
        `[..., n * 32 / bits]`, uint8.
    """
    # Flat, because a dimension of one may have any stride.
    packed = words.flatten().view(torch.uint8).view(*words.shape[:-1], -1)
    if bits == 8:
        return packed
    # Move the codes of each byte to bytes of their own, all at once.
    if bits == 4:
        wide = packed.to(torch.int16)
        spread = (wide << 4).bitwise_or_(wide).bitwise_and_(0x0F0F)
    else:
        wide = packed.to(torch.int32)
        spread = (wide << 6).bitwise_or_(wide)
        spread = (spread << 12).bitwise_or_(spread).bitwise_and_(0x03030303)
    return spread.view(torch.uint8)


def stated_bits(quantization: Mapping[str, Any], modules: Sequence[str] = ()) -> float | None:
    """Return the bits of a weight by a `quantization_config` of AWQ or GPTQ, with scale and zero; None: it states none.

    Args:
        quantization: the configuration.
        modules: names that the module of the weight may have in the files.
    """
    bits, group = _stated(of_one(quantization, modules))
    return None if bits is None else bits_per_weight(bits, group, True)


def stated_integers(quantization: Mapping[str, Any], modules: Sequence[str] = ()) -> Integers | None:
    """Return what `Encoding.integers` are for a weight by a `quantization_config` of AWQ or GPTQ.

    Args:
        quantization: the configuration.
        modules: names that the module of the weight may have in the files.
    """
    quantization = of_one(quantization, modules)
    bits, group = _stated(quantization)
    in_order = group is None or not quantization.get("desc_act")
    return None if bits is None else as_integers(bits, group, quantization.get("sym") is True, in_order)


def _stated(quantization: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the bits of a code (None: it is not quantised) and the size of groups that a `quantization_config` states."""
    bits = quantization.get("bits", quantization.get("w_bit"))
    group = quantization.get("group_size", quantization.get("q_group_size"))
    is_quantised = isinstance(bits, int) and bits < NOT_QUANTISED
    return bits if is_quantised else None, group if isinstance(group, int) and group > 0 else None


def bits_per_weight(bits: int, group: int | None, has_zeros: bool) -> float | None:
    """Return the bits of a weight, with its share of a scale of 16 bits and of a zero; None: no weight has so many."""
    if not 0 < bits <= 16:
        return None
    return bits if group is None else bits + (16 + bits * has_zeros) / min(group, 2**31)


def other_order(g_idx: torch.Tensor, num_groups: int) -> torch.Tensor | None:
    """Return the number of each input's group, int64; None: groups are inputs one after the other, all alike.

    Raises:
        CheckpointError: there is no such group.
    """
    lowest, highest = int(g_idx.min()), int(g_idx.max())
    if not 0 <= lowest <= highest < num_groups:
        raise CheckpointError(
            f"The checkpoint has a weight whose inputs are in the groups {lowest} to {highest} (g_idx), of {num_groups}. "
            "It is damaged: download or copy it again."
        )
    if len(g_idx) % num_groups == 0:
        usual = torch.arange(len(g_idx), dtype=g_idx.dtype, device=g_idx.device) // (len(g_idx) // num_groups)
        if torch.equal(g_idx, usual):
            return None
    return g_idx.long()


class WrongPartsError(CheckpointError):
    """The tensors of a weight do not belong together.

    Attributes:
        module: the module that the weight is of.
        known: names of the tensors that the message has.
    """

    module: str
    known: frozenset[str]


def parts_of_modules(tensors: Mapping[str, TensorRange], suffixes: Sequence[str]) -> dict[str, dict[str, TensorRange]]:
    """Return the tensors with one of these names, by module and name."""
    known = frozenset(suffixes)
    modules: dict[str, dict[str, TensorRange]] = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix in known:
            modules.setdefault(module, {})[suffix] = tensor
    return modules


def replaced(tensors: Mapping[str, TensorRange], weights: Iterable[EncodedTensor]) -> dict[str, StoredTensor]:
    """Return the tensors with these weights in place of their parts.

    Raises:
        CheckpointError: a weight is there in 16 bits, too.
    """
    found: dict[str, StoredTensor] = dict(tensors)
    for weight in weights:
        for part in weight.parts:
            del found[part.name]
        if weight.name in found:
            raise CheckpointError(
                f"The checkpoint has {weight.name!r} in two ways: as it is, and as {weight.parts[0].name!r}. Remove the files "
                "of one of them from the folder."
            )
        found[weight.name] = weight
    return found


def wrong_parts(module: str, parts: Mapping[str, TensorRange], expected: str) -> WrongPartsError:
    """Return the error to raise if the tensors of a weight do not belong together."""
    found = ", ".join(f"{name} {list(tensor.shape)} {tensor.dtype_name}" for name, tensor in parts.items())
    files = ", ".join(sorted({tensor.file_name for tensor in parts.values()} - {""}))
    where = f" (in {files})" if files else ""
    error = WrongPartsError(f"The checkpoint's {module!r} has {found or 'no tensors'}{where}: {expected}. {WHAT_TO_DO}")
    error.known = frozenset(tensor.name for tensor in parts.values())
    error.module = module
    return error


def _slices(outputs: int, inputs: int) -> Iterator[slice]:
    """Yield slices of outputs to decode at a time. They begin at multiples of `_MOST_PACKED`."""
    step = max(1, slices.SLICE_ELEMENTS // inputs // _MOST_PACKED) * _MOST_PACKED
    for start in range(0, outputs, step):
        yield slice(start, min(start + step, outputs))
