"""Counts the misses of Belady's choice, which knows the future: no cache of the same size can do better.

Each layer has its own slots. A layer's experts are one event, and an expert may be dropped right after its use, before the
next one of the same visit comes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

NEVER = np.iinfo(np.int64).max


def misses(experts: npt.NDArray[np.integer[Any]], num_experts: int, num_slots: int) -> npt.NDArray[np.intp]:
    """Return how many experts each visit finds absent, `[num_tokens, num_layers]`, beginning with empty slots.

    Args:
        experts: ids `[num_tokens, num_layers, top_k]`, distinct within a token and layer.
        num_experts: experts of every layer.
        num_slots: slots of every layer.
    """
    num_tokens, num_layers, _ = experts.shape
    layers = np.arange(num_layers)[:, None]
    ids = experts.astype(np.intp)
    # The token of the next use of the same expert, times E, plus the expert: no two of a layer are the same.
    following = np.empty(experts.shape, dtype=np.int64)
    next_use = np.full((num_layers, num_experts), NEVER)
    for token_idx in range(num_tokens - 1, -1, -1):
        now = (layers, ids[token_idx])
        following[token_idx] = next_use[now]
        next_use[now] = token_idx * num_experts + ids[token_idx]
    found = np.empty((num_tokens, num_layers), dtype=np.intp)
    due = np.full((num_layers, num_experts), NEVER)  # next use of what is held; NEVER: not held, or not needed any more
    for token_idx in range(num_tokens):
        now = (layers, ids[token_idx])
        found[token_idx] = np.count_nonzero(due[now] == NEVER, axis=1)
        due[now] = following[token_idx]
        if num_slots < num_experts:
            last = np.partition(due, num_slots - 1, axis=1)[:, num_slots - 1 : num_slots]
            due[due > last] = NEVER
    return found
