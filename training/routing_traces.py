"""Which experts each token of a model used: traces that hold ids only, no hidden states, as the public ones do.

Knows arrays and files; not models or predictors.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from promoe.errors import PromoeError

if TYPE_CHECKING:
    import torch

REQUIRED = ("experts", "prompt_lengths", "token_index")


class TraceError(PromoeError):
    """A trace is missing or is not what it should be; the message says what was expected and found."""


class GateRecords(Protocol):
    """What gates saw, kept somewhere; see `recorded_traces.RecordedTrace`."""

    @property
    def gates(self) -> list[dict[str, torch.Tensor]]:
        """Parameters and buffers of each layer's gate, by name."""
        ...

    def layer_inputs(self, layer_idx: int, rows: slice) -> torch.Tensor:
        """One layer's gate inputs, bfloat16 `[n, hidden_size]`."""
        ...


@dataclass(frozen=True)
class RoutingTrace:
    """Routing of some prompts, token by token.

    Args:
        experts: ids `[num_tokens, num_layers, top_k]`, distinct within a token and layer.
        token_ids: `[num_tokens]`.
        prompt_lengths: tokens of each prompt, in order; their sum is `num_tokens`.
        num_experts: of every layer.
        generated: `[num_tokens]`, which tokens the model wrote itself (decode); None: unknown.
        recorded: where the gate inputs of these tokens are; None: there are ids only.
        first_row: the first token's row there.
    """

    experts: npt.NDArray[np.integer[Any]]
    token_ids: npt.NDArray[np.integer[Any]]
    prompt_lengths: npt.NDArray[np.integer[Any]]
    num_experts: int
    generated: npt.NDArray[np.bool_] | None = None
    recorded: GateRecords | None = None
    first_row: int = 0

    @property
    def num_tokens(self) -> int:
        """Rows."""
        return len(self.experts)

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return int(self.experts.shape[1])

    @property
    def top_k(self) -> int:
        """Experts per token and layer."""
        return int(self.experts.shape[2])

    @property
    def prompt_starts(self) -> npt.NDArray[np.intp]:
        """The row of each prompt's first token."""
        return np.concatenate([[0], np.cumsum(self.prompt_lengths)[:-1]]).astype(np.intp)

    def prompts(self, start: int, stop: int) -> RoutingTrace:
        """Prompts `start` to `stop`, without the latter."""
        rows = np.concatenate([[0], np.cumsum(self.prompt_lengths)])
        return self._tokens(slice(rows[start], rows[stop]), self.prompt_lengths[start:stop])

    def first(self, num_tokens: int) -> RoutingTrace:
        """At most so many tokens from the start; the last prompt may be cut off."""
        ends = np.minimum(np.cumsum(self.prompt_lengths), num_tokens)
        lengths = np.diff(ends, prepend=0)
        return self._tokens(slice(num_tokens), lengths[lengths > 0])

    def tokens(self, rows: slice) -> RoutingTrace:
        """Some tokens in a row, as one prompt: for looking at them, not for splitting."""
        count = len(range(*rows.indices(self.num_tokens)))
        return self._tokens(rows, np.array([count]))

    def _tokens(self, tokens: slice, prompt_lengths: npt.NDArray[np.integer[Any]]) -> RoutingTrace:
        return replace(
            self,
            experts=self.experts[tokens],
            token_ids=self.token_ids[tokens],
            prompt_lengths=prompt_lengths,
            generated=None if self.generated is None else self.generated[tokens],
            first_row=self.first_row + (tokens.start or 0),
        )

    def split(self, share: float = 0.8) -> tuple[RoutingTrace, RoutingTrace]:
        """The first `share` of the prompts, and the rest: by prompt, in the order of the file.

        Raises:
            TraceError: one of the two would be empty.
        """
        num_prompts = len(self.prompt_lengths)
        cut = round(share * num_prompts)
        if not 0 < cut < num_prompts:
            raise TraceError(
                f"A trace of {num_prompts} prompts cannot be split by prompt, {share:.0%} to learn from and the rest to "
                "evaluate. Collect more prompts."
            )
        return self.prompts(0, cut), self.prompts(cut, num_prompts)

    def visits(self) -> Iterator[tuple[int, int, list[int]]]:
        """(token, layer, its experts in ascending order), token by token, layer by layer."""
        for token_idx, layers in enumerate(np.sort(self.experts, axis=2).tolist()):
            for layer_idx, ids in enumerate(layers):
                yield token_idx, layer_idx, ids


def load_npz(path: str | PathLike[str]) -> RoutingTrace:
    """Read a trace of ids from a NumPy archive. Never unpickles.

    Args:
        path: an `.npz` with `experts` `[num_tokens, num_layers, top_k]`, `prompt_lengths` `[num_prompts]` and `token_index`
            `[num_tokens]`, all of whole numbers; other arrays are ignored.

    Raises:
        TraceError: the file is missing or no such archive, or its arrays do not fit together.
    """
    path = Path(path)
    try:
        with path.open("rb") as file, zipfile.ZipFile(file):  # an array alone, or a pickle, is no archive
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                missing = [name for name in REQUIRED if name not in archive]
                if missing:
                    raise TraceError(
                        f"{path} has no array {missing[0]!r}; it has {', '.join(archive.files) or 'none'}. A routing trace "
                        f"needs {', '.join(REQUIRED)}."
                    )
                experts, lengths, token_ids = (archive[name] for name in REQUIRED)
    except OSError as error:
        raise TraceError(f"Cannot read the trace {path}: {error.strerror or error}. Check the path.") from error
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise TraceError(f"{path} is not a NumPy archive of plain arrays: {error}.") from error
    return _checked(path, experts, lengths, token_ids)


def _checked(path: Path, experts: Any, lengths: Any, token_ids: Any) -> RoutingTrace:
    def require(holds: bool, what: str) -> None:
        if not holds:
            raise TraceError(f"{path} is not a routing trace: {what}.")

    arrays = dict(zip(REQUIRED, (experts, lengths, token_ids), strict=True))
    for name, array in arrays.items():
        require(np.issubdtype(array.dtype, np.integer), f"{name!r} must be whole numbers, found {array.dtype}")
    require(experts.ndim == 3, f"'experts' must be [num_tokens, num_layers, top_k], found shape {experts.shape}")
    require(experts.size > 0, f"'experts' is empty, shape {experts.shape}")
    require(token_ids.shape == experts.shape[:1], f"{experts.shape[0]} tokens, but {token_ids.shape} token ids")
    require(lengths.ndim == 1 and (lengths > 0).all(), "every prompt must have at least one token")
    total = int(lengths.sum())
    require(total == len(experts), f"prompts of {total} tokens in all, but {len(experts)} rows")
    require(int(experts.min()) >= 0, "expert ids must be 0 or more")
    ordered = np.sort(experts, axis=2)
    require(bool((np.diff(ordered, axis=2) != 0).all()), "a token uses an expert of a layer twice")
    return RoutingTrace(experts, token_ids, lengths, int(experts.max()) + 1)
