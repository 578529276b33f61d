"""The command `promoe-train`. Parsing imports no training library, so help and mistakes are answered at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import promoe
from promoe import commands
from promoe.errors import ConfigError

DESCRIPTION = "Train and judge predictors of which experts a Mixture-of-Experts model will use."


def evaluate(
    *,
    trace: str,
    kinds: str = "token,previous,popularity,correlation",
    lookahead: str = "1,2,4,8",
    cache: str = "12.5%,25%,50%",
    policy: str = "lru,next_use",
    replay_tokens: int = 2000,
    json: str | None = None,
) -> int:
    """Say how good predictions are on prompts that they were not fitted on: accuracy, and recall of cache misses.

    The first 80% of a trace's prompts are learned from, the rest are judged. Prints a table, and writes JSON.

    Args:
        trace: NumPy archive of a model's routing (`experts` [tokens, layers, top_k], `prompt_lengths`, `token_index`)
        kinds: what to judge: "token", "previous", "popularity", "correlation"
        lookahead: how many MoE layers ahead
        cache: cache rates whose misses are counted; "" for none
        policy: evictions of these caches: "lru", "next_use", "lfru", "static"
        replay_tokens: held-out tokens that are replayed through each cache: what takes the longest
        json: file for all figures
    """
    from promoe.output import check_writable
    from promoe.training.command import Evaluation, policy_named, run_evaluation

    task = Evaluation(
        trace=trace,
        kinds=_listed(kinds, "--kinds"),
        lookaheads=[_whole(text, "--lookahead") for text in _listed(lookahead, "--lookahead")],
        policies=[policy_named(text) for text in _listed(policy, "--policy")] if cache else [],
        cache_rates=[_rate(text) for text in _listed(cache, "--cache")] if cache else [],
        replay_tokens=replay_tokens,
        json=check_writable(json) if json is not None else None,
    )
    run_evaluation(task, sys.stdout)
    return 0


def _listed(text: str, option: str) -> list[str]:
    values = [value.strip() for value in text.split(",")]
    if not all(values):
        raise ConfigError(f"{option} must be a list with commas between. Got {text!r} instead.")
    return values


def _whole(text: str, option: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{option} must be whole numbers of layers, at least 1. Got {text!r} instead.")
    return int(text)


def _rate(text: str) -> float:
    try:
        rate = float(text.removesuffix("%")) / 100 if text.endswith("%") else float("nan")
    except ValueError:
        rate = float("nan")
    if not 0 < rate <= 1:
        raise ConfigError(
            f"--cache must be shares of the experts such as 12.5%, above 0% and up to 100%. Got {text!r}."
        )
    return rate


COMMANDS: dict[str, Callable[..., int]] = {"evaluate": evaluate}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 (the user can mend it), 130 (interrupted)."""
    return commands.run_command("promoe-train", DESCRIPTION, promoe.__version__, COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
