"""`promoe quantize`: quantises, and prints what came of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TextIO

from promoe.commands.quantize.options import Options
from promoe.commands.terminal import bytes_bar
from promoe.experts.kernels.formats import FORMATS, SlotFormat
from promoe.experts.kernels.int4 import Int4Format
from promoe.experts.moe_layers import MoELayer
from promoe.model.opening import open_headers
from promoe.model.quantizing import Hot, Quantization, write_quantized
from promoe.model.slot_folders import default_folder
from promoe.runtime.popularity import most_used_of_each_layer, usage_rates
from promoe.units import format_memory, format_seconds


def run_quantize(options: Options, out: TextIO | None = None) -> None:
    """Quantise a checkpoint's experts, and print to `out` (None: stdout) sizes, errors, and how to use them.

    Raises:
        PromoeError: as `open_headers` and `write_quantized`.
    """
    slot_format = _slot_format(options.bits, options.group)
    opened = open_headers(options.model, dtype=options.dtype)
    num_experts = sum(layer.num_experts for layer in opened.layers)
    start_s = time.perf_counter()
    with closing(opened.store) as store, bytes_bar("quantising") as progress:
        hot = None if options.hot is None else _hot(options, opened.layers)
        folder = default_folder(store, options.form) if options.out is None else Path(options.out)
        done = write_quantized(opened.layers, store, folder, slot_format, options.method, progress, hot)
    took = format_seconds(time.perf_counter() - start_s)
    form = slot_format.name
    if hot is not None:
        form += f", and {hot.slot_format.name} for the {len(hot.experts)} most used of {num_experts}"
    share = done.nbytes / done.plain_bytes
    print(
        f"{format_memory(done.plain_bytes)} of experts are {format_memory(done.nbytes)} in {form} ({share:.0%}), "
        f"written into {folder} in {took}.",
        file=out,
    )
    for line in _errors(done):
        print(line, file=out)
    if done.plain:
        sizes = "of 64" if options.bits == 8 else f"of 64, or their inputs not of the group of {options.group}"
        print(f"Left in 16 bits, because their sizes are not multiples {sizes}: {', '.join(done.plain)}.", file=out)
    chosen = options.form if options.out is None else str(folder)
    print(
        f"Use them: promoe run {options.model} --experts {chosen}, or promoe.from_pretrained({options.model!r}, "
        f"experts={chosen!r}).\nMeasure what that changes: promoe quality {options.model} --experts {chosen}",
        file=out,
    )


def _slot_format(bits: int, group: int) -> SlotFormat:
    return FORMATS["int8"] if bits == 8 else Int4Format(bits, group)


def _hot(options: Options, layers: Sequence[MoELayer]) -> Hot:
    """Return the experts to keep in more bits.

    Raises:
        ConfigError: the counts cannot be read, or are of another model.
    """
    assert options.counts is not None
    assert options.hot is not None
    rates = usage_rates(options.counts, [layer.num_experts for layer in layers], [layer.top_k or 1 for layer in layers])
    return Hot(most_used_of_each_layer(rates, options.share), _slot_format(options.hot, options.group))


def _errors(done: Quantization) -> list[str]:
    """Return the errors of the layers as text: a table of at most a few lines for many layers."""
    if not done.errors:
        return []
    ranked = sorted(done.errors.items(), key=lambda item: -item[1])
    mean = sum(done.errors.values()) / len(ranked)
    worst = ", ".join(f"{name} {error:.2%}" for name, error in ranked[:3])
    return [
        f"Relative error of the weights, layer by layer: {mean:.2%} on average, {ranked[-1][1]:.2%} to {ranked[0][1]:.2%}. "
        f"Largest: {worst}."
    ]
