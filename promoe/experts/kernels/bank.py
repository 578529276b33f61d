"""Stand-ins that let an unmodified experts kernel run over experts in arbitrary slots.

`SlotBank` takes the place of a stacked parameter `[num_experts, ...]`. The kernel still uses the model's own expert ids
and number of experts. When it reads an expert's weights, it gets the slot's tensor instead of the stack's row. If an
expert has no row, an error is raised, so that wrong weights are never used silently.

Everything here runs for every MoE layer of every pass, so constructors do as little as possible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from promoe.experts.kernels.matrices import factors, products
from promoe.experts.kernels.slot_windows import SlotOrder, has_grouped_kernel
from promoe.transfer.devices import send
from promoe.transfer.rows import ExpertRows, Row, SlotRows


class CallRows:
    """The rows that one kernel call may read, shared by the banks of that call.

    Args:
        rows: expert id -> its tensors.
        ids: the call's ids as a list, in the order of the flattened index, if the caller has them. They must equal the
            ids in the index tensor, which then need not be read.
    """

    __slots__ = ("_segments", "_slot_ids", "_slot_order", "ids", "rows")

    def __init__(self, rows: ExpertRows, ids: Sequence[int] | None = None) -> None:
        self.rows = rows
        self.ids = ids
        self._segments: tuple[list[int], list[int]] | None = None
        self._slot_ids: torch.Tensor | None = None
        self._slot_order: SlotOrder | None = None

    def segments(self, offs: torch.Tensor) -> tuple[list[int], list[int]]:
        """Return the experts that have tokens, ascending, and the number of tokens of each.

        Args:
            offs: `[E]`, the end of each expert's range of rows.
        """
        if self._segments is None:  # a kernel calls this once per projection, with the same routing
            if self.ids is not None:
                counts = sorted(Counter(self.ids).items())
            else:
                ends = offs.tolist()
                counts = [(e, b - a) for e, (a, b) in enumerate(zip([0, *ends], ends, strict=False)) if a != b]
            self._segments = [e for e, _ in counts], [n for _, n in counts]
        return self._segments

    def slot_ids(self, experts: Sequence[int], slots: Mapping[int, int], device: torch.device) -> torch.Tensor:
        """Return the slot of each of `experts`, `[n]`, on `device`. Those of `ids` are sent only once."""
        if experts is not self.ids:
            return send([slots[expert] for expert in experts], device)
        if self._slot_ids is None:
            self._slot_ids = send([slots[expert] for expert in experts], device)
        return self._slot_ids

    def slot_order(self, slots: Mapping[int, int], offs: torch.Tensor) -> SlotOrder:
        """Return the order by slot of pairs that are sorted by expert."""
        if self._slot_order is None:
            experts, sizes = self.segments(offs)
            self._slot_order = SlotOrder([slots[expert] for expert in experts], sizes, offs.device)
        return self._slot_order

    def row(self, expert: int, name: str) -> torch.Tensor:
        """Return tensor `name` of `expert` as the model has it: the slot's tensor, or a copy if its format differs.

        Raises:
            AssertionError: the expert was not made ready for this call.
        """
        row = self.row_in_format(expert, name)
        return row if isinstance(row, torch.Tensor) else row.dense()

    def row_in_format(self, expert: int, name: str) -> Row:
        """Return tensor `name` of `expert` in the format that it has in its slot."""
        try:
            return self.rows[expert][name]
        except KeyError:
            raise AssertionError(f"expert {expert} has no {name!r} here; ready: {sorted(self.rows)}") from None


class SlotBank:
    """Takes the place of a stacked parameter `[num_experts, ...]` in the experts kernels of Transformers.

    `bank[e]` with an int or a 0-d tensor is the slot's own tensor. `bank[ids]` with a 1-d tensor copies the rows of
    these experts into one tensor, as the stock kernel does. `transpose(-2, -1)` and grouped matrix products work as
    well. Any other use raises, because it would need the whole stack.
    """

    __slots__ = ("_call", "_name", "_transposed", "device", "dtype", "shape")

    def __init__(
        self,
        name: str,
        call: CallRows,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        transposed: bool = False,
    ) -> None:
        self._name = name
        self._call = call
        self._transposed = transposed
        self.shape = shape
        self.dtype = dtype
        self.device = device

    @property
    def ndim(self) -> int:
        """Number of dimensions of the stack."""
        return len(self.shape)

    def dim(self) -> int:
        """Return the number of dimensions of the stack."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Return the shape of the stack, or one size of it."""
        return self.shape if dim is None else self.shape[dim]

    def data_ptr(self) -> int:
        """Return 0. There is no stack, and kernels only check whether the address is aligned; slots are aligned."""
        return 0

    def transpose(self, dim0: int, dim1: int) -> SlotBank:
        """Return the bank with each expert's matrix transposed; only the last two of three dimensions."""
        if len(self.shape) != 3 or {dim0 % 3, dim1 % 3} != {1, 2}:
            raise NotImplementedError(f"{self!r}.transpose({dim0}, {dim1})")
        experts, rows, columns = self.shape
        shape = torch.Size((experts, columns, rows))
        return SlotBank(self._name, self._call, shape, self.dtype, self.device, not self._transposed)

    def view(self, *shape: Any) -> SlotBank:
        """Return the bank itself, for kernels that keep the stack flat and split it: only `(-1, *shape of a row)`."""
        wanted = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if wanted[0] not in (-1, self.shape[0]) or wanted[1:] != tuple(self.shape[1:]):
            raise NotImplementedError(f"{self!r}.view({wanted})")
        return self

    @property
    def mT(self) -> SlotBank:
        """The bank with each expert's matrix transposed."""
        return self.transpose(-2, -1)

    def __getitem__(self, ids: Any) -> torch.Tensor:
        if isinstance(ids, int) or (isinstance(ids, torch.Tensor) and ids.ndim == 0):
            row = self._call.row(int(ids), self._name)
            return row.mT if self._transposed else row
        if not isinstance(ids, torch.Tensor) or ids.ndim != 1 or self._transposed:
            raise NotImplementedError(f"{self!r}[{ids!r}]")
        return self._gather(ids)

    def _gather(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of `ids[n]` as one tensor `[n, ...]`."""
        call, name = self._call, self._name
        experts = call.ids
        if experts is None:
            experts = ids.tolist()
        elif len(experts) != len(ids):
            raise AssertionError(f"{self!r}: the call has {len(experts)} ids, the kernel asks for {len(ids)}")
        if not experts:
            return torch.empty((0, *self.shape[1:]), dtype=self.dtype, device=self.device)
        if isinstance(call.rows, SlotRows):
            for expert in set(experts):
                call.row(expert, name)  # raises if the expert is not ready
            return call.rows.stacks[name].index_select(0, call.slot_ids(experts, call.rows.slots, self.device))
        first = experts[0]
        if experts.count(first) == len(experts):
            # For one expert, n views of the slot are enough, and nothing is copied: kernels only read the weights.
            return call.row(first, name).expand(len(experts), *self.shape[1:])
        return torch.stack([call.row(expert, name) for expert in experts])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> torch.Tensor:
        if func is torch._grouped_mm or getattr(func, "__name__", "") == "grouped_mm_fallback":
            return _grouped_mm(*args, **(kwargs or {}), stock_kernel=func is torch._grouped_mm)
        raise NotImplementedError(
            f"{getattr(func, '__name__', func)} reached a SlotBank: it would need all experts at once. This experts kernel "
            "is not one of the supported ones."
        )

    def __repr__(self) -> str:
        return f"SlotBank({self._name!r}, {tuple(self.shape)}, {self.dtype})"


def _grouped_mm(
    x: torch.Tensor,
    bank: SlotBank,
    offs: torch.Tensor,
    bias: None = None,
    out_dtype: None = None,
    *,
    stock_kernel: bool,
) -> torch.Tensor:
    """Multiply `x[S, in]`, sorted by expert, by the experts' matrices `[in, out]`; return `[S, out]`.

    There is one product for each expert that has tokens. torch's grouped_mm on a CPU does the same, so the bits are the
    same. On a device whose `stock_kernel` takes all groups at once, that kernel runs over the slots.
    """
    assert bias is None, f"grouped_mm with bias={bias!r}"
    assert out_dtype is None, f"grouped_mm with out_dtype={out_dtype!r}"
    call, name, transposed = bank._call, bank._name, bank._transposed
    experts, sizes = call.segments(offs)
    rows = [call.row_in_format(expert, name) for expert in experts]  # raises if an expert is not ready
    if stock_kernel and experts and isinstance(call.rows, SlotRows) and has_grouped_kernel(x.device, x.dtype):
        stack = call.rows.stacks[name]
        return call.slot_order(call.rows.slots, offs).multiply(x, stack.mT if transposed else stack)
    return products(x, factors(rows, transposed), sizes, bank.shape[2])
