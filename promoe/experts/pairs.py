"""The (token, choice) pairs of one MoE layer's call, by expert. Knows nothing of weights, slots or kernels.

A pair's position is `token * K + choice`. Within an expert the pairs keep the order in which the stock kernel
multiplies them: the bits of a row of a matrix product may depend on which row it is.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property

import torch

from promoe.transfer.devices import send

# Up to this many pairs (as in decode), Python lists are faster than tensor operations, which cost some microseconds
# each.
FEW_PAIRS = 64


@dataclass(frozen=True)
class Selection:
    """The P pairs of some experts, expert by expert in ascending id.

    Attributes:
        experts: ids of the experts, ascending.
        sizes: number of pairs of each expert.
        positions: `[P]` in host memory, the position of each pair; a list if the whole call has few pairs.
        top_k: choices per token, K.
        one_each: whether there is one token, and no expert was chosen twice for it.
        device: the device of its tensors.
        listed: whether `ids` is a list even if there are many pairs.
    """

    experts: list[int]
    sizes: list[int]
    positions: list[int] | torch.Tensor
    top_k: int
    one_each: bool
    device: torch.device
    listed: bool = False

    def __len__(self) -> int:
        """Return the number of pairs, P."""
        return len(self.positions)

    @cached_property
    def position_tensor(self) -> torch.Tensor:
        """`positions` as a tensor on `device`."""
        return send(self.positions, self.device)

    @cached_property
    def ids(self) -> list[int] | None:
        """The expert of each pair as a list; None if there are many pairs, unless `listed`."""
        if isinstance(self.positions, torch.Tensor) and not self.listed:
            return None
        if self.one_each:
            return self.experts
        return [expert for expert, size in zip(self.experts, self.sizes, strict=True) for _ in range(size)]

    @cached_property
    def index(self) -> torch.Tensor:
        """The expert of each pair, `[P, 1]`."""
        if self.ids is not None:
            return send(self.ids, self.device).unsqueeze(1)
        experts = torch.tensor(self.experts, device=self.device)
        return experts.repeat_interleave(torch.tensor(self.sizes, device=self.device)).unsqueeze(1)

    @cached_property
    def tokens(self) -> torch.Tensor | None:
        """The token of each pair, `[P]`; None if `one_each`."""
        return None if self.one_each else self.position_tensor // self.top_k

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the pairs, `[P, H]`, out of `hidden[T, H]`."""
        if self.tokens is None:
            return hidden.expand(len(self), -1)
        return hidden[self.tokens]

    def gather_each(self, hidden: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the inputs of each expert's pairs, `[pairs of the expert, H]`, out of `hidden[T, H]`."""
        if self.tokens is None:
            return [hidden] * len(self)
        each: Sequence[torch.Tensor] = hidden[self.tokens].split(self.sizes)
        return each

    def tokens_by_expert(self) -> Sequence[torch.Tensor | None]:
        """Return the tokens of each expert's pairs; None for each expert if `one_each`."""
        return [None] * len(self.sizes) if self.tokens is None else self.tokens.split(self.sizes)


class Pairs:
    """All pairs of a call, and which experts are still to be computed.

    Args:
        top_k_index: `[T, K]` in host memory, expert ids in 0..num_experts-1.
        num_experts: E.
        by_choice: within an expert, put all tokens' first choices first, as the eager loops do. Otherwise the pairs are
            in the order of torch.sort, as in grouped_mm. That sort is not stable, so the order is only known by calling
            it.
        ids: `top_k_index.tolist()`, if the caller has it.
        device: the device that the layer computes on; None: the CPU.

    Raises:
        AssertionError: an id is out of range.
    """

    def __init__(
        self,
        top_k_index: torch.Tensor,
        num_experts: int,
        by_choice: bool,
        ids: Sequence[Sequence[int]] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._index = top_k_index
        self._by_choice = by_choice
        self._device = device or top_k_index.device
        self._on_device = device is not None
        self.num_tokens, self.top_k = top_k_index.shape
        self.count = self.num_tokens * self.top_k
        self._few: dict[int, list[int]] = {}  # expert -> positions
        self._many: dict[int, torch.Tensor] = {}
        if self.count <= FEW_PAIRS:
            self._few = self._group_few(top_k_index.tolist() if ids is None else ids)
            self.experts = sorted(self._few)
        else:
            self._many = self._group_many()
            self.experts = list(self._many)
        if self.experts and not 0 <= self.experts[0] <= self.experts[-1] < num_experts:
            raise AssertionError(f"expert ids {self.experts[0]}..{self.experts[-1]} for {num_experts} experts")
        self.missing = self.experts

    def take(self, ready: Container[int]) -> list[int]:
        """Return the experts in `ready` that are not computed yet, ascending, and count them as computed from now on."""
        taken = [expert for expert in self.missing if expert in ready]
        if taken:
            self.missing = [expert for expert in self.missing if expert not in ready]
        return taken

    def most_of_an_expert(self) -> int:
        """Return the number of pairs of the expert that has most; 0 if there are no pairs."""
        by_expert: Mapping[int, Sized] = self._few or self._many
        return max(map(len, by_expert.values()), default=0)

    def parts(self, experts: list[int], most: int) -> Iterator[list[int]]:
        """Yield `experts` in parts of up to `most` pairs. An expert with more pairs is a part of its own."""
        by_expert: Mapping[int, Sized] = self._few or self._many
        part: list[int] = []
        count = 0
        for expert in experts:
            count += len(by_expert[expert])
            if part and count > most:
                yield part
                part, count = [], len(by_expert[expert])
            part.append(expert)
        yield part

    def select(self, experts: list[int]) -> Selection:
        """Return the pairs of `experts`, which are in ascending order and have at least one pair each."""
        if self._few:
            listed = [self._few[expert] for expert in experts]
            sizes = [len(positions) for positions in listed]
            one_each = self.num_tokens == 1 and max(sizes) == 1
            positions = [position for some in listed for position in some]
            return Selection(experts, sizes, positions, self.top_k, one_each, self._device, self._on_device)
        blocks = [self._many[expert] for expert in experts]
        sizes, positions_of_many = [len(block) for block in blocks], torch.cat(blocks)
        return Selection(experts, sizes, positions_of_many, self.top_k, False, self._device, self._on_device)

    def _group_few(self, ids: Sequence[Sequence[int]]) -> dict[int, list[int]]:
        num_tokens, top_k = self.num_tokens, self.top_k
        flat = [expert for row in ids for expert in row]
        order: Sequence[int] = range(self.count)
        if num_tokens > 1:
            if self._by_choice:
                order = [token * top_k + choice for choice in range(top_k) for token in range(num_tokens)]
            elif len(set(flat)) < len(flat):
                order = self._sorted_positions().tolist()
        by_expert: dict[int, list[int]] = {}
        for position in order:
            by_expert.setdefault(flat[position], []).append(position)
        return by_expert

    def _group_many(self) -> dict[int, torch.Tensor]:
        counts = torch.bincount(self._index.reshape(-1)).tolist()
        blocks = self._sorted_positions().split(counts)
        return {expert: block for expert, block in enumerate(blocks) if len(block)}

    def _sorted_positions(self) -> torch.Tensor:
        """Return all positions `[T * K]`, sorted by expert, in the kernel's order within an expert."""
        if not self._by_choice:
            # The stock kernel's sort is stable on CUDA, except for up to 32 numbers.
            return torch.sort(self._index.reshape(-1), stable=self._device.type == "cuda").indices
        by_choice = torch.sort(self._index.t().reshape(-1), stable=True).indices
        return (by_choice % self.num_tokens) * self.top_k + by_choice // self.num_tokens
