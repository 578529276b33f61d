"""`promoe bench`: measures, prints tables, and writes them with plots and JSON."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import TextIO

from promoe.commands.bench.options import Options
from promoe.commands.bench.plots import save_plots
from promoe.commands.bench.run import Bench
from promoe.commands.bench.show import report_lines
from promoe.commands.bench.table import Report
from promoe.commands.bench.throughput import run_throughput
from promoe.files import check_writable, make_folder, write_atomically
from promoe.transfer.cpu_contention import without_busy_cores


@without_busy_cores()  # said below each table
def run_bench(options: Options, out: TextIO | None = None) -> Report | None:
    """Measure, print and write.

    Returns:
        What was found; None for --task throughput.

    Raises:
        PromoeError: something that it needs is missing or cannot be written, before anything is measured; or a system
            generated other tokens than the unmodified model.
    """
    if options.task == "throughput":
        run_throughput(options, out)
        return None
    make_folder(options.folder)
    outputs = [check_writable(options.json_file), check_writable(options.folder / "bench.md")]
    report = Bench(options).run()
    lines = list(report_lines(report))
    print(*lines, sep="\n", file=out)
    write_atomically(outputs[0], [json.dumps(report.to_json(), indent=2), "\n"])
    write_atomically(outputs[1], [f"{line}\n" for line in lines])
    if find_spec("matplotlib") is not None:
        outputs += save_plots(report, options.folder)
    else:
        print("", "No plots: matplotlib is not installed. Try `pip install 'promoe[viz]'`.", sep="\n", file=out)
    print("", *(f"written: {path}" for path in outputs), sep="\n", file=out)
    return report
