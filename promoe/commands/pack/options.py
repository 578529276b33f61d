"""What `promoe pack` can be asked for."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True)
class Options:
    """Write a copy of a checkpoint's experts in the layout in which this processor multiplies, so that tokens take less time.

    For models that run on the CPU. The copy takes as much disk as the experts. It is for this processor, number of threads
    and version of torch; where these are the same, it is used in place of the checkpoint's own experts. Output stays
    identical.

    Example: `promoe pack MODEL`
    """

    model: str
    """folder of a checkpoint, a GGUF file, or a hub id (of a GGUF file: org/name/file.gguf)"""
    _: KW_ONLY
    out: str | None = None
    """folder for the copy; by default promoe-packed beside the checkpoint's files, where it is found"""
    dtype: str | None = None
    """dtype in which the model will be opened, such as bfloat16; the checkpoint's by default"""
