"""How the tokens of one sequence of a batch are drawn, and where its answer ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Below this temperature the most likely token is certain, and dividing logits by it soon gives more than floats can hold.
LEAST_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one sequence are drawn.

    Attributes:
        temperature: of the softmax; 0 takes the most likely token each time.
        top_p: the share of probability that is left, of the most likely tokens; 1 leaves all.
        top_k: how many of the most likely tokens are left; 0 leaves all.
        seed: two sequences with the same prompt and seed are the same.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken each time."""
        return self.temperature < LEAST_TEMPERATURE


def cut(tokens: list[int], ends: Sequence[int]) -> tuple[list[int], bool]:
    """Return the tokens before the first one that ends an answer, and whether there is such a token."""
    first = next((place for place, token in enumerate(tokens) if token in ends), None)
    return (tokens, False) if first is None else (tokens[:first], True)


def end_ids(model: PreTrainedModel) -> list[int]:
    """Return the tokens that end a model's answers."""
    ends = model.generation_config.eos_token_id
    return [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [ends]
