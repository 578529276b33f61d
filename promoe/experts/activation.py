"""Compute the activation of some of a call's pairs, with the bits that the unmodified kernel gets for all pairs at once.

torch splits a large elementwise operation into pieces, one for each thread. It computes a piece in whole vectors; the
elements that are left at the end go through other code, whose last bit can differ. So the bits of an element depend on
where the pieces end, that is, on the shape of the whole operation. `depends_on_shape` tells for which operations this
is so. For these, `WholeActivation` computes the whole operation, with zeros for the pairs that are absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from promoe.experts.pairs import Pairs, Selection

# Bytes that one step of ATen's loops computes: two vectors of AVX-512 (other instruction sets compute fewer).
LOOP_BYTES = 128
# Larger operations than this may get several threads (ATen's parallel_for); gelu has a grain size of its own.
GRAIN_ELEMENTS, GELU_GRAIN_ELEMENTS = 32768, 16384
# Operations whose result is rounded once, so that all code gives the same bits, and operations that only move elements.
# Views are never counted.
ARITHMETIC = frozenset(
    {"abs", "add", "clamp", "clamp_max", "clamp_min", "div", "maximum", "minimum", "mul", "neg", "sub"}
)
MOVING = frozenset({"_to_copy", "cat", "clone", "copy", "relu", "where"})
# 16-bit values that are compared at once: a multiple of whole vectors, and small enough for one thread.
BLOCK = 8192

# Results of `grain_elements` for each experts module, by activation function and dtype.
_GRAINS: WeakKeyDictionary[nn.Module, dict[tuple[Any, torch.dtype], int | None]] = WeakKeyDictionary()
_SAME_BITS: dict[tuple[Any, ...], bool] = {}  # (operation, its other arguments, dtype) -> whether all code rounds alike


def depends_on_shape(experts: nn.Module, width: int, dtype: torch.dtype, sizes: Sequence[int], num_rows: int) -> bool:
    """Return whether the bits of a row's activation may depend on how many other rows are computed with it.

    If every row consists of whole vectors, they can differ only where a piece ends inside a row, so only with several
    threads. Two threads split the operation in the middle, which is between two rows or in the middle of one.

    Args:
        experts: a module made by Transformers' `use_experts_implementation`.
        width: columns of the activation's input.
        dtype: dtype of the rows.
        sizes: all sizes that a row of any operation may have.
        num_rows: the number of rows of all experts together.
    """
    if not dtype.is_floating_point or dtype.itemsize < 2:
        return False
    grain = grain_elements(experts, width, dtype)
    if not grain:
        return grain is not None and num_rows > 1
    loop = LOOP_BYTES // dtype.itemsize
    if any(size % loop for size in sizes):
        return True
    num_threads = torch.get_num_threads()
    if num_threads == 1 or num_rows * max(sizes) <= grain:
        return False
    return num_threads > 2 or any(size % (2 * loop) for size in sizes)


def grain_elements(experts: nn.Module, width: int, dtype: torch.dtype) -> int | None:
    """Return the number of elements from which on the activation may be computed in pieces with other bits.

    None: its bits never depend on pieces. In 16 bits, this is found out by computing all values both ways. 0: the bits
    may depend on the number of rows for any size, because oneDNN computes the operation.
    """
    grains, key = _GRAINS.setdefault(experts, {}), (getattr(experts, "act_fn", None), dtype)
    if key not in grains:
        grains[key] = _find_grain(experts, width, dtype)
    return grains[key]


def _find_grain(experts: nn.Module, width: int, dtype: torch.dtype) -> int | None:
    _, activate = _activation(experts)
    with torch.inference_mode(False), torch.no_grad():
        rows = torch.zeros((1, width), dtype=dtype)
        with _Operations() as operations:
            activate(rows)
    grains = [
        _grain_of(name, kwargs)
        for name, func, args, kwargs in operations.calls
        if not _same_bits(dtype, func, args, kwargs)
    ]
    return min(grains, default=None)


def _grain_of(name: str, kwargs: Mapping[str, Any]) -> int:
    if name != "gelu":
        return GRAIN_ELEMENTS
    return GELU_GRAIN_ELEMENTS if kwargs.get("approximate") == "tanh" else 0


class _Operations(TorchDispatchMode):
    """Records the operations of ATen whose rounding may depend on the code that computes them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, Any, Sequence[Any], Mapping[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")  # the name of an operation in place ends with "_"
        if not func.is_view and name not in ARITHMETIC | MOVING:
            self.calls.append((name, func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _same_bits(dtype: torch.dtype, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation on one 16-bit tensor gives the same bits in whole vectors and element by element."""
    others = [*args[1:], *kwargs.values()]
    if dtype.itemsize != 2 or not args or any(isinstance(other, (torch.Tensor, list, tuple)) for other in others):
        return False
    key = (func, *args[1:], *kwargs.items(), dtype)
    if key not in _SAME_BITS:
        with torch.inference_mode(False), torch.no_grad():
            values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
            values = torch.where(values.isfinite(), values, 0.0)
            blocks = values.split(BLOCK)
            in_vectors = [func(block.clone(), *args[1:], **kwargs) for block in blocks]
            one_by_one = [func(block.repeat_interleave(2)[::2], *args[1:], **kwargs) for block in blocks]
        _SAME_BITS[key] = all(
            torch.equal(one.view(torch.int16), other.view(torch.int16))
            for one, other in zip(in_vectors, (each.contiguous() for each in one_by_one), strict=True)
        )
    return _SAME_BITS[key]


def _activation(experts: Any) -> tuple[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the activation's attribute name and function: `[rows, width]` -> `[rows, width of the second product]`."""
    name = "_apply_gate" if experts.has_gate else "act_fn"
    return name, getattr(experts, name)


class WholeActivation:
    """Computes activations of some pairs as part of the operation over all pairs of a call.

    Args:
        experts: a module made by Transformers' `use_experts_implementation`.
        pairs: the call's pairs.
        by_expert: whether the kernel's rows are ordered by expert; otherwise they are in the order of positions.
    """

    def __init__(self, experts: nn.Module, pairs: Pairs, by_expert: bool) -> None:
        self._experts: Any = experts
        self._count = pairs.count
        self._place_of: torch.Tensor | None = None  # [count], the row of each position; None: row i is position i
        if by_expert:
            positions = pairs.select(pairs.experts).position_tensor
            self._place_of = torch.empty_like(positions)
            self._place_of[positions] = torch.arange(self._count, device=positions.device)

    def attributes(self, selection: Selection) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
        """Return the attributes with which a stand-in for the module computes the rows of `selection` this way."""
        places = selection.position_tensor if self._place_of is None else self._place_of[selection.position_tensor]
        name, activate = _activation(self._experts)

        def activate_whole(rows: torch.Tensor) -> torch.Tensor:
            """Activate `rows[P, ...]`. There may be more than P rows; these repeat the last pair."""
            lacking = len(rows) - len(places)
            whole = rows.new_zeros((self._count, *rows.shape[1:])).index_copy_(0, places, rows[: len(places)])
            found: torch.Tensor = activate(whole).index_select(0, places)
            return torch.cat([found, found[-1:].expand(lacking, -1)]) if lacking else found

        return {name: activate_whole}
