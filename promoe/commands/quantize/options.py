"""What `promoe quantize` can be asked for."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

from promoe.errors import ConfigError


@dataclass(frozen=True)
class Options:
    """Write a copy of a checkpoint's experts in fewer bits, so that more of them fit into memory and each is read faster.

    Output changes, so the copy is used only where you ask for it: from_pretrained(MODEL, experts="int4"), --experts int4.
    `promoe quality MODEL` measures how much it changes. 8 bits are hardly noticed; 4 bits are a good choice where
    memory is short. 3 and 2 bits are slower to compute with, for disks that are slower still.

    Ctrl-C loses nothing: the same command goes on where it was. The copy is for this kind of processor (AVX2, AVX-512).

    Example: `promoe quantize MODEL --bits 4`
    """

    model: str
    """folder of a safetensors checkpoint, or a hub id"""
    _: KW_ONLY
    bits: Literal[8, 4, 3, 2] = 4
    """bits per weight, without scales"""
    group: Literal[32, 64, 128] = 64
    """weights that share a scale and a zero, for 4 bits and fewer (8 bits: one scale per output). Smaller groups are more
    accurate, and take 32 / group bits more per weight"""
    method: Literal["rtn", "hqq"] = "rtn"
    """"rtn" rounds to nearest; "hqq" then moves the zeros for a smaller error, which takes some ten times as long and pays
    for 3 and 2 bits"""
    out: str | None = None
    """folder for the copy; by default promoe-int4 (or int8, ...) beside the checkpoint's files, where it is found"""
    dtype: str | None = None
    """dtype in which the model will be opened: bfloat16 is needed; the checkpoint's by default"""

    def __post_init__(self) -> None:
        """Check the options together."""
        if self.bits == 8 and self.method != "rtn":
            raise ConfigError(f"--method {self.method} is for 4 bits and fewer. Leave it out with --bits 8.")
