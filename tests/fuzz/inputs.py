"""How many inputs a target takes, how they are drawn, and what may come of one.

Every target is a test that Hypothesis draws inputs for. `PROMOE_FUZZ_EXAMPLES` multiplies their numbers (`make fuzz`); without
it a target takes a few, always the same ones, so that the suite is quick and the same everywhere.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import hypothesis
from hypothesis import HealthCheck

from promoe.errors import PromoeError

Result = TypeVar("Result")

FACTOR = float(os.environ.get("PROMOE_FUZZ_EXAMPLES", "1"))
taken: Counter[str] = Counter()
"""Inputs that each target has run, by its name; `refused` counts those that ended in an error."""
refused: Counter[str] = Counter()
# What takes longer would not end: inputs are tiny.
MOST_SECONDS = 60


def fuzzed(examples: int) -> Callable[[Any], Any]:
    """The settings of a target that takes so many inputs in the suite, and `PROMOE_FUZZ_EXAMPLES` times as many in a run."""
    return hypothesis.settings(
        max_examples=max(1, round(examples * FACTOR)),
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )


def outcome(target: str, call: Callable[[], Result]) -> Result | None:
    """What `call` returns; None where it refused its input with a PromoeError that says something. All else propagates."""
    taken[target] += 1
    signal.alarm(MOST_SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # numpy's, of headers that an old version wrote
            return call()
    except PromoeError as error:
        refused[target] += 1
        _check_message(str(error))
        return None
    finally:
        signal.alarm(0)


def _check_message(message: str) -> None:
    assert len(message) > 20, f"an error that says nothing: {message!r}"
    assert len(message) < 20_000, f"an error of {len(message)} characters: {message[:200]!r}"


def _hangs(*_: object) -> None:
    raise TimeoutError(f"still at it after {MOST_SECONDS} s")


signal.signal(signal.SIGALRM, _hangs)
