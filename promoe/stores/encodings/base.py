"""How checkpoints keep a weight in fewer bits, and a tensor that is kept so."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from promoe.stores.safetensors_header import TensorRange


@dataclass(frozen=True, slots=True)
class Integers:
    """What an encoding's weights are if they are integers with scales, as the quantised slot formats have them.

    Attributes:
        bits: 4: a weight is `(code - 8) * scale + zero`, with codes from 0 to 15. 8: it is `code * scale`, with codes from
            -128 to 127.
        group: inputs that share a scale and a zero; None: all of an output.
    """

    bits: int
    group: int | None


class Encoding(ABC):
    """A way to keep a weight in fewer bits. Two are equal if they decode alike.

    Attributes:
        name: for messages, such as "fp8" or "Q4_K".
        integers: what `unpack` returns; None: the weights are not integers with scales.
        by_rows: whether rows of the parts are rows of the weight, so that some of them can be decoded by themselves.
    """

    name: str
    integers: Integers | None = None
    by_rows: bool = False

    def unpack(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return a weight's codes, scales and zeros (None: all are zero), if the encoding has `integers`.

        Codes are `[out, in]`, uint8 (4 bits) or int8 (8 bits). Scales and zeros are `[out, in / group]`, fp32 and exact.
        """
        raise NotImplementedError(self.name)

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
