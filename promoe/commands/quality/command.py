"""`promoe quality`: measures, prints a table, and writes JSON and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import transformers

from promoe.commands.quality.forms import read_forms
from promoe.commands.quality.measuring import Result, measure
from promoe.commands.quality.options import Options
from promoe.commands.quality.plots import save_plot
from promoe.commands.quality.sample import Sample, read_sample
from promoe.commands.quality.show import lines, to_json
from promoe.files import check_writable, write_atomically
from promoe.model.tokenizer import load_tokenizer
from promoe.stats.figure_style import check_matplotlib
from promoe.transfer.cpu_contention import without_busy_cores


@without_busy_cores()  # nothing here depends on time
def run_quality(options: Options, out: TextIO | None = None) -> list[Result]:
    """Measure, print to `out` (None: stdout), write files, and return what was measured.

    Raises:
        PromoeError: as `read_forms`, `read_sample` and `measure`; or an output cannot be written. Options, forms, texts and
            outputs are checked before a model is opened.
    """
    json_file = None if options.json is None else check_writable(options.json)
    plot = None if options.plot is None else check_writable(options.plot)
    if plot is not None:
        check_matplotlib()
    transformers.logging.disable_progress_bar()  # ours shows bytes
    forms = read_forms(options.model, options.experts, options.dtype, on_device=options.device != "cpu")
    sample = read_sample(options, load_tokenizer(options.model))
    results = measure(options, forms, sample)
    print(*lines(options, sample, results), sep="\n", file=out)
    if json_file is not None:
        write_atomically(json_file, [json.dumps(to_json(options, sample, results), indent=2), "\n"])
        print(f"written to {json_file}", file=out)
    if plot is not None:
        _draw(options, sample, results, plot)
        print(f"drawn to {plot}", file=out)
    return results


def _draw(options: Options, sample: Sample, results: Sequence[Result], path: Path) -> None:
    title = f"{Path(options.model).name}: what fewer bits change"
    save_plot(results, title, f"{sample.num_predicted:,} predicted tokens ({Path(sample.source).name})", path)
