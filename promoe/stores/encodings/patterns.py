"""Regular expressions of config.json for modules' names, used only where matching them is sure to end soon."""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import takewhile
from typing import NamedTuple

from promoe.errors import CheckpointError, shown

# In so many ways an expression's repeats may share out a name. Trying all takes about a second.
MOST_WAYS = 10_000_000
# A character, a class of characters or a bracket, and how often it repeats.
_TOKEN = re.compile(r"(\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.)((?:[*+?]|\{\d*,?\d*\})[?+]?)?", re.DOTALL)
_LITERAL = re.compile(r"\\[^A-Za-z0-9]|[^\\\[\](){}|?*+.^$]")


class _Choices(NamedTuple):
    """What an expression leaves open."""

    alternatives: int
    """Ways through all alternatives and optional parts."""
    followers: tuple[str, ...]
    """For each repeat, the text that has to follow it; "" if anything may."""
    repeats_choices: bool
    """Whether a group repeats that leaves something open itself. Its ways grow as a power of the name's length."""


def check(pattern: str) -> None:
    """Check an expression before there is a name to match.

    Raises:
        CheckpointError: it is none, or it repeats a group that can match the same text in several ways.
    """
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(
            f"The config.json has {shown(pattern)} as a regular expression for modules' names, which it is not: {error}. "
            "Compare the file with the original one."
        ) from error
    if _choices(pattern).repeats_choices:
        raise CheckpointError(
            f"The config.json has the regular expression {shown(pattern)} for modules' names, which repeats a group in "
            'parentheses that has a "*", "+", "?" or "|" in it: matching it could take for ever. Write it without the repeat '
            "behind the parenthesis, or name the modules."
        )


def matches(pattern: str, module: str, *, anywhere: bool = False) -> bool:
    """Return whether an expression matches a module's name from its beginning, or anywhere in it.

    Raises:
        CheckpointError: it is no expression, or matching it could take for ever.
    """
    check(pattern)
    ways = _ways(_choices(pattern), module, len(module) if anywhere else 1)
    if ways > MOST_WAYS:
        raise CheckpointError(
            f"The config.json has the regular expression {shown(pattern)} for modules' names, whose repeats and alternatives "
            f"could share out {shown(module)} in {ways:.0e} ways: matching it could take for ever, and at most "
            f"{MOST_WAYS:.0e} are tried. Write it with fewer of them, or with more of the names between them."
        )
    return (re.search if anywhere else re.match)(pattern, module) is not None


def _ways(choices: _Choices, name: str, starts: int) -> float:
    """Return an upper bound of the ways in which an expression can share out a name, from each of some starts on."""
    ways = float(min(choices.alternatives, 10**300)) * starts
    if ways * (1.0 + len(name)) ** min(len(choices.followers), 20) <= MOST_WAYS:
        return ways
    for text in choices.followers:
        ways *= 1 + sum(name.startswith(text, place) for place in range(len(name)))
    return ways


@lru_cache(maxsize=1024)
def _choices(pattern: str) -> _Choices:
    tokens: list[tuple[str, str]] = _TOKEN.findall(pattern)
    ways, repeats_choices, followers = 1, False, []
    # For the whole expression and each group around a token: its alternatives, and whether it leaves something open.
    groups = [(1, False)]
    for number, (atom, repeat) in enumerate(tokens):
        alternatives, is_open = groups.pop() if atom == ")" and len(groups) > 1 else (1, False)
        ways *= alternatives
        if atom == "(":  # of "(?:", the tokens are "(?" and ":"
            groups.append((1, False))
            continue
        if repeat and repeat[0] in "*+{":
            repeats_choices |= is_open
            followers.append("".join(atom[-1] for atom, _ in takewhile(_is_literal, tokens[number + 1 :])))
        elif repeat:
            ways *= 2
        around, was_open = groups[-1]
        groups[-1] = (around + (atom == "|"), was_open or is_open or bool(repeat) or atom == "|")
    return _Choices(ways * groups[0][0], tuple(followers), repeats_choices)


def _is_literal(token: tuple[str, str]) -> bool:
    return not token[1] and _LITERAL.fullmatch(token[0]) is not None
