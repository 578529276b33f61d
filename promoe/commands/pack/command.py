"""`promoe pack`: packs, and prints what came of it."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import TextIO

from promoe.commands.pack.options import Options
from promoe.commands.terminal import bytes_bar
from promoe.model.opening import open_headers
from promoe.model.packing import PACKED, gains_in_words, packable, write_packed
from promoe.model.slot_folders import default_folder
from promoe.units import format_memory, format_seconds


def run_pack(options: Options, out: TextIO | None = None) -> None:
    """Pack a checkpoint's experts, and print to `out` (None: stdout) what is faster by how much.

    Raises:
        PromoeError: as `open_headers` and `write_packed`.
    """
    opened = open_headers(options.model, dtype=options.dtype)
    start_s = time.perf_counter()
    with closing(opened.store) as store, bytes_bar("packing") as progress:
        folder = default_folder(store, PACKED) if options.out is None else Path(options.out)
        nbytes = write_packed(opened.layers, store, folder, progress)
        formats = packable(opened.layers, store)
    took = format_seconds(time.perf_counter() - start_s)
    how = (
        "It is used from now on."
        if options.out is None
        else f"Open the model with experts={str(folder)!r} (--experts of promoe run)."
    )
    packed = {name for matrices in formats.values() for name in matrices}
    matrices = {spec.name for layer in opened.layers for spec in layer.layout.tensors if len(spec.shape) == 2}
    print(f"{format_memory(nbytes)} of experts written into {folder} in {took}. {how}", file=out)
    print(
        f"One token's row is multiplied so many times as fast now (measured): {gains_in_words(formats)}.",
        file=out,
    )
    if plain := sorted(matrices - packed):
        print(
            f"Left as in the checkpoint, because packing them would gain nothing or change bits: {', '.join(plain)}.",
            file=out,
        )
