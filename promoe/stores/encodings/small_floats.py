"""Floats of 4 and 8 bits as fp16 numbers, by shifting their bits to where fp16 has its exponent and mantissa."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SmallFloat:
    """A format of floats that have a sign in the first bit of a byte, then the exponent, then the mantissa.

    Attributes:
        shift: by how many bits the exponent moves.
        mask: the bits of fp16 that are kept, as int16.
        factor: what the fp16 numbers have to be multiplied by, because fp16 counts exponents from another number.
    """

    shift: int
    mask: int
    factor: int

    def halves(self, codes: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return fp16 numbers which, times `factor`, are those of the codes. Subnormal ones are right, too.

        Args:
            codes: of one byte each.
            out: int16, memory for the result.
        """
        # int8 becomes int16 with copies of the sign in all new bits, so that the first one is the sign after shifting.
        out.copy_(codes.view(torch.int8))
        out <<= self.shift
        out &= self.mask
        return out.view(torch.float16)


E4M3 = SmallFloat(shift=7, mask=0xBFFF - 2**16, factor=2**8)  # NaN becomes 480
E5M2 = SmallFloat(shift=8, mask=0xFF00 - 2**16, factor=1)
E2M1 = SmallFloat(shift=5, mask=0x8E00 - 2**16, factor=2**14)  # in the high bits of a byte; the others do not matter
