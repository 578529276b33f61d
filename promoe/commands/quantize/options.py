"""What `promoe quantize` can be asked for."""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from promoe.errors import ConfigError, shown

DEFAULT_SHARE = 0.25


@dataclass(frozen=True)
class Options:
    """Write a copy of a checkpoint's experts in fewer bits, so that more of them fit into memory and each is read faster.

    Output changes, so the copy is used only where you ask for it: from_pretrained(MODEL, experts="int4"), --experts int4.
    `promoe quality MODEL` measures how much it changes. 8 bits are hardly noticed; 4 bits are a good choice where
    memory is short. 3 and 2 bits are slower to compute with, for disks that are slower still.

    Some experts are used far more often than others. With --hot 8 --counts FILE, the most used ones of each layer are kept
    in 8 bits and the others in --bits. `promoe run MODEL PROMPT --report a.html` writes the counts beside its page, as
    a.json. Use prompts like your own.

    Ctrl-C loses nothing: the same command goes on where it was. The copy is for this kind of processor (AVX2, AVX-512).

    Example: `promoe quantize MODEL --bits 4`
    """

    model: str
    """folder of a checkpoint, a GGUF file, or a hub id (of a GGUF file: org/name/file.gguf)"""
    _: KW_ONLY
    bits: Literal[8, 4, 3, 2] = 4
    """bits per weight, without scales"""
    group: Literal[32, 64, 128] = 64
    """weights that share a scale and a zero, for 4 bits and fewer (8 bits: one scale per output). Smaller groups are more
    accurate, and take 32 / group bits more per weight"""
    method: Literal["rtn", "hqq"] = "rtn"
    """"rtn" rounds to nearest; "hqq" then moves the zeros for a smaller error, which takes some ten times as long and pays
    for 3 and 2 bits"""
    hot: Literal[8, 4, 3] | None = None
    """bits per weight of the most used experts of each layer: more than --bits. Needs --counts"""
    hot_share: str = "25%"
    """share of each layer's experts that is kept in --hot bits"""
    counts: str | None = None
    """a saved run that says how often experts are used: the JSON file that `promoe run --report` writes beside its page"""
    out: str | None = None
    """folder for the copy; by default promoe-int4 (or int8, int4-hot8, ...) beside the checkpoint's files, where it is
    found"""
    dtype: str | None = None
    """dtype in which the model will be opened: bfloat16 is needed; the checkpoint's by default"""

    def __post_init__(self) -> None:
        """Check the options together."""
        if self.bits == 8 and self.method != "rtn":
            raise ConfigError(f"--method {self.method} is for 4 bits and fewer. Leave it out with --bits 8.")
        share = self.share
        if self.hot is None:
            if self.counts is not None or share != DEFAULT_SHARE:
                raise ConfigError(
                    "--counts and --hot-share say which experts --hot is for. Add --hot 8, or leave them out."
                )
            return
        if self.hot <= self.bits:
            raise ConfigError(
                f"--hot must be more bits than --bits. Got --hot {self.hot} and --bits {self.bits}. Without --hot, all experts "
                "have --bits."
            )
        if self.counts is None:
            raise ConfigError(
                f"--hot {self.hot} needs --counts FILE, which says how often each expert is used. Write one with `promoe run "
                f"{self.model} PROMPT --report counts.html`, which saves counts.json, too."
            )

    @property
    def share(self) -> float:
        """`hot_share` as a number.

        Raises:
            ConfigError: it is not a share between 0% and 100%.
        """
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", self.hot_share)
        share = float(match[1]) / 100 if match else 0.0
        if not 0 < share < 1:
            raise ConfigError(
                f'--hot-share must be a share of the experts such as "25%" (more than 0, less than 100%). Got '
                f"{shown(self.hot_share)} instead."
            )
        return share

    @property
    def form(self) -> str:
        """The name of the form that is asked for, such as "int4" or "int4-hot8"."""
        return f"int{self.bits}" if self.hot is None else f"int{self.bits}-hot{self.hot}"
