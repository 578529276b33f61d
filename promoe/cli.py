"""The command `promoe`: its verbs. Parsing imports neither torch nor transformers, so help comes at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import promoe
from promoe.command_line import Command, run_command
from promoe.commands.batch import options as batch
from promoe.commands.bench import options as bench
from promoe.commands.demo import options as demo
from promoe.commands.doctor import options as doctor
from promoe.commands.pack import options as pack
from promoe.commands.plan import options as plan
from promoe.commands.quality import options as quality
from promoe.commands.quantize import options as quantize
from promoe.commands.report import options as report
from promoe.commands.run import options as run
from promoe.commands.serve import options as serve
from promoe.commands.simulate import options as simulate

DESCRIPTION = "Run Mixture-of-Experts models whose experts do not fit in memory, with identical output."

COMMANDS = {
    "plan": Command(plan.Options, "promoe.commands.plan.command:run_plan"),
    "pack": Command(pack.Options, "promoe.commands.pack.command:run_pack"),
    "quantize": Command(quantize.Options, "promoe.commands.quantize.command:run_quantize"),
    "quality": Command(quality.Options, "promoe.commands.quality.command:run_quality"),
    "demo": Command(demo.Options, "promoe.commands.demo.command:run_demo"),
    "run": Command(run.Options, "promoe.commands.run.command:answer"),
    "batch": Command(batch.Options, "promoe.commands.batch.command:run_batch"),
    "report": Command(report.Options, "promoe.commands.report.command:report"),
    "serve": Command(serve.Options, "promoe.commands.serve.command:run_serve"),
    "bench": Command(bench.Options, "promoe.commands.bench.command:run_bench"),
    "simulate": Command(simulate.Options, "promoe.commands.simulate.command:run_simulation"),
    "doctor": Command(doctor.Options, "promoe.commands.doctor.command:run_doctor"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 (tokens differ), 2 (the user can mend it), 130 (interrupted)."""
    return run_command("promoe", DESCRIPTION, promoe.__version__, COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
