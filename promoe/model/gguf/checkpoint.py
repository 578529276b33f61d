"""An open GGUF checkpoint: the model of Transformers that its metadata describes, and its tensors as weights."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from promoe.errors import CheckpointError, UnsupportedModelError, shown
from promoe.model.gguf.ends import end_tokens, named_token
from promoe.model.gguf.families import FAMILIES, Family
from promoe.model.gguf.finding import OPTION
from promoe.model.hub import OF_THE_HUB
from promoe.model.opening_checks import MAX_LAYERS
from promoe.stores.encodings.base import StoredTensor
from promoe.stores.encodings.gguf import find_blocks
from promoe.stores.gguf_header import BLOCKS
from promoe.stores.tensor_files import TensorFiles

ARCHITECTURE = "general.architecture"
# By `general.type`: what such a file is, and what to do.
_OTHER_FILES = {
    "adapter": "an adapter (LoRA). Merge it into its model with llama.cpp's llama-export-lora, and give the merged file.",
    "mmproj": "the vision or audio part of a model. Give the file of the language model, which stands beside it.",
    "imatrix": "an importance matrix, with which models are quantised. Give the file of the model.",
}


class GgufCheckpoint:
    """The files of a GGUF checkpoint, open, and the family of its model. Whoever made it closes `files`.

    Raises:
        CheckpointError: it is not the file of a language model, or its metadata is damaged.
        UnsupportedModelError: the model has no experts, or its architecture is not known.
    """

    def __init__(self, files: TensorFiles) -> None:
        self.files = files
        self.path = files.files[0].path
        self.metadata: Mapping[str, Any] = files.files[0].metadata or {}
        self.family = _family(self.path, self.metadata, list(files.tensors))

    @classmethod
    def open(cls, paths: Sequence[Path]) -> GgufCheckpoint:
        """Open the parts of a checkpoint. Raises as the class does; CheckpointError also for files that are damaged."""
        files = TensorFiles.open(paths)
        try:
            return cls(files)
        except BaseException:
            files.close()
            raise

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to open the model in if nobody asks for another: bfloat16 if weights are in blocks, else their own."""
        names = {tensor.dtype_name for tensor in self.files.tensors.values()}
        if "BF16" in names or names & set(BLOCKS):
            return torch.bfloat16
        return torch.float16 if "F16" in names else torch.float32

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of Transformers' `from_pretrained` for a model whose files are open here.

        Args:
            given: arguments of the caller, among them values for fields of the configuration.
        """
        from transformers import AutoConfig

        options = {name: value for name, value in given.items() if name not in (*OF_THE_HUB, OPTION)}
        config = options.pop("config", None)
        if isinstance(config, (str, os.PathLike)):
            config = AutoConfig.from_pretrained(config, trust_remote_code=False)
        if config is None:
            shapes = {name: tensor.shape for name, tensor in self.files.tensors.items()}
            fields = self.family.config(self.metadata, shapes)
            kind = type(AutoConfig.for_model(fields["model_type"]))
            config, options = kind.from_dict(fields, return_unused_kwargs=True, **options)
        return {**options, "config": config, "state_dict": {}}

    def load_config(self, load_config: Any, model: Any) -> Any:
        """Return Transformers' record of how a model is loaded, with this checkpoint's path and conversions."""
        return dataclasses.replace(
            load_config,
            pretrained_model_name_or_path=str(self.path),
            weight_mapping=self.family.conversions(model.config),
        )

    def weights(self) -> dict[str, StoredTensor]:
        """Return the weights by GGUF name: those in blocks, and those whose numbers differ from the model's, are encoded.

        Raises:
            CheckpointError: a tensor is in blocks that cannot be decoded.
        """
        return self.family.weights(self.metadata, find_blocks(self.files.tensors))

    def check_used(self, unused: Collection[str], config: Any) -> None:
        """Raise CheckpointError if tensors of the model's layers become none of its parameters.

        Args:
            unused: tensors that become no parameter.
            config: of the model. Layers that it leaves out do not count.
        """
        for name in sorted(unused):
            layer = re.match(r"blk\.(\d+)\.", name)
            if layer and int(layer[1]) < config.num_hidden_layers:
                raise CheckpointError(
                    f"{self.path} has the tensor {name!r}, which {type(config).__name__} has no parameter for: the model would "
                    "compute something else without it. The file is of a variant of the architecture that promoe does not "
                    "read: open the model's safetensors checkpoint."
                )

    def describe(self, model: Any) -> None:
        """Set what a loaded model should know of the file: its path, where generation ends, and how prompts are padded."""
        model.config.name_or_path = str(self.path)
        model._weight_conversions = None  # they lead to GGUF names; without them, it is saved under Transformers' own
        known = end_tokens(self.metadata)
        generation = getattr(model, "generation_config", None)
        if generation is None or not known:
            return
        generation.eos_token_id = known[0] if len(known) == 1 else known
        generation.bos_token_id = named_token(self.metadata, "bos")
        padding = named_token(self.metadata, "padding")
        generation.pad_token_id = known[0] if padding is None else padding

    def forget_metadata(self) -> None:
        """Free what the files say beside their tensors: a vocabulary can take 100 MB."""
        self.metadata = {}
        for file in self.files.files:
            file.metadata = {}


def _family(path: Path, metadata: Mapping[str, Any], names: Sequence[str]) -> Family:
    kind, architecture = metadata.get("general.type", "model"), metadata.get(ARCHITECTURE)
    if kind in _OTHER_FILES or architecture == "clip":
        raise CheckpointError(f"{path} is {_OTHER_FILES.get(kind, _OTHER_FILES['mmproj'])}")
    if not isinstance(architecture, str):
        raise CheckpointError(
            f"{path} does not name its architecture ({ARCHITECTURE} is {shown(architecture)}). It is not the file of a model, "
            "or not its first part: give the file that was published."
        )
    layers = metadata.get(f"{architecture}.block_count")
    if type(layers) is int and layers > MAX_LAYERS:
        raise CheckpointError(
            f"{path} says {architecture[:100]}.block_count = {layers}, more than {MAX_LAYERS}. It is damaged."
        )
    if not metadata.get(f"{architecture}.expert_count") and not any("_exps" in name for name in names):
        raise UnsupportedModelError(
            f"{path} is a model without experts (architecture '{architecture[:100]}'). promoe is for Mixture-of-Experts "
            "models: open it with llama.cpp or Transformers."
        )
    if architecture not in FAMILIES:
        raise UnsupportedModelError(
            f"{path} is of the architecture '{architecture[:100]}', which promoe cannot open from GGUF. It can open "
            f"{', '.join(sorted(FAMILIES))}. Open the model's safetensors checkpoint instead."
        )
    return FAMILIES[architecture]
