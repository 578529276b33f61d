"""Programs with verbs: each verb's options, help and checks come from a dataclass (or from a function's signature)."""

from __future__ import annotations

import errno
import inspect
import io
import os
import re
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_parsing_settings

from promoe.errors import ConfigError, PromoeError, shown
from promoe.transfer.processor import choose_threads

# What writing to an open file or terminal fails with.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
EXIT_DIFFERENT_TOKENS = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_NOT_READ = 141  # as shells count what SIGPIPE ends
MAX_NUMBER = 2**63 - 1


@dataclass(frozen=True)
class Command:
    """A verb of a program.

    Args:
        options: a dataclass. Its docstring is the help of the verb, and the string under each field is that of the option.
            Fields before `KW_ONLY` are given by position.
        home: "module:function" of what is called with the options. It is imported only then: help need not wait for torch.
            The exit code is 1 if it returns False, for tokens that differ, and otherwise 0.
    """

    options: type
    home: str

    def run(self, options: Mapping[str, Any]) -> int:
        """Run the verb and return the exit code.

        Raises:
            PromoeError: an option has a wrong value, or the command fails.
        """
        checked = self.options(**options)
        module, _, name = self.home.partition(":")
        return EXIT_DIFFERENT_TOKENS if getattr(import_module(module), name)(checked) is False else 0


Commands = Mapping[str, Command]


class _HelpFormatter(DefaultHelpFormatter):
    """A formatter that never breaks a line within a word: `disk-` and `offload` on the next line cannot be copied together."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        words = " ".join(text.split())
        return textwrap.fill(words, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _Parser(ArgumentParser):
    """A parser of options as shells have them: hyphens for underscores, and a flag for what is False by default.

    Attributes:
        optional: parameters that are given by position, or left out.
        several: type of the values of each parameter that takes several of them, `--cache 25% 50%`.
    """

    optional: Collection[str] = ()
    several: Mapping[str, type] = MappingProxyType({})

    def add_argument(self, *args: Any, **kwargs: Any) -> Any:
        names = tuple(name.replace("_", "-") if name.startswith("--") else name for name in args)
        parameter = args[0].removeprefix("--")
        shown: dict[str, Any] = {"help": kwargs.get("help"), "default": kwargs.get("default")}
        # Groups of options call this too, and have no such attributes.
        several, optional = getattr(self, "several", {}), getattr(self, "optional", ())
        if kwargs.get("default") is False and kwargs.get("type") is bool:
            kwargs = {"help": kwargs.get("help"), "action": "store_true"}
        elif parameter in several:
            names, kwargs = names[:1], {**shown, "type": several[parameter], "nargs": "+"}
            if not names[0].startswith("-"):
                del kwargs["default"]  # by position, and required
        elif parameter in optional:
            names, kwargs = (parameter,), {**shown, "nargs": "?"}
        return super().add_argument(*names, **kwargs)

    def add_options(self, options: type) -> None:
        """Add the options of a verb: the fields of a dataclass."""
        parameters, types = inspect.signature(options).parameters.values(), get_type_hints(options)
        self.optional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty]
        self.several = {p.name: get_args(types[p.name])[0] for p in parameters if get_origin(types[p.name]) is list}
        self.add_class_arguments(options, as_group=False, as_positional=True)

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stdout:
            print(message, end="", flush=True)  # argparse would ignore the error of an output without room
        else:
            super()._print_message(message, file)


def make_parser(program: str, description: str, version: str, commands: Commands) -> ArgumentParser:
    """Return what reads the command line of a program, with a subcommand for each of its commands."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = _Parser(prog=program, description=description, formatter_class=_HelpFormatter)
    parser.add_argument("--version", action="version", version=f"promoe {version}")
    subcommands = parser.add_subcommands(required=True, dest="command")
    for name, command in commands.items():
        text = re.split(r"\n(?:Args|Raises):", inspect.getdoc(command.options) or "")[0].strip()
        subparser = _Parser(description=text, formatter_class=_HelpFormatter)
        subparser.add_options(command.options)
        subcommands.add_subcommand(name, subparser, help=text.partition("\n")[0])
    return parser


def _with_hyphens(arguments: Sequence[str]) -> list[str]:
    """Return `--trainer.max_epochs=3` as `--trainer.max-epochs=3`: Python's names are accepted too.

    What follows `--` is not an option, whatever it looks like.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    found = []
    for argument in arguments[:end]:
        name, equals, value = argument.partition("=")
        found.append(name.replace("_", "-") + equals + value if name.startswith("--") else argument)
    return [*found, *arguments[end:]]


def _check_numbers(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for whole numbers that nothing can count to, and that floats and arrays cannot hold."""
    for name, value in options.items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and not -MAX_NUMBER <= number <= MAX_NUMBER:
                raise ConfigError(
                    f"--{name.replace('_', '-')} must be between -{MAX_NUMBER} and {MAX_NUMBER}. Got {shown(number)} instead."
                )


def _replace_what_cannot_be_written() -> None:
    """In an encoding with fewer characters, write `?` for one that it lacks: better than the end of an answer."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def _write_nowhere() -> None:
    """Send stdout to nowhere: nobody reads it any more, and what it still holds would be an error when Python ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _open_closed_streams() -> None:
    """Give a stream that was closed before Python began (`>&-`) somewhere to go."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _tell(text: str) -> None:
    with suppress(OSError):  # stderr may be full
        print(text, file=sys.stderr, flush=True)


def run_command(program: str, description: str, version: str, commands: Commands, argv: Sequence[str] | None) -> int:
    """Run the command that `argv` names and return its exit code.

    1: tokens differ, 2: the user can mend it, 130: interrupted, 141: whoever read its output (`head`) has left.
    """
    choose_threads()  # before a command imports torch
    _open_closed_streams()
    name = program
    try:
        parser = make_parser(program, description, version, commands)
        arguments = sys.argv[1:] if argv is None else argv
        parsed = parser.instantiate(parser.parse_args(_with_hyphens(arguments)))
        name = f"{program} {parsed.command}"
        _replace_what_cannot_be_written()
        options = vars(parsed[parsed.command])
        _check_numbers(options)
        code = commands[parsed.command].run(options)
        sys.stdout.flush()
        return code
    except PromoeError as error:
        _tell(f"{name}: {error}")
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        _tell(f"\n{name}: interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _write_nowhere()
        return EXIT_NOT_READ
    except OSError as error:
        if error.filename is not None or error.errno not in _NO_ROOM:
            raise  # not from writing to what is open already
        _write_nowhere()
        _tell(f"{name}: what it prints cannot be written: {error.strerror}. Send it to where there is room.")
        return EXIT_USER_ERROR
