"""Check the command lines of the documentation, and run ours in this process."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.metadata import metadata
from importlib.util import find_spec
from pathlib import Path

import promoe
from promoe import cli
from promoe.command_line import make_parser
from promoe.training import cli as train

from .pages import ROOT, Command

OURS = {"promoe": cli, "promoe-train": train}


def check(command: Command) -> None:
    """Raise AssertionError unless the command exists and takes these arguments."""
    program, *arguments = command.words
    assert program in PROGRAMS, (
        f"{command.where}: nobody knows how to check {command.text!r}; see tests/docs/programs.py"
    )
    try:
        PROGRAMS[program](program, arguments)
    except (AssertionError, SystemExit) as error:
        raise AssertionError(f"{command.where}: {command.text}: {error}") from error


def run(words: Sequence[str]) -> int:
    """Run one of our programs here, or make a folder, and return its exit code."""
    if words[0] == "mkdir":
        Path(words[1]).mkdir()
        return 0
    return OURS[words[0]].main(words[1:])


def _check_ours(program: str, arguments: list[str]) -> None:
    commands = OURS[program].COMMANDS
    if len(arguments) == 1 and arguments[0] in commands:  # `promoe run` is a name, not a line to type
        return
    make_parser(program, "", promoe.__version__, commands).parse_args(arguments)


def _check_make(program: str, arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in (word for word in arguments if not word.startswith("-")):
        assert re.search(rf"^([\w-]+ )*{target}( [\w-]+)*:", makefile, re.MULTILINE), f"no target {target!r}"


def _check_pip(program: str, arguments: list[str]) -> None:
    assert arguments[0] == "install", arguments
    extras = metadata("promoe").get_all("Provides-Extra") or []
    for match in (re.fullmatch(r"(\.|promoe)\[(.*)\]", word) for word in arguments):
        for extra in match[2].split(",") if match is not None else ():
            assert extra in extras, f"no extra {extra!r}"


def _check_python(program: str, arguments: list[str]) -> None:
    if arguments[0] == "-m":
        assert find_spec(arguments[1]) is not None, f"no module {arguments[1]}"
        return
    script = (ROOT / arguments[0]).read_text(encoding="utf-8")
    for option in (word.partition("=")[0] for word in arguments[1:] if word.startswith("--")):
        assert f'"{option}"' in script, f"{arguments[0]} has no option {option}"


def _nothing_to_check(program: str, arguments: list[str]) -> None:
    """Accept a command that is not ours and has nothing of ours in its arguments."""


PROGRAMS: dict[str, Callable[[str, list[str]], None]] = {
    "promoe": _check_ours,
    "promoe-train": _check_ours,
    "make": _check_make,
    "pip": _check_pip,
    "python": _check_python,
    "git": _nothing_to_check,
    "cd": _nothing_to_check,
    ".": _nothing_to_check,
    "hf": _nothing_to_check,
    "mkdir": _nothing_to_check,
    "curl": _nothing_to_check,
}
