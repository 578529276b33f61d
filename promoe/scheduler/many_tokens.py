"""What differs where many tokens visit a layer: the order of its experts, and how the next layer's are expected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

# A predictor is shown no more tokens of a visit than this. Of more sequences that are decoded together it is shown some, and
# longer prompts it is not asked about.
MOST_SHOWN = 8
# A visit of more tokens that uses at least this share of its layer's experts is not predicted from: the next layer will
# use nearly all of its own, which are fetched in order.
STREAMED_SHARE = 0.7


def most_needed_first(tokens: Iterable[Sequence[int]]) -> list[int]:
    """Return the distinct experts of tokens `[num_tokens][top_k]`, those of most tokens first, else by id.

    Loads take equally long, and computing an expert takes longer the more tokens it has. With the longest first, the others
    load meanwhile (the order of Johnson 1954 for a machine after another).
    """
    counts = Counter(chain.from_iterable(tokens))
    return sorted(counts, key=lambda expert_idx: (-counts[expert_idx], expert_idx))


def uses_most(num_tokens: int, num_used: int, num_experts: int) -> bool:
    """Return whether a visit says no more than that all experts of the next layer will be used."""
    return num_tokens > MOST_SHOWN and num_used >= STREAMED_SHARE * num_experts


def shown(num_tokens: int) -> slice:
    """Return which tokens of a visit a predictor is shown: all or some at even distances, the same ones in each layer."""
    return slice(None, None, -(-num_tokens // MOST_SHOWN))


def of_all(probabilities: npt.NDArray[Any], num_shown: int, num_tokens: int) -> npt.NDArray[Any]:
    """Return the probability that any of all tokens uses an expert, from that of any of those that were shown.

    The others are taken to be like them, and to choose by themselves.
    """
    result: npt.NDArray[Any] = 1.0 - (1.0 - np.clip(probabilities, 0.0, 1.0)) ** (num_tokens / num_shown)
    return result
