"""What `promoe doctor` can be asked for."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True)
class Options:
    """Say what this machine is and can do, what would be slow on it and why. The first part is for bug reports, too.

    Measures the disk with a file of 256 MiB, which it deletes, and RAM. Takes some seconds.

    Example: `promoe doctor MODEL --chaos`
    """

    folder: str = "."
    """folder where models are: its disk is measured"""
    _: KW_ONLY
    chaos: bool = False
    """also let a tiny model answer while its reads fail in eight ways, and compare its answers bit by bit"""
    json: str | None = None
    """file to write everything to"""
