"""Chooses a cache, and says in one plain sentence each why, and what limits the speed. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from promoe.commands.plan.sizes import Room, rate_name
from promoe.commands.plan.time_model import Prediction
from promoe.units import format_megabytes, format_memory, format_number, format_seconds

# Cache rates that are tried for a wanted speed: steps of so many per cent, from the first on.
STEP_PERCENT = 5
# A cache whose token takes no longer than this times computing alone needs nothing more.
NEAR = 1.1


@dataclass(frozen=True)
class Choice:
    """A cache, why it was chosen, and what limits the speed with it.

    Args:
        prediction: what it gives.
        reason: why this one.
        limit: what keeps it from being faster.
        reached: whether it is as fast as was wanted, for all kinds of routing.
    """

    prediction: Prediction
    reason: str
    limit: str
    reached: bool


def rates_to_try(least: float, largest: float) -> list[float]:
    """Return cache rates in steps, from the first step or the least cache to the largest that fits, both included.

    Nothing below the first step where a larger one fits: a single slot works, and next to nothing is saved by it.
    """
    steps = [percent / 100 for percent in range(STEP_PERCENT, 101, STEP_PERCENT)]
    first = min(max(least, steps[0]), largest)
    return sorted({first, *(rate for rate in steps if first < rate < largest), largest})


def cheapest(predict: Callable[[float], Prediction], rates: Sequence[float], tokens_per_s: float) -> Prediction | None:
    """Return the smallest cache that is as fast as wanted with the slowest routing; None: none of them is.

    Args:
        predict: what a cache rate gives; a larger cache is taken to be no slower.
        rates: ascending.
        tokens_per_s: the wanted speed.
    """
    index = bisect_left(rates, tokens_per_s, key=lambda rate: predict(rate).slowest.tokens_per_s)
    return predict(rates[index]) if index < len(rates) else None


def choose(
    predict: Callable[[float], Prediction],
    rates: Sequence[float],
    room: Room,
    link_name: Callable[[float], str],
    tokens_per_s: float | None,
) -> Choice:
    """Choose the cheapest cache for a wanted speed; without one, the smallest that is about as fast as the largest that fits.

    Args:
        predict: what a cache rate gives.
        rates: that fit, ascending, at least one.
        room: fast memory.
        link_name: what experts come over with a cache of this rate, in words.
        tokens_per_s: the wanted speed, or None.
    """
    largest = predict(rates[-1])
    if tokens_per_s is None:
        found = cheapest(predict, rates, largest.slowest.tokens_per_s / NEAR) or largest
        reason = "the largest that fits" if found is largest else f"within {NEAR - 1:.0%} of the largest that fits"
        reached = True
    else:
        enough, speed = cheapest(predict, rates, tokens_per_s), f"{format_number(tokens_per_s)} tokens/s"
        found, reached = enough or largest, enough is not None
        reason = f"the smallest that reaches {speed}"
        if not reached:
            reason = f"{speed} are not reached: this is the largest that fits"
    return Choice(found, reason, _limit(found, room, link_name(found.rate)), reached)


def _limit(found: Prediction, room: Room, link: str) -> str:
    """Say what to change for more speed."""
    speed = found.slowest
    compute, rate = format_seconds(speed.compute_s), rate_name(found.rate)
    if speed.tpot_s <= NEAR * speed.compute_s:
        return (
            f"Computing limits it: with every expert in {room.where} a token takes {compute}, and here "
            f"{format_seconds(speed.tpot_s)}. A faster processor, or fewer bits per weight, would help."
        )
    megabytes, seconds = format_megabytes(speed.bytes_per_token), format_seconds(speed.transfer_s)
    moved = f"{megabytes} MB per token are not in the slots and take {seconds}"
    if speed.transfer_s >= speed.compute_s:
        return (
            f"The link limits it: at {rate} {moved} over the {link}, more than computing ({compute}). A larger cache "
            f"or a faster link helps.{_memory(found, room)}"
        )
    return (
        f"Computing and moving experts share the time: at {rate} {moved} over the {link}, beside computing ({compute}); "
        f"they overlap in part. A larger cache helps.{_memory(found, room)}"
    )


def _memory(found: Prediction, room: Room) -> str:
    left = None if room.slots_bytes is None else room.slots_bytes - found.slots_bytes
    step = found.slots_bytes * STEP_PERCENT / 100 / found.rate
    if left is None or left >= step:
        return ""
    return f" Memory allows no larger one: {format_memory(max(0, left))} of {room.where} are left."
