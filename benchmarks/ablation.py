"""Which network, trained with which loss, predicts best at which distance: everything else equal, on held-out prompts.

    python benchmarks/ablation.py --trace TRACE [--out promoe-out/ablation] [--kinds residual mlp]
        [--losses bce ce_kl kl ranking] [--width 192] [--epochs 6] [--cache 25%] [--json FILE]

TRACE is a folder that `promoe-train collect` wrote. One fit per kind and loss (a run that is there is used again), one of
`residual` with `ce_kl` and another width, and one evaluation of all of them beside the untrained kinds. Printed
as Markdown: accuracy, and miss recall / precision of a next-use cache, per distance, in percent.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from promoe.training import cli
from promoe.training.losses import LOSSES

DISTANCES = ("1", "2", "4", "8")
UNTRAINED = ("token", "previous", "popularity", "correlation", "gate", "linear", "sklearn-mlp")


def promoe_train(*arguments: object) -> None:
    """Run a command; stop if it fails."""
    if code := cli.main([str(argument) for argument in arguments]):
        sys.exit(code)


def table(evaluation: Mapping[str, Any], names: Sequence[str], cache: str) -> str:
    """Markdown, a row per kind and loss."""
    head = ["predictor", *(f"k = {k}" for k in DISTANCES), *(f"misses, k = {k}" for k in DISTANCES)]
    rows = [head, ["---"] * len(head)]
    for name, figures in zip(names, evaluation.values(), strict=True):
        misses = [figures[k]["misses"]["next_use"][cache] for k in DISTANCES]
        accuracy = [percent(figures[k]["accuracy"]) for k in DISTANCES]
        rows.append([name, *accuracy, *(f"{percent(m['recall'])} / {percent(m['precision'])}" for m in misses)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True)
    parser.add_argument("--out", type=Path, default=Path("promoe-out/ablation"))
    parser.add_argument("--kinds", nargs="+", default=["residual", "mlp"])
    parser.add_argument("--losses", nargs="+", default=list(LOSSES))
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--cache", default="25%")
    parser.add_argument("--json", type=Path, default=Path("promoe-out/ablation/evaluation.json"))
    options = parser.parse_args()
    fits: dict[str, tuple[Path, list[object]]] = {
        f"{kind}, {loss}": (options.out / f"{kind}-{loss}-{options.epochs}", ["--kind", kind, "--loss", loss])
        for kind in options.kinds
        for loss in options.losses
    }
    fits[f"residual, ce_kl, width {options.width}"] = (
        options.out / f"residual-ce_kl-{options.epochs}-width-{options.width}",
        ["--kind", "residual", "--loss", "ce_kl", "--width", options.width],
    )
    for out, arguments in fits.values():
        promoe_train("fit", "--trace", options.trace, "--out", out, "--trainer.max-epochs", options.epochs, *arguments)
    runs = [str(out) for out, _ in fits.values()]
    promoe_train(
        "evaluate", "--trace", options.trace, "--kinds", ",".join((*UNTRAINED, *runs)),
        "--lookahead", ",".join(DISTANCES), "--cache", options.cache, "--policy", "next_use", "--json", options.json,
    )  # fmt: skip
    print(table(json.loads(options.json.read_text()), [*UNTRAINED, *fits], options.cache))


if __name__ == "__main__":
    main()
