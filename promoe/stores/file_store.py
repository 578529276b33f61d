"""Experts that stay in their safetensors files: none of their bytes are in RAM until a chunk is read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from promoe.stores.base import Chunk
from promoe.stores.checkpoint_names import BankSpec
from promoe.stores.checkpoint_plan import CheckpointPlan, plan_experts
from promoe.stores.layer_plan import LayerPlan, PlannedStore
from promoe.stores.layout import DEFAULT_CHUNK_BYTES
from promoe.stores.tensor_files import TensorFile, TensorFiles, locate_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FileStore(PlannedStore):
    """A store over the files of a checkpoint. A chunk's source is a file.

    It takes over `files` and closes them. `promoe.model.opening` makes plan and files.
    """

    def __init__(self, files: TensorFiles, plan: CheckpointPlan) -> None:
        super().__init__(plan.layers)
        self.files: Sequence[TensorFile] = files.files
        self._needed = frozenset().union(*(layer.source_idxs for layer in plan.layers))

    @classmethod
    def open(
        cls,
        checkpoint: str | os.PathLike[str],
        model: PreTrainedModel,
        layers: Sequence[Sequence[BankSpec]],
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> FileStore:
        """Serve the experts of a model from the files of the checkpoint that it was loaded from. Reads headers only.

        Args:
            checkpoint: a local folder, a `.safetensors` file or an index file.
            model: determines how the checkpoint's names become the model's; it is not changed.
            layers: the parameters of each MoE layer, as `promoe.model.meta_model.bank_specs` returns them.
            chunk_bytes: longest chunk, a multiple of 4096.

        Raises:
            CheckpointError: files are missing, damaged or truncated, or do not hold these experts.
            ConfigError: `chunk_bytes` is not a positive multiple of 4096.
        """
        from transformers.conversion_mapping import get_model_conversion_mapping

        # Not state_dict(), which would touch the parameters' values.
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        names |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
        files = TensorFiles.open(locate_files(checkpoint))
        try:
            conversions = get_model_conversion_mapping(model)
            plan = plan_experts(layers, files.tensors, conversions, names, model.base_model_prefix, chunk_bytes)
        except BaseException:
            files.close()
            raise
        store = cls(files, plan)
        store.close_others()
        return store

    @property
    def layers(self) -> Sequence[LayerPlan]:
        """The plan of each MoE layer."""
        return self._layers

    def replanned(self, layers: Sequence[LayerPlan]) -> FileStore:
        """Return a store with other plans over the same open files, which both own: closing one closes both."""
        return FileStore(TensorFiles(self.files), CheckpointPlan(tuple(layers)))

    def close_others(self) -> None:
        """Close the files without experts, of which nothing is read any more."""
        for file_idx, file in enumerate(self.files):
            if file_idx not in self._needed:
                file.close()

    def read(self, chunk: Chunk, destination: memoryview) -> None:
        """Read the chunk's bytes as they are in the file into `destination`, `source_nbytes` long.

        Raises:
            OSError: the store was closed, the device failed, or the file ends early; names file, offset, bytes.
        """
        assert len(destination) == chunk.source_nbytes, (len(destination), chunk)
        if chunk.parts:
            for part in chunk.parts:
                target = destination[part.offset_bytes : part.offset_bytes + part.nbytes]
                self.files[part.source_idx].read_into(part.source_offset_bytes, target)
            return
        self.files[chunk.source_idx].read_into(chunk.source_offset_bytes, destination)

    def source(self, chunk: Chunk) -> tuple[Path, int]:
        """Return the chunk's file and the offset of its first byte there."""
        return self.files[chunk.source_idx].path, chunk.source_offset_bytes

    def describe(self, chunk: Chunk) -> str:
        """Return where the chunk lies: "tensor layers.0.mlp.experts.3.up_proj.weight, file model.safetensors, offset 1234"."""
        file, start = self.files[chunk.source_idx], chunk.source_offset_bytes
        names = [
            tensor.name
            for tensor in file.tensors.values()
            if tensor.offset_bytes < start + chunk.source_nbytes and start < tensor.offset_bytes + tensor.nbytes
        ]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"tensor {names[0]}{more}, file {file.path.name}, offset {start}"

    def close(self) -> None:
        """Close the files once the reads in flight have ended. Closing twice is allowed."""
        for file in self.files:
            file.close()
