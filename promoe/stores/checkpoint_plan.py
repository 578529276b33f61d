"""Finds which byte range of which file holds which piece of which expert.

It knows shapes, dtypes and ranges. A piece is contiguous both in a file and in the slot, so it can be moved as it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from promoe.errors import CheckpointError
from promoe.stores.base import ChunkPart
from promoe.stores.checkpoint_names import BankSources, BankSpec, CheckpointNames
from promoe.stores.encodings.base import EncodedTensor, Encoding, StoredTensor
from promoe.stores.encodings.companions import undecoded
from promoe.stores.expert_conversion import ConversionSource, Decoding, ExpertConversion
from promoe.stores.layer_plan import ComputedPiece, LayerPlan, Piece, SourceRange
from promoe.stores.layout import CACHE_LINE_BYTES, ExpertLayout, round_up
from promoe.stores.safetensors_header import TensorRange

if TYPE_CHECKING:
    from transformers.core_model_loading import WeightTransform

CONVERTIBLE_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """Where everything lies.

    Attributes:
        layers: the plans of all MoE layers.
        expert_tensors: the names of the checkpoint's tensors that hold experts.
        unused_tensors: the names of those that hold no part of the model.
        as_they_are: the other tensors that become a parameter without any change, by the parameter's name.
        not_floats: the other tensors in dtypes that are not those of weights in 16 bits or more, by the parameter that each
            is a part of.
    """

    layers: tuple[LayerPlan, ...]
    expert_tensors: frozenset[str] = frozenset()
    unused_tensors: frozenset[str] = frozenset()
    as_they_are: Mapping[str, StoredTensor] = field(default_factory=dict)
    not_floats: Mapping[str, TensorRange] = field(default_factory=dict)


def plan_experts(
    layers: Sequence[Sequence[BankSpec]],
    tensors: Mapping[str, StoredTensor],
    conversions: Sequence[WeightTransform],
    parameter_names: Collection[str],
    base_model_prefix: str,
    chunk_bytes: int,
) -> CheckpointPlan:
    """Find every piece of every expert. Reads nothing; takes about 30 us per tensor of the checkpoint.

    Args:
        layers: the banks of each MoE layer, in the order in which they lie in a slot.
        tensors: all tensors of the checkpoint, by the names that they would have in 16 bits.
        conversions: the model's weight conversions, as `get_model_conversion_mapping` returns them; their state is
            changed.
        parameter_names: all names of the model's state dict, those of the banks included.
        base_model_prefix: that of the model; a checkpoint may have it or not.
        chunk_bytes: longest chunk, a multiple of 4096.

    Raises:
        CheckpointError: an expert's tensor is missing, has another shape or an unknown quantised dtype, or would have
            to be computed from those of others.
        ConfigError: `chunk_bytes` is not a positive multiple of 4096.
    """
    found = CheckpointNames(tensors, conversions, parameter_names, base_model_prefix)
    plans: list[LayerPlan] = []
    expert_tensors: set[str] = set()
    for banks in layers:
        layout = ExpertLayout.of({bank.name: (bank.row_shape, bank.dtype) for bank in banks})
        pieces: list[Piece | ComputedPiece] = []
        for bank in banks:
            pieces += _bank_pieces(bank, found, layout[bank.name].offset_bytes)
            expert_tensors.update(found.names(bank))
        plans.append(LayerPlan(layout, banks[0].num_experts, tuple(pieces), chunk_bytes))
    as_they_are = {name: one for name, one in found.as_they_are().items() if one.name not in expert_tensors}
    others = ((name, one) for name, one in found.of_parameters() if one.name not in expert_tensors)
    not_floats = {name: part for name, one in others if (part := _not_floats(one)) is not None}
    return CheckpointPlan(tuple(plans), frozenset(expert_tensors), frozenset(found.unused()), as_they_are, not_floats)


def _not_floats(tensor: StoredTensor) -> TensorRange | None:
    """Return the range of a tensor that is not in 16 bits or more, nor decoded from what it is in; None: there is none."""
    if isinstance(tensor, EncodedTensor):
        part = tensor.parts[0]
        if len(tensor.parts) > 1 or part.shape != tensor.shape:
            return None
        tensor = part  # a formula of numbers
    return None if tensor.dtype in CONVERTIBLE_DTYPES else tensor


def _bank_pieces(bank: BankSpec, found: CheckpointNames, slot_offset_bytes: int) -> list[Piece | ComputedPiece]:
    """Return the pieces of one expert's tensor, one after the other."""
    if len(bank.full_names) > 1:
        own = [_own_tensor(bank, parameter, found) for parameter in bank.full_names]
        return [_piece(bank, own, bank.row_shape, slot_offset_bytes)]
    origin = found.sources(bank)
    per_expert = origin.are_per_expert
    if per_expert is None:
        return [_computed(origin, slot_offset_bytes, found)]
    pieces: list[Piece | ComputedPiece] = []
    for tensors, part_shape in zip(origin.tensors, _part_shapes(origin, per_expert), strict=True):
        # A stack may have rows, and the files may have tensors, that belong to no expert: they come last.
        if per_expert and len(tensors) not in (bank.num_experts, bank.stack_shape[0]):
            raise CheckpointError(_wrong_count(bank, tensors))
        if per_expert:
            _check_numbers(bank, tensors)
        expected_shape = part_shape if per_expert else _stacked_shape(bank, part_shape)
        for tensor in tensors:
            _check_dtype(bank, tensor, found)
            if tensor.shape != expected_shape:
                raise CheckpointError(_wrong_shape(bank, tensor, expected_shape))
        of_experts = tensors[: bank.num_experts] if per_expert else tensors
        pieces.append(_piece(bank, of_experts, part_shape, slot_offset_bytes))
        slot_offset_bytes += math.prod(part_shape) * bank.dtype.itemsize
    return pieces


def _piece(
    bank: BankSpec, tensors: Sequence[StoredTensor], shape: tuple[int, ...], slot_offset_bytes: int
) -> Piece | ComputedPiece:
    """Return the piece of one expert that has this `shape`.

    Args:
        bank: the tensor that it is a part of.
        tensors: one for each expert, or one that stacks all of them.
        shape: of one expert's part.
        slot_offset_bytes: where the piece begins.
    """
    elements = math.prod(shape)
    nbytes = elements * bank.dtype.itemsize
    stacked = len(tensors) == 1 and tensors[0].shape != shape
    plain = [tensor for tensor in tensors if isinstance(tensor, TensorRange)]
    if len(plain) == len(tensors):
        ranges = tuple(
            _source(plain[0], idx * elements) if stacked else _source(plain[idx]) for idx in range(bank.num_experts)
        )
        return Piece(slot_offset_bytes, nbytes, bank.dtype, ranges)
    conversion = Decoding(_encoding(bank, tensors), shape)
    sources = tuple(_parts(bank, [tensors], [stacked], idx) for idx in range(bank.num_experts))
    return ComputedPiece(slot_offset_bytes, nbytes, bank.dtype, sources, conversion)


def _encoding(bank: BankSpec, tensors: Sequence[StoredTensor]) -> Encoding:
    """Return the encoding of the tensors of all experts. Raises CheckpointError if they are not alike."""
    encodings = {tensor.encoding if isinstance(tensor, EncodedTensor) else None for tensor in tensors}
    found, *others = encodings
    if others or found is None:
        examples = {tensor.dtype_name: tensor.name for tensor in tensors}
        raise CheckpointError(
            f"The checkpoint's experts of {bank} are not all in the same form: "
            f"{', '.join(f'{name!r} is {form}' for form, name in sorted(examples.items()))}. Open another checkpoint of the "
            "model."
        )
    return found


def _computed(origin: BankSources, slot_offset_bytes: int, found: CheckpointNames) -> ComputedPiece:
    """Return the piece of a tensor that has to be computed.

    A source has a tensor per expert if its pattern says so (`*`), or all experts stacked.
    """
    bank = origin.bank
    present = [(pattern, tensors) for pattern, tensors in zip(origin.patterns, origin.tensors, strict=True) if tensors]
    stacked = ["*" not in pattern for pattern, _ in present]
    for is_stacked, (_, tensors) in zip(stacked, present, strict=True):
        for tensor in tensors:
            _check_dtype(bank, tensor, found)
        if not is_stacked and len(tensors) != bank.num_experts:
            raise CheckpointError(_wrong_count(bank, tensors))
        if not is_stacked:
            _check_numbers(bank, tensors)
        if is_stacked and (len(tensors) > 1 or tensors[0].shape[:1] != (bank.num_experts,)):
            raise CheckpointError(_wrong_shape(bank, tensors[0], (bank.num_experts, *tensors[0].shape[1:])))
    lists = [tensors for _, tensors in present]
    conversion = ExpertConversion(
        bank,
        [
            _conversion_source(bank, pattern, is_stacked, tensors)
            for is_stacked, (pattern, tensors) in zip(stacked, present, strict=True)
        ],
        origin.operations,
    )
    sources = tuple(_parts(bank, lists, stacked, expert_idx) for expert_idx in range(bank.num_experts))
    conversion.check(
        [_of_one(bank, tensors[0], is_stacked) for is_stacked, tensors in zip(stacked, lists, strict=True)]
    )
    nbytes = math.prod(bank.row_shape) * bank.dtype.itemsize
    return ComputedPiece(slot_offset_bytes, nbytes, bank.dtype, sources, conversion)


def _conversion_source(
    bank: BankSpec, pattern: str, stacked: bool, tensors: Sequence[StoredTensor]
) -> ConversionSource:
    first = tensors[0]
    if all(isinstance(tensor, TensorRange) for tensor in tensors):
        return ConversionSource(pattern, stacked)
    decoding = Decoding(_encoding(bank, tensors), _of_one(bank, first, stacked)[0])
    return ConversionSource(pattern, stacked, len(_ranges(first)), decoding)


def _of_one(bank: BankSpec, tensor: StoredTensor, stacked: bool) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and dtype of one expert's tensor, decoded."""
    shape = tensor.shape[1:] if stacked else tensor.shape
    return shape, bank.dtype if isinstance(tensor, EncodedTensor) else _torch_dtype(bank, tensor)


def _ranges(tensor: StoredTensor) -> tuple[TensorRange, ...]:
    return tensor.parts if isinstance(tensor, EncodedTensor) else (tensor,)


def _parts(
    bank: BankSpec, lists: Sequence[Sequence[StoredTensor]], stacked: Sequence[bool], expert_idx: int
) -> tuple[ChunkPart, ...]:
    """Return an expert's part of each source. They are read one after the other, aligned."""
    parts: list[ChunkPart] = []
    offset_bytes = 0
    for tensors, is_stacked in zip(lists, stacked, strict=True):
        for tensor in _ranges(tensors[0] if is_stacked else tensors[expert_idx]):
            dtype = _torch_dtype(bank, tensor)
            shape = tensor.shape[1:] if is_stacked else tensor.shape
            nbytes = math.prod(shape) * dtype.itemsize
            start_bytes = tensor.offset_bytes + (expert_idx * nbytes if is_stacked else 0)
            parts.append(ChunkPart(tensor.file_idx, start_bytes, nbytes, offset_bytes, shape, dtype))
            offset_bytes = round_up(offset_bytes + nbytes, CACHE_LINE_BYTES)
    return tuple(parts)


def _torch_dtype(bank: BankSpec, tensor: TensorRange) -> torch.dtype:
    if tensor.dtype is None:
        raise CheckpointError(
            f"The checkpoint's {tensor.name!r}, which {bank} is computed from, has dtype {tensor.dtype_name}, which torch "
            "does not have. Open an unquantised (BF16, F16 or F32) checkpoint of the model."
        )
    return tensor.dtype


def _own_tensor(bank: BankSpec, parameter: str, found: CheckpointNames) -> StoredTensor:
    """Return the tensor of an expert, if each expert has a parameter."""
    origin = found.sources(bank, parameter)
    lists = origin.tensors
    if origin.operations or len(lists) > 1 or len(lists[0]) > 1:
        raise CheckpointError(
            f"The checkpoint's {lists[0][0].name!r} would have to be converted to become {parameter!r}, by "
            f"{origin.operations!r}, which is not supported for experts that are modules of their own. Save the model with "
            "model.save_pretrained(folder, save_original_format=False), and open that folder."
        )
    (tensor,) = lists[0]
    _check_dtype(bank, tensor, found)
    if tensor.shape != bank.row_shape:
        raise CheckpointError(_wrong_shape(bank, tensor, bank.row_shape))
    return tensor


def _stacked_shape(bank: BankSpec, part_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that a stack of one part has: the parameter's own if the part is the whole."""
    return bank.stack_shape if part_shape == bank.row_shape else (bank.stack_shape[0], *part_shape)


def _part_shapes(origin: BankSources, per_expert: bool) -> list[tuple[int, ...]]:
    """Return the shape that each source must have for one expert. They follow one another along the first dimension."""
    bank, lists = origin.bank, origin.tensors
    if len(lists) == 1:
        return [bank.row_shape]
    axis = 0 if per_expert else 1
    num_rows = [sum(tensors[0].shape[axis : axis + 1]) for tensors in lists]
    if sum(num_rows) != bank.row_shape[0]:
        num_rows = [bank.row_shape[0] // len(lists)] * len(lists)
    return [(rows, *bank.row_shape[1:]) for rows in num_rows]


def _source(tensor: TensorRange, first_element: int = 0) -> SourceRange:
    """Return where a tensor lies in the files, from an element on."""
    dtype = tensor.dtype
    assert dtype is not None, tensor
    return SourceRange(tensor.file_idx, tensor.offset_bytes + first_element * dtype.itemsize, dtype)


def _check_dtype(bank: BankSpec, tensor: StoredTensor, found: CheckpointNames) -> None:
    known = bank.dtype in CONVERTIBLE_DTYPES
    if isinstance(tensor, EncodedTensor):
        if not known:
            raise CheckpointError(
                f"The checkpoint's {tensor.name!r} is in {tensor.dtype_name}, which cannot become {bank}."
            )
    elif tensor.dtype != bank.dtype and not (tensor.dtype in CONVERTIBLE_DTYPES and known):
        raise undecoded(tensor, found.tensors, str(bank))


def _wrong_shape(bank: BankSpec, tensor: StoredTensor, expected: tuple[int, ...]) -> str:
    return (
        f"The checkpoint's {tensor.name!r} has shape {list(tensor.shape)}, but {list(expected)} was expected for "
        f"{bank}. The checkpoint is not of this model, or config.json was changed."
    )


def _check_numbers(bank: BankSpec, tensors: Sequence[StoredTensor]) -> None:
    """Raise CheckpointError unless the experts' tensors are numbered one after the other.

    If one is missing and another one does not belong there, their count is right, and every tensor between them would
    be taken for its neighbour.
    """
    if len(tensors) == 1:
        return
    numbers = [[int(number) for number in re.findall(r"\d+", tensor.name)] for tensor in tensors]
    differing = [column for column in zip(*numbers, strict=False) if len(set(column)) > 1]
    # A checkpoint may have experts of several kinds (text, vision) in one list: those of the next kind follow the first.
    first = differing[0][0] if len(differing) == 1 else -1
    if first % len(tensors) == 0 and differing[0] == tuple(range(first, first + len(tensors))):
        return
    raise CheckpointError(
        f"The checkpoint's tensors for {bank} are not numbered one after the other: {tensors[0].name!r} to "
        f"{tensors[-1].name!r} are {len(tensors)}. One is missing: compare the files with the original checkpoint."
    )


def _wrong_count(bank: BankSpec, tensors: Sequence[StoredTensor]) -> str:
    numbers = [[int(number) for number in re.findall(r"\d+", tensor.name)] for tensor in tensors]
    columns = [set(column) for column in zip(*numbers, strict=False)]
    expert_idxs = max(columns, key=len, default=set())
    # Only the first one: config.json may say that there are billions.
    missing = next((idx for idx in range(bank.num_experts) if idx not in expert_idxs), None)
    example = "there are too many" if missing is None else f"missing expert {missing}"
    return (
        f"The checkpoint has {len(tensors)} tensors like {tensors[0].name!r}, but {bank} needs {bank.num_experts}: "
        f"{example}. A file is missing or of another model, or config.json was changed."
    )
