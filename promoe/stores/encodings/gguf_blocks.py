"""GGUF: rows of blocks, in each of which a few bytes of scales come with the codes of 32 or 256 values.

Values are those of `gguf.quants.dequantize`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from promoe.stores.encodings import gguf_books, gguf_k, gguf_levels, gguf_q, slices
from promoe.stores.encodings.base import Encoding, Integers
from promoe.stores.encodings.gguf_bits import Expand, Slice
from promoe.stores.encodings.gguf_integers import GROUP, Unpack, unpack_q4_0, unpack_q4_1, unpack_q4_k
from promoe.stores.encodings.slices import codes_of, values_of


@dataclass(frozen=True)
class GgufBlocks(Encoding):
    """Blocks of one GGUF type.

    Attributes:
        type_id: the type's number in GGUF files.
        block_elements: values of a block; a row is a whole number of blocks.
        block_bytes: bytes of a block.
    """

    type_id: int
    name: str = field(compare=False)
    block_elements: int = field(compare=False)
    block_bytes: int = field(compare=False)
    expand: Expand = field(compare=False, repr=False)
    integers: Integers | None = field(default=None, compare=False)
    by_rows = True

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """See `Encoding.decode`. There is one part, uint8 of any shape."""
        (packed,) = parts
        blocks, decoded = packed.view(-1, self.block_bytes), out.view(-1, self.block_elements)
        assert len(blocks) == len(decoded), (packed.shape, out.shape, self)
        step = slices.SLICE_ELEMENTS // self.block_elements
        shape = (min(step, len(blocks)), self.block_elements)
        codes, values = codes_of(shape, torch.uint8), values_of(shape)
        for start in range(0, len(blocks), step):
            part = Slice(blocks[start : start + step], codes, values)
            self.expand(part)
            decoded[start : start + step] = part.values

    def unpack(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See `Encoding.unpack`. There is one part, uint8 `[out, bytes of a row]`."""
        (packed,) = parts
        blocks, outputs = packed.view(-1, self.block_bytes), len(packed)
        codes = torch.empty((len(blocks), self.block_elements), dtype=torch.uint8, device="cpu")
        scales, zeros = _UNPACKED[self.type_id](blocks, codes)
        return codes.view(outputs, -1), scales.reshape(outputs, -1), None if zeros is None else zeros.view(outputs, -1)


# By type id, for the types whose values are integers of 4 bits with scales and zeros.
_UNPACKED: dict[int, Unpack] = {2: unpack_q4_0, 3: unpack_q4_1, 12: unpack_q4_k}
# By type id: name, elements and bytes of a block, and the decoder.
_TYPES: dict[int, tuple[str, int, int, Expand]] = {
    2: ("Q4_0", 32, 18, gguf_q.expand_q4_0),
    3: ("Q4_1", 32, 20, gguf_q.expand_q4_1),
    6: ("Q5_0", 32, 22, gguf_q.expand_q5_0),
    7: ("Q5_1", 32, 24, gguf_q.expand_q5_1),
    8: ("Q8_0", 32, 34, gguf_q.expand_q8_0),
    10: ("Q2_K", 256, 84, gguf_k.expand_q2_k),
    11: ("Q3_K", 256, 110, gguf_k.expand_q3_k),
    12: ("Q4_K", 256, 144, gguf_k.expand_q4_k),
    13: ("Q5_K", 256, 176, gguf_k.expand_q5_k),
    14: ("Q6_K", 256, 210, gguf_k.expand_q6_k),
    16: ("IQ2_XXS", 256, 66, gguf_books.expand_iq2_xxs),
    17: ("IQ2_XS", 256, 74, gguf_books.expand_iq2_xs),
    18: ("IQ3_XXS", 256, 98, gguf_books.expand_iq3_xxs),
    19: ("IQ1_S", 256, 50, gguf_books.expand_iq1_s),
    20: ("IQ4_NL", 32, 18, gguf_levels.expand_iq4_nl),
    21: ("IQ3_S", 256, 110, gguf_books.expand_iq3_s),
    22: ("IQ2_S", 256, 82, gguf_books.expand_iq2_s),
    23: ("IQ4_XS", 256, 136, gguf_levels.expand_iq4_xs),
    29: ("IQ1_M", 256, 56, gguf_books.expand_iq1_m),
    34: ("TQ1_0", 256, 54, gguf_q.expand_tq1_0),
    35: ("TQ2_0", 256, 66, gguf_q.expand_tq2_0),
    39: ("MXFP4", 32, 17, gguf_levels.expand_mxfp4),
}


def block_encoding(type_id: int) -> GgufBlocks | None:
    """Return the encoding of a GGUF type; None: it has no blocks (F32, BF16, ...), or is not known.

    Raises:
        CheckpointError: the type needs a code book that this version of Transformers does not have.
    """
    if type_id not in _TYPES:
        return None
    name, block_elements, block_bytes, expand = _TYPES[type_id]
    if name in gguf_books.BOOKS:
        gguf_books.book(gguf_books.BOOKS[name])  # raises
    integers = Integers(4, GROUP) if type_id in _UNPACKED else None
    return GgufBlocks(type_id, name, block_elements, block_bytes, expand, integers)
