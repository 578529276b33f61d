"""Serves a GGUF file with llama.cpp, through the low-level functions of llama-cpp-python.

All settings are llama.cpp's defaults, but for the number of threads and the length of the context: the file is mapped, and
weights whose type has a faster layout on this processor are copied into it (`use_extra_bufts`).
"""

from __future__ import annotations

import ctypes
import itertools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from promoe.commands.measure import REPETITION_PENALTY, Generation
from promoe.errors import PromoeError


class LlamaCppError(PromoeError):
    """llama.cpp could not open a file, or not compute."""


class LlamaCpp:
    """A model that llama.cpp serves.

    Args:
        path: a GGUF file.
        context_tokens: of the longest prompt and its answer.
        threads: that compute.
        repack: whether weights are copied into a faster layout where there is one. The copies are not part of the mapped
            file, so the kernel cannot drop them.
        banned: ids that are never generated.

    Raises:
        LlamaCppError: the file cannot be opened.
    """

    def __init__(
        self, path: Path, context_tokens: int, threads: int, *, repack: bool = True, banned: Sequence[int] = ()
    ) -> None:
        import llama_cpp

        self._library: Any = llama_cpp
        self._banned = list(banned)
        self._silence = llama_cpp.llama_log_callback(
            lambda level, text, of_user: None
        )  # must live as long as the library
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.use_extra_bufts = repack
        self._model: Any = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        if not self._model:
            raise LlamaCppError(f"llama.cpp could not open '{path}' ({path.stat().st_size} bytes).")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = context_tokens
        settings.n_threads = settings.n_threads_batch = threads
        self._context: Any = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise LlamaCppError(f"llama.cpp could not make a context of {context_tokens} tokens for '{path}'.")
        self._most_at_once = int(llama_cpp.llama_n_batch(self._context))
        self.num_tokens = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model)))
        """Tokens that the model knows."""

    def generate(
        self,
        ids: Sequence[int],
        new_tokens: int,
        *,
        seconds: float = math.inf,
        fewest_tokens: int = 1,
    ) -> Generation:
        """Answer a prompt greedily, from an empty context, and time it.

        Tokens that are there already are made less likely, as in Transformers with `REPETITION_PENALTY`.

        Args:
            ids: of the prompt.
            new_tokens: to generate.
            seconds: after these, no further token is generated.
            fewest_tokens: generated in any case.

        Raises:
            LlamaCppError: it could not compute.
        """
        start_s = time.perf_counter()
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
        seen, tokens, times_s = list(ids), list[int](), list[float]()
        logits = self._read(ids)
        while True:
            tokens.append(likeliest(logits, seen, self._banned))
            times_s.append(time.perf_counter())
            seen.append(tokens[-1])
            late = len(tokens) >= fewest_tokens and times_s[-1] - start_s > seconds
            if len(tokens) == new_tokens or late:
                break
            logits = self._read(tokens[-1:])
        gaps_s = tuple(after - before for before, after in itertools.pairwise(times_s))
        return Generation(tuple(tokens), times_s[0] - start_s, gaps_s)

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits `[num_tokens]` of the token after a prompt."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
        return self._read(ids)

    def close(self) -> None:
        """Free all memory. Safe to repeat."""
        if self._context:
            self._library.llama_free(self._context)
            self._library.llama_model_free(self._model)
            self._context = self._model = None

    def _read(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens to the context; return the logits after the last one."""
        for start in range(0, len(ids), self._most_at_once):
            piece = ids[start : start + self._most_at_once]
            array = (ctypes.c_int32 * len(piece))(*piece)
            code = self._library.llama_decode(self._context, self._library.llama_batch_get_one(array, len(piece)))
            if code != 0:
                raise LlamaCppError(f"llama.cpp could not compute {len(piece)} tokens: llama_decode returned {code}.")
        found = self._library.llama_get_logits_ith(self._context, -1)
        copied: NDArray[np.float32] = np.ctypeslib.as_array(found, shape=(self.num_tokens,)).copy()
        return copied


def likeliest(logits: NDArray[np.float32], seen: Sequence[int], banned: Sequence[int]) -> int:
    """Return the id that greedy search with a repetition penalty takes (Keskar et al. 2019, as in Transformers).

    Args:
        logits: `[num_tokens]`.
        seen: ids of the prompt and of the answer up to here.
        banned: ids that are not taken.
    """
    scores, repeated = logits.copy(), np.unique(np.asarray(seen, dtype=np.int64))
    before = scores[repeated]
    scores[repeated] = np.where(before < 0, before * REPETITION_PENALTY, before / REPETITION_PENALTY)
    scores[list(banned)] = -np.inf
    return int(scores.argmax())
