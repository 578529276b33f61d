"""What a family is: an architecture of GGUF files and the model of Transformers that it becomes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from promoe.errors import CheckpointError
from promoe.stores.encodings.base import EncodedTensor, Encoding, StoredTensor
from promoe.stores.safetensors_header import TensorRange

from .file import File, Metadata, Shapes


@dataclass(frozen=True)
class Family:
    """How one architecture of GGUF files becomes a model of Transformers."""

    config: Callable[[Metadata, Shapes], dict[str, Any]]
    """Return the fields of the model's configuration, `model_type` among them. Raises CheckpointError if the file says
    something that the model cannot do, or has tensors that it does not know."""
    conversions: Callable[[Any], list[Any]]
    """Return Transformers' conversions from the file's tensors to the model's parameters, given the configuration."""
    computed: Mapping[str, Encoding] = field(default_factory=dict)
    """How tensors other than experts are decoded that the file has not as they are, by their names in a layer, or whole."""
    unused: frozenset[str] = frozenset()
    """Tensors of the file that no parameter comes from."""

    def weights(self, metadata: Metadata, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Return the tensors of a file as the weights that they stand for, without those that are not used."""
        used = File(metadata, {}).num_layers
        return {
            name: self._weight(tensor)
            for name, tensor in tensors.items()
            if name not in self.unused and ((layer := re.match(r"blk\.(\d+)\.", name)) is None or int(layer[1]) < used)
        }

    def _weight(self, tensor: StoredTensor) -> StoredTensor:
        encoding = self.computed.get(re.sub(r"^blk\.\d+\.", "", tensor.name))
        if encoding is None:
            return tensor
        if not isinstance(tensor, TensorRange):
            raise CheckpointError(
                f"The checkpoint's {tensor.name!r} is in {tensor.dtype_name}, but F32 was expected: its values are not the "
                "weights themselves. Open a file of the model that keeps small tensors in F32, as llama.cpp does."
            )
        return EncodedTensor(tensor.name, tensor.shape, (tensor,), encoding)
