"""Which experts each token of a model used: traces that hold ids only, no hidden states, as the public ones do.

Knows arrays and files; not models or predictors.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy_format

from promoe.errors import PromoeError
from promoe.files import open_plain

if TYPE_CHECKING:
    import torch

REQUIRED = ("experts", "prompt_lengths", "token_index")
# What one array may take in memory: a packed one can be a thousand times its size in the file.
MAX_ARRAY_BYTES = 4 << 30
# Of a layer. Tables have a row for each, so an id of a billion must not make a billion rows.
MAX_EXPERTS = 1 << 15
_PIECE_BYTES = 1 << 20
_HEADER_READERS = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}


class TraceError(PromoeError):
    """A trace is missing or is not what it should be; the message says what was expected and found."""


class GateRecords(Protocol):
    """What gates saw, kept somewhere; see `recorded_traces.RecordedTrace`."""

    @property
    def gates(self) -> Sequence[dict[str, torch.Tensor]]:
        """Parameters and buffers of each layer's gate, by name."""
        ...

    def gate_inputs(self, rows: slice) -> torch.Tensor:
        """All layers', bfloat16 `[n, layers, hidden_size]`."""
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
        ends = np.minimum(np.cumsum(self.prompt_lengths), min(num_tokens, self.num_tokens))
        lengths = np.diff(ends, prepend=0)
        return self._tokens(slice(num_tokens), lengths[lengths > 0])

    def last(self, num_tokens: int) -> RoutingTrace:
        """At most so many tokens up to the end; the first prompt may have lost its beginning."""
        skipped = max(0, self.num_tokens - num_tokens)
        lengths = np.diff(np.maximum(np.cumsum(self.prompt_lengths), skipped), prepend=skipped)
        return self._tokens(slice(skipped, None), lengths[lengths > 0])

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
        with open(open_plain(path), "rb") as file, zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            missing = [name for name in REQUIRED if f"{name}.npy" not in names]
            if missing:
                raise TraceError(
                    f"{path} has no array {missing[0]!r}; it has {_listed(names)}. A routing trace needs {', '.join(REQUIRED)}."
                )
            experts, lengths, token_ids = (_read_array(archive.getinfo(f"{name}.npy"), archive) for name in REQUIRED)
    except OSError as error:
        raise TraceError(f"Cannot read the trace {path}: {error.strerror or error}. Check the path.") from error
    # Of an archive that is packed in a way that Python cannot undo, or encrypted: RuntimeError.
    except (ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise TraceError(f"{path} is not a NumPy archive of plain arrays: {error}.") from error
    return _checked(path, experts, lengths, token_ids)


def _listed(names: list[str]) -> str:
    return ", ".join(name.removesuffix(".npy")[:80] for name in names[:8]) or "none"


def _read_array(member: zipfile.ZipInfo, archive: zipfile.ZipFile) -> npt.NDArray[Any]:
    """An array of the archive in this machine's byte order, read after its header was compared with the member's size.

    Raises:
        ValueError: it is none, or not of plain numbers, or too large.
    """
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{member.filename} is packed in a way that NumPy does not use")
    with archive.open(member) as stream:
        try:
            version = npy_format.read_magic(stream)
            shape, in_columns, dtype = _HEADER_READERS[version](stream)
        except (
            Exception
        ) as error:  # the header is a literal of Python, and whatever reading that can raise comes through
            raise ValueError(
                f"{member.filename} has no sound header ({type(error).__name__}: {str(error)[:200]})"
            ) from error
        nbytes, found_bytes = math.prod(shape) * dtype.itemsize, member.file_size - stream.tell()
        if dtype.hasobject or min(shape, default=0) < 0:
            raise ValueError(f"{member.filename} is of {dtype}, {shape}")
        if nbytes != found_bytes:
            raise ValueError(
                f"{member.filename} is {dtype}, {shape}, which is {nbytes} bytes, but holds {found_bytes} bytes"
            )
        if nbytes > MAX_ARRAY_BYTES:
            raise ValueError(f"{member.filename} is {nbytes} bytes, more than {MAX_ARRAY_BYTES >> 30} GiB")
        content = bytearray(nbytes)
        view, done = memoryview(content), 0
        while done < nbytes:
            piece = stream.read(min(_PIECE_BYTES, nbytes - done))
            if not piece:
                raise ValueError(f"{member.filename} ends after {done} of {nbytes} bytes")
            view[done : done + len(piece)] = piece
            done += len(piece)
        stream.read(1)  # the end, where its checksum is compared
    array = np.frombuffer(content, dtype) if nbytes else np.empty(0, dtype)
    return array.astype(dtype.newbyteorder("="), copy=False).reshape(shape, order="F" if in_columns else "C")


def _checked(path: Path, experts: Any, lengths: Any, token_ids: Any) -> RoutingTrace:
    def require(holds: bool, what: str) -> None:
        if not holds:
            raise TraceError(f"{path} is not a routing trace: {what}.")

    arrays = dict(zip(REQUIRED, (experts, lengths, token_ids), strict=True))
    for name, array in arrays.items():
        # Not np.integer, which spans of time are a kind of.
        require(array.dtype.kind in "iu", f"{name!r} must be whole numbers, found {array.dtype}")
    require(experts.ndim == 3, f"'experts' must be [num_tokens, num_layers, top_k], found shape {experts.shape}")
    require(experts.size > 0, f"'experts' is empty, shape {experts.shape}")
    require(token_ids.shape == experts.shape[:1], f"{experts.shape[0]} tokens, but {token_ids.shape} token ids")
    require(int(token_ids.max()) < 2**63, f"a token id is {int(token_ids.max())}")
    require(lengths.ndim == 1 and bool((lengths > 0).all()), "every prompt must have at least one token")
    total = int(lengths.sum(dtype=object))  # sums of 64 bits wrap
    require(total == len(experts), f"prompts of {total} tokens in all, but {len(experts)} rows")
    least, most = int(experts.min()), int(experts.max())
    require(least >= 0 and most < MAX_EXPERTS, f"expert ids must be 0 to {MAX_EXPERTS - 1}, found {least} to {most}")
    require(are_distinct(experts), "a token uses an expert of a layer twice")
    # Sums and differences of numbers without a sign would be numbers without a sign, or floats.
    return RoutingTrace(experts, token_ids.astype(np.int64), lengths.astype(np.int64), most + 1)


def are_distinct(experts: npt.NDArray[np.integer[Any]]) -> bool:
    """Whether no token uses an expert of a layer twice, of ids `[num_tokens, num_layers, top_k]`."""
    return bool((np.diff(np.sort(experts, axis=2), axis=2) != 0).all())
