"""How checkpoints keep a weight in fewer bits, and a tensor that is kept so."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from promoe.stores.safetensors_header import TensorRange


class Encoding(ABC):
    """A way to keep a weight in fewer bits. Two are equal if they decode alike.

    Attributes:
        name: for messages, such as "fp8" or "Q4_K".
    """

    name: str

    @abstractmethod
    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write the weight into `out`: computed in fp32, and rounded once to the dtype of `out`.

        Needs little memory besides `out`, whatever its size.

        Args:
            parts: the tensors of the file that make up the weight, in the order of `EncodedTensor.parts`.
            out: of the weight's shape, contiguous.
        """


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """A weight that a checkpoint keeps in fewer bits, as one or several tensors of its files.

    To all other code it is the weight itself: it has the name and shape that the weight would have in 16 bits. Where
    weights are stacked, all parts are stacked along the same first dimension.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[TensorRange, ...]
    encoding: Encoding

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        return sum(part.nbytes for part in self.parts)

    @property
    def dtype_name(self) -> str:
        """What stands in place of a dtype's name in messages."""
        return self.encoding.name

    @property
    def file_idxs(self) -> frozenset[int]:
        """The files that its parts are in."""
        return frozenset(part.file_idx for part in self.parts)


StoredTensor: TypeAlias = TensorRange | EncodedTensor
