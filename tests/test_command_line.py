"""Help of all commands: complete, and its examples can be typed."""

from __future__ import annotations

import argparse
import errno
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from importlib import import_module

import pytest
from jsonargparse import ArgumentParser

import promoe
from promoe import cli
from promoe import command_line as commands
from promoe.command_line import Command, make_parser, run_command
from promoe.training import cli as train

PROGRAMS = {"promoe": cli, "promoe-train": train}
COMMANDS = [(program, command) for program, module in PROGRAMS.items() for command in module.COMMANDS]


def parser_of(program: str) -> ArgumentParser:
    module = PROGRAMS[program]
    return make_parser(program, module.DESCRIPTION, promoe.__version__, module.COMMANDS)


def commands_of(parser: ArgumentParser) -> dict[str, ArgumentParser]:
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(commands.choices)


def subparser(program: str, command: str) -> ArgumentParser:
    return commands_of(parser_of(program))[command]


def options(parser: ArgumentParser) -> Iterator[argparse.Action]:
    yield from (action for action in parser._actions if action.dest != "help")


def examples(text: str) -> list[str]:
    """What is between backquotes and begins with one of our programs, with arguments."""
    return re.findall(rf"`((?:{'|'.join(PROGRAMS)}) \S+ [^`]+)`", " ".join(text.split()))


@pytest.mark.parametrize(("program", "command"), COMMANDS)
def test_what_runs_a_command_takes_its_options(program: str, command: str) -> None:
    found = PROGRAMS[program].COMMANDS[command]
    module, _, name = found.home.partition(":")
    run = getattr(import_module(module), name)
    first = next(iter(inspect.signature(run, eval_str=True).parameters.values()))
    assert first.annotation is found.options


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_programs_help_names_every_command_with_a_sentence(program: str) -> None:
    text = parser_of(program).format_help()
    for command in PROGRAMS[program].COMMANDS:
        assert re.search(rf"^ +{command} +\S.{{10,}}", text, re.MULTILINE), command


@pytest.mark.parametrize(("program", "command"), COMMANDS)
def test_every_option_has_help(program: str, command: str) -> None:
    found = list(options(subparser(program, command)))
    assert found
    for action in found:
        assert action.help and re.search("[a-z]{2}", re.sub(r"\(.*?\)", "", action.help)), action.option_strings  # noqa: PT018


@pytest.mark.parametrize(("program", "command"), COMMANDS)
def test_help_shows_every_option_with_its_default(program: str, command: str) -> None:
    parser = subparser(program, command)
    text = parser.format_help()
    for action in options(parser):
        for name in action.option_strings:
            assert name in text
            assert "_" not in name
    assert "Args:" not in text


@pytest.mark.parametrize(("program", "command"), COMMANDS)
def test_examples_in_help_can_be_typed(program: str, command: str) -> None:
    found = examples(subparser(program, command).description or "")
    assert found
    for example in found:
        words = shlex.split(example)
        parser_of(words[0]).parse_args(words[1:])


@pytest.mark.parametrize("columns", range(40, 121, 5))
@pytest.mark.parametrize("program", PROGRAMS)
def test_help_shows_whole_examples_at_any_width(program: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for command, of_command in commands_of(parser_of(program)).items():
        example = examples(of_command.description or "")[0]
        assert " ".join(example.split()) in " ".join(of_command.format_help().split()), command


@dataclass(frozen=True)
class Words:
    """Say it."""

    text: str = "a – b"
    """what"""
    _: KW_ONLY
    how_often: int = 1
    """times"""


SAID: list[Words] = []


def say(words: Words) -> None:
    SAID.append(words)
    print(words.text)


def fail(words: Words) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "/somewhere/file")


VERBS = {verb.__name__: Command(Words, f"{__name__}:{verb.__name__}") for verb in (say, fail)}


def test_python_names_of_options_are_accepted_and_what_follows_two_hyphens_stays_as_it_is() -> None:
    SAID.clear()
    for arguments in (["--how_often", "2", "a_b"], ["--how_often=3", "--", "--a_b"]):
        assert run_command("program", "", "1", VERBS, ["say", *arguments]) == 0
    assert [(words.text, words.how_often) for words in SAID] == [("a_b", 2), ("--a_b", 3)]


def test_an_output_that_nobody_reads_ends_a_command_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as unread, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", unread)
        assert run_command("program", "", "1", VERBS, ["say"]) == 141
        unread.flush()  # as when Python ends
    assert capsys.readouterr().err == ""


class Full(io.StringIO):
    """An output without room, as /dev/full or a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_an_output_without_room_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "_write_nowhere", lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Full())
        assert run_command("program", "", "1", VERBS, ["say"]) == 2
        said = capsys.readouterr().err
        assert said == (
            "program say: what it prints cannot be written: No space left on device. Send it to where there is room.\n"
        )
        patch.setattr(sys, "stderr", Full())
        assert run_command("program", "", "1", VERBS, ["say"]) == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_command_into_a_full_device() -> None:
    """The interpreter's own end adds no second message."""
    for arguments in (["doctor"], ["--help"], ["run", "--help"], ["--version"]):
        command = [sys.executable, "-m", "promoe.cli", *arguments]
        with open("/dev/full", "w", encoding="utf-8") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), (arguments, done.stderr)


def test_other_errors_of_the_system_are_not_taken_for_it() -> None:
    with pytest.raises(OSError, match="/somewhere/file"):
        run_command("program", "", "1", VERBS, ["fail"])


def test_what_an_encoding_does_not_have_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
        assert run_command("program", "", "1", VERBS, ["say"]) == 0
        assert written.getvalue() == b"a ? b\n"
