"""The (token, choice) pairs of one MoE layer's call, by expert. Knows nothing of weights, slots or kernels.

A pair's position is `token * K + choice`. Within an expert the pairs keep the order in which the stock kernel multiplies
them: the bits of a row of a matrix product may depend on which row it is.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property

import torch

from promoe.transfer.devices import send

# Up to here (decode) Python lists beat tensor operations, which cost some microseconds each.
FEW_PAIRS = 64


@dataclass(frozen=True)
class Selection:
    """The P pairs of some experts, expert by expert in ascending id.

    Attributes:
        experts: their ids, ascending.
        sizes: pairs per expert.
        positions: `[P]` in host memory, position of each pair; a list where the pairs of the whole call are few.
        top_k: K, choices per token.
        one_each: there is one token, and no expert has it twice.
        device: where its tensors are.
        listed: `ids` are wanted however many they are.
    """

    experts: list[int]
    sizes: list[int]
    positions: list[int] | torch.Tensor
    top_k: int
    one_each: bool
    device: torch.device
    listed: bool = False

    def __len__(self) -> int:
        """P."""
        return len(self.positions)

    @cached_property
    def position_tensor(self) -> torch.Tensor:
        """`positions` as a tensor where the others are."""
        return send(self.positions, self.device)

    @cached_property
    def ids(self) -> list[int] | None:
        """The expert of each pair, as a list where there are few pairs or it is wanted in any case."""
        if isinstance(self.positions, torch.Tensor) and not self.listed:
            return None
        if self.one_each:
            return self.experts
        return [expert for expert, size in zip(self.experts, self.sizes, strict=True) for _ in range(size)]

    @cached_property
    def index(self) -> torch.Tensor:
        """`[P, 1]`, the expert of each pair."""
        if self.ids is not None:
            return send(self.ids, self.device).unsqueeze(1)
        experts = torch.tensor(self.experts, device=self.device)
        return experts.repeat_interleave(torch.tensor(self.sizes, device=self.device)).unsqueeze(1)

    @cached_property
    def tokens(self) -> torch.Tensor | None:
        """`[P]`, the token of each pair; None where there is `one_each`."""
        return None if self.one_each else self.position_tensor // self.top_k

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """The pairs' inputs `[P, H]` out of `hidden[T, H]`."""
        if self.tokens is None:
            return hidden.expand(len(self), -1)
        return hidden[self.tokens]

    def gather_each(self, hidden: torch.Tensor) -> Sequence[torch.Tensor]:
        """The same of each expert."""
        if self.tokens is None:
            return [hidden] * len(self)
        each: Sequence[torch.Tensor] = hidden[self.tokens].split(self.sizes)
        return each

    def tokens_by_expert(self) -> Sequence[torch.Tensor | None]:
        """Per expert the tokens of its pairs."""
        return [None] * len(self.sizes) if self.tokens is None else self.tokens.split(self.sizes)


class Pairs:
    """All pairs of a call, and which experts are still to be computed.

    Args:
        top_k_index: `[T, K]` in host memory, expert ids in 0..num_experts-1.
        num_experts: E.
        by_choice: within an expert, all tokens' first choices come first, as in the eager loops. Else the pairs are where
            torch.sort puts them, as in grouped_mm: it is not stable, so asking it is the only way to know.
        ids: `top_k_index.tolist()`, where the caller has it.
        device: that the layer computes on; None: the processor.

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
        """The experts in `ready` that are still to be computed, ascending; from now on they count as computed."""
        taken = [expert for expert in self.missing if expert in ready]
        if taken:
            self.missing = [expert for expert in self.missing if expert not in ready]
        return taken

    def most_of_an_expert(self) -> int:
        """Pairs of the expert that has most; 0 where there are none."""
        by_expert: Mapping[int, Sized] = self._few or self._many
        return max(map(len, by_expert.values()), default=0)

    def parts(self, experts: list[int], most: int) -> Iterator[list[int]]:
        """`experts` in parts of up to `most` pairs, or of one expert that has more."""
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
        """The pairs of `experts` (ascending, each with at least one pair)."""
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
        """`[T * K]`: all positions, by expert, in the kernel's order."""
        if not self._by_choice:
            # CUDA's sort is stable, except for up to 32 numbers.
            return torch.sort(self._index.reshape(-1), stable=self._device.type == "cuda").indices
        by_choice = torch.sort(self._index.t().reshape(-1), stable=True).indices
        return (by_choice % self.num_tokens) * self.top_k + by_choice // self.num_tokens
