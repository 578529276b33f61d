"""The activation of some of a call's pairs, bit by bit as in the unmodified kernel's operation over all of them.

torch gives a large elementwise operation to its threads piece by piece. What is left of a piece after whole vectors goes
through other code, whose last bit can differ, so that the bits of an element depend on where the pieces end: on the shape of
the whole operation. `depends_on_shape` says where they do, and `WholeActivation` computes that whole operation, with zeros for
the pairs that are not there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from promoe.experts.pairs import Pairs, Selection

# What ATen's loops take at once: two vectors of AVX-512; of others less.
LOOP_BYTES = 128
# ATen's parallel_for: from how many elements on an operation may get several threads; gelu, as many as there are.
GRAIN_ELEMENTS, GELU_GRAIN_ELEMENTS = 32768, 16384
# Rounded once, whatever computes them, and what only moves elements. Views do not count.
ARITHMETIC = frozenset(
    {"abs", "add", "clamp", "clamp_max", "clamp_min", "div", "maximum", "minimum", "mul", "neg", "sub"}
)
MOVING = frozenset({"_to_copy", "cat", "clone", "copy", "relu", "where"})
# Values of 16 bits that are compared at once: whole vectors, and for one thread.
BLOCK = 8192

# Of each experts module, by its activation and dtype: what `grain_elements` found.
_GRAINS: WeakKeyDictionary[nn.Module, dict[tuple[Any, torch.dtype], int | None]] = WeakKeyDictionary()
_SAME_BITS: dict[tuple[Any, ...], bool] = {}  # (operation, its other arguments, dtype) -> whether all code rounds alike


def depends_on_shape(experts: nn.Module, width: int, dtype: torch.dtype, sizes: Sequence[int], num_rows: int) -> bool:
    """Whether the bits of a row's activation may depend on how many other rows are computed with it.

    Whole vectors fit into rows of most sizes; then it takes several pieces, which may end within rows. Two pieces end at
    the middle of a row, or of none.

    Args:
        experts: a module that `use_experts_implementation` of transformers made.
        width: columns that go into the activation.
        dtype: of the rows.
        sizes: that the rows of any operation may have.
        num_rows: of all experts together.
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
    """From how many elements on the activation may be computed in pieces; None: its bits are the same in any.

    In 16 bits that is found out by computing all values both ways. 0: whatever the size, one row may be computed by other
    code than several, for what is half a row of one is in one piece, and that goes to oneDNN.
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
    """Notes the operations of ATen that may round in more ways than one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, Any, Sequence[Any], Mapping[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")  # that of one in place ends so
        if not func.is_view and name not in ARITHMETIC | MOVING:
            self.calls.append((name, func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _same_bits(dtype: torch.dtype, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation on one tensor of 16 bits rounds every value alike in whole vectors and one by one."""
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
    """Its name in the module, and itself: `[rows, width]` -> `[rows, width of the second product]`."""
    name = "_apply_gate" if experts.has_gate else "act_fn"
    return name, getattr(experts, name)


class WholeActivation:
    """The activation of an experts module that `use_experts_implementation` of transformers made.

    Args:
        experts: the module.
        pairs: of the call.
        by_expert: the kernel computes its rows expert by expert; else in the order of positions.
    """

    def __init__(self, experts: nn.Module, pairs: Pairs, by_expert: bool) -> None:
        self._experts: Any = experts
        self._count = pairs.count
        self._place_of: torch.Tensor | None = None  # [count], the row of each position; None: rows are positions
        if by_expert:
            positions = pairs.select(pairs.experts).position_tensor
            self._place_of = torch.empty_like(positions)
            self._place_of[positions] = torch.arange(self._count, device=positions.device)

    def attributes(self, selection: Selection) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
        """What a stand-in for the module needs to compute the rows of `selection` so."""
        places = selection.position_tensor if self._place_of is None else self._place_of[selection.position_tensor]
        name, activate = _activation(self._experts)

        def activate_whole(rows: torch.Tensor) -> torch.Tensor:
            """`[P, ...]`, or more rows, of which those after the first P repeat the last pair."""
            lacking = len(rows) - len(places)
            whole = rows.new_zeros((self._count, *rows.shape[1:])).index_copy_(0, places, rows[: len(places)])
            found: torch.Tensor = activate(whole).index_select(0, places)
            return torch.cat([found, found[-1:].expand(lacking, -1)]) if lacking else found

        return {name: activate_whole}
