"""The command `promoe-train`. Parsing imports no training library, so help and mistakes are answered at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import promoe
from promoe.command_line import Command, run_command
from promoe.training.options import Collect, Evaluate, Export, Fit

DESCRIPTION = "Train and judge predictors of which experts a Mixture-of-Experts model will use."

COMMANDS = {
    "collect": Command(Collect, "promoe.training.collect:collect"),
    "fit": Command(Fit, "promoe.training.fit:fit"),
    "evaluate": Command(Evaluate, "promoe.training.evaluate:evaluate"),
    "export": Command(Export, "promoe.training.export:export"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 (the user can mend it), 130 (interrupted)."""
    return run_command("promoe-train", DESCRIPTION, promoe.__version__, COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
