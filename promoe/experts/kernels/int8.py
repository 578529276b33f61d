"""The slot format "int8": 8 bits per weight, with one scale for each output.

In a slot: the codes `[out, in]`, int8, then the scales `[out]`, bf16. torch's kernel multiplies by them as they are, and
accumulates in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from promoe.experts.kernels.crossover import dense_from
from promoe.experts.kernels.quantization import Rows, quantize_rows
from promoe.experts.kernels.quantized import INPUTS, OUTPUTS, Quantized
from promoe.stores.layout import TensorSpec
from promoe.stores.thread_memory import ThreadMemory

SCALE_BYTES = 2


@dataclass(frozen=True)
class Int8(Quantized):
    """Matrices of one shape in 8 bits."""

    @property
    def name(self) -> str:
        """See `MatrixFormat`."""
        return "int8"

    @classmethod
    def smallest(cls) -> Int8:
        """See `Quantized.smallest`."""
        return cls((2 * OUTPUTS, 2 * INPUTS), False, None)

    @property
    def nbytes(self) -> int:
        """See `MatrixFormat`: a byte for each weight, two for each output."""
        outputs, inputs = self.linear_shape
        return outputs * inputs + outputs * SCALE_BYTES

    def quantize(self, matrix: torch.Tensor, method: str) -> torch.Tensor:
        """See `Quantized.quantize`. There is one method, whatever `method` says: round to nearest."""
        memory = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        quantize_rows(self.as_linear(matrix), Rows(*self.parts(memory)))
        return memory

    def write(self, memory: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Write a matrix into `memory[nbytes]`, uint8: codes `[out, in]`, int8, and scales `[out]`, rounded to bf16."""
        for part, values in zip(self.parts(memory), (codes, scales), strict=True):
            part.copy_(values)

    def parts(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the codes `[..., out, in]` and the scales `[..., out]`."""
        outputs, inputs = self.linear_shape
        count = outputs * inputs
        codes = memory[..., :count].view(torch.int8).unflatten(-1, (outputs, inputs))
        return codes, memory[..., count:].view(torch.bfloat16)

    def product(self, x: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """See `Quantized.product`."""
        codes, scales = parts
        return torch._weight_int8pack_mm(x, codes, scales)

    def expand(self, parts: tuple[torch.Tensor, ...], memory: ThreadMemory) -> torch.Tensor:
        """See `Quantized.expand`. Each weight is rounded once."""
        codes, scales = parts
        return torch.mul(codes, scales.unsqueeze(-1), out=memory.of(codes.shape, self.dtype, codes.device)).mT

    def split(self, parts: tuple[torch.Tensor, ...], size: int) -> Iterator[tuple[Int8, tuple[torch.Tensor, ...]]]:
        """See `Quantized.split`."""
        for codes, scales in zip(*(part.split(size) for part in parts), strict=True):
            yield self._with_outputs(len(codes)), (codes, scales)


class Int8Format:
    """The slot format "int8"."""

    name = "int8"
    exact = False

    def of(self, matrix: TensorSpec, transposed: bool) -> Int8 | None:
        """Return the format of such matrices; None: they have to stay plain."""
        if not Int8.can_hold(matrix.shape, matrix.dtype):
            return None
        rows, columns = matrix.shape
        made = Int8((rows, columns), transposed, None)
        return replace(made, dense_from=dense_from(made))

    def read(self, matrix: TensorSpec, transposed: bool, signature: str) -> Int8 | None:
        """Return the format with this signature; None: there is none for such matrices."""
        found = Int8.from_signature(signature, matrix.shape, transposed)
        return found if isinstance(found, Int8) else None
