"""Recorded traces, read: what every gate saw and chose, token by token, in `datasets` Arrow files that are read in place.

`trace_folder` says what a folder holds, `trace_parts` what a row, and `trace_writer` writes them. Knows files and arrays;
not models.
"""

from __future__ import annotations

import os
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from promoe.files import open_plain
from promoe.training.routing_traces import RoutingTrace, TraceError, are_distinct
from promoe.training.trace_folder import DECODE, GATES_FILE, part_paths, read_info
from promoe.training.trace_parts import distinct_prompts, flat, open_part


class RecordedTrace:
    """A trace that is read in place: opening takes no memory, rows are gathered as they are asked for.

    Args:
        folder: written by `TraceWriter`.

    Raises:
        TraceError: it holds no such trace, no rows, or prompts that are there twice.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.info = read_info(self.folder)
        parts = [open_part(path, self.info) for path in part_paths(self.folder)]
        if not parts:
            raise TraceError(f"{self.folder} holds no rows yet. Record some with `promoe-train collect`.")
        self.prompts = distinct_prompts(parts, self.folder)
        """`[p]`, their positions in the data, in the order of the rows."""
        self._lengths = np.concatenate([part.lengths for part in parts])
        self._parts = [part.table for part in parts]
        self._starts = np.array([0, *accumulate(map(len, self._parts))])

    @property
    def num_tokens(self) -> int:
        """Rows."""
        return int(self._starts[-1])

    @cached_property
    def routing(self) -> RoutingTrace:
        """Its ids alone.

        Raises:
            TraceError: layers differ in their experts, or ids are damaged.
        """
        info = self.info
        if len(set(info.num_experts)) > 1 or len(set(info.top_k)) > 1:
            raise TraceError(
                f"{self.folder}: layers with different numbers of experts ({sorted(set(info.num_experts))}, top "
                f"{sorted(set(info.top_k))}) are not supported here yet. Choose a model whose layers are alike."
            )
        experts = np.concatenate([flat(part, "experts") for part in self._parts])
        if experts.min() < 0 or experts.max() >= info.num_experts[0]:
            raise TraceError(
                f"{self.folder} is damaged: it has ids {experts.min()} to {experts.max()}, of {info.num_experts[0]} experts. "
                "Record it anew into an empty folder."
            )
        experts = experts.reshape(self.num_tokens, info.num_layers, -1)
        if not are_distinct(experts):
            raise TraceError(
                f"{self.folder} is damaged: a token uses an expert of a layer twice. Record it anew into an empty folder."
            )
        return RoutingTrace(
            experts=experts,
            token_ids=self._column("token_id"),
            prompt_lengths=self._lengths,
            num_experts=info.num_experts[0],
            generated=self._column("phase") == DECODE,
            recorded=self,
        )

    def gate_inputs(self, rows: npt.NDArray[np.integer[Any]] | slice) -> torch.Tensor:
        """bfloat16 `[n, layers, hidden_size]` of some rows, in the order asked for."""
        bits = torch.from_numpy(self._gather("gate_input", rows))
        return bits.view(torch.bfloat16).view(len(bits), self.info.num_layers, self.info.hidden_size)

    def layer_inputs(self, layer_idx: int, rows: slice) -> torch.Tensor:
        """One layer's gate inputs, bfloat16 `[n, hidden_size]`, of rows that follow each other."""
        size = self.info.hidden_size
        columns = slice(layer_idx * size, (layer_idx + 1) * size)
        start, stop, step = rows.indices(self.num_tokens)
        assert step == 1, f"rows that do not follow each other: {rows}"
        pieces = [
            flat(part, "gate_input")[max(0, start - first) : max(0, stop - first), columns]
            for part, first in zip(self._parts, self._starts.tolist(), strict=False)
        ]
        return torch.from_numpy(np.concatenate(pieces)).view(torch.bfloat16)

    def gate_logits(self, rows: npt.NDArray[np.integer[Any]] | slice) -> npt.NDArray[np.float32]:
        """`[n, sum of experts over layers]` of some rows."""
        return self._gather("gate_logits", rows)

    @cached_property
    def gates(self) -> list[dict[str, torch.Tensor]]:
        """Parameters and buffers of each layer's gate, by name.

        Raises:
            TraceError: they are missing.
        """
        path = self.folder / GATES_FILE
        try:
            os.close(open_plain(path))
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise TraceError(
                f"Cannot read the gates' weights {path}: {error}. Repeat `promoe-train collect`."
            ) from error
        gates: list[dict[str, torch.Tensor]] = [{} for _ in range(self.info.num_layers)]
        for layer_idx, gate in enumerate(gates):
            prefix = f"{layer_idx}."
            gate |= {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        if not all(gates):
            raise TraceError(f"{path} does not hold the gates of all layers. Repeat `promoe-train collect`.")
        return gates

    def _column(self, name: str) -> npt.NDArray[Any]:
        return np.concatenate([part.column(name).to_numpy() for part in self._parts])

    def _gather(self, name: str, rows: npt.NDArray[np.integer[Any]] | slice) -> npt.NDArray[Any]:
        wanted = np.arange(self.num_tokens)[rows] if isinstance(rows, slice) else rows
        first = flat(self._parts[0], name)
        result = np.empty((len(wanted), first.shape[1]), first.dtype)
        owner = np.searchsorted(self._starts, wanted, side="right") - 1
        for part_idx in np.unique(owner):
            mine = owner == part_idx
            result[mine] = flat(self._parts[part_idx], name)[wanted[mine] - self._starts[part_idx]]
        return result
