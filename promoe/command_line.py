"""Commands made from typed functions: options, help and mistakes come from their signatures and docstrings."""

from __future__ import annotations

import errno
import inspect
import io
import os
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, get_args, get_origin

from jsonargparse import ArgumentParser, DefaultHelpFormatter

from promoe.errors import ConfigError, PromoeError, shown
from promoe.transfer.processor import choose_threads

# What writing to an open file or terminal fails with.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_NOT_READ = 141  # as shells count what SIGPIPE ends
MAX_NUMBER = 2**63 - 1


class _HelpFormatter(DefaultHelpFormatter):
    """Never ends a line within a word: what is copied out of `disk-` and `offload` on the next line is not the option."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        words = " ".join(text.split())
        return textwrap.fill(words, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _Parser(ArgumentParser):
    """Options as shells have them: hyphens for underscores, and a flag for what is False by default.

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
        # Groups of options call this too, and are no parsers.
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

    def read_signature(self, command: Callable[..., int]) -> None:
        """Learn from a command what is optional, and what takes several values."""
        parameters = inspect.signature(command, eval_str=True).parameters.values()
        self.optional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty]
        self.several = {p.name: get_args(p.annotation)[0] for p in parameters if get_origin(p.annotation) is list}


def _with_hyphens(argument: str) -> str:
    """`--trainer.max_epochs=3` as `--trainer.max-epochs=3`: Python's names are accepted too."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


def _options_with_hyphens(arguments: Sequence[str]) -> list[str]:
    """The same of all; what follows `--` is no option, whatever it looks like."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [*map(_with_hyphens, arguments[:end]), *arguments[end:]]


Commands = Mapping[str, Callable[..., int]]


def make_parser(program: str, description: str, version: str, commands: Commands) -> ArgumentParser:
    """What reads the command line of a program, with a subcommand for each of its commands."""
    parser = _Parser(prog=program, description=description, formatter_class=_HelpFormatter)
    parser.add_argument("--version", action="version", version=f"promoe {version}")
    subcommands = parser.add_subcommands(required=True, dest="command")
    for name, command in commands.items():
        text = (command.__doc__ or "").partition("\n    Args:")[0].strip()
        subparser = _Parser(description=text, formatter_class=_HelpFormatter)
        subparser.read_signature(command)
        subparser.add_function_arguments(command, as_group=False, as_positional=True)
        subcommands.add_subcommand(name, subparser, help=text.partition("\n")[0])
    return parser


def _check_numbers(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for whole numbers that nothing can count to, and that floats and arrays cannot hold."""
    for name, value in options.items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and not -MAX_NUMBER <= number <= MAX_NUMBER:
                raise ConfigError(
                    f"--{name.replace('_', '-')} must be between -{MAX_NUMBER} and {MAX_NUMBER}. Got {shown(number)} instead."
                )


def _replace_what_cannot_be_written() -> None:
    """In an encoding of fewer characters, `?` for one of the others is better than the end of an answer."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def _write_nowhere() -> None:
    """Nobody reads stdout any more, and what it still holds would be an error when Python ends."""
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

    2: the user can mend it, 130: interrupted, 141: whoever read its output (`head`) has left.
    """
    choose_threads()  # before a command imports torch
    _open_closed_streams()
    name = program
    try:
        parser = make_parser(program, description, version, commands)
        arguments = sys.argv[1:] if argv is None else argv
        parsed = parser.instantiate(parser.parse_args(_options_with_hyphens(arguments)))
        name = f"{program} {parsed.command}"
        _replace_what_cannot_be_written()
        options = vars(parsed[parsed.command])
        _check_numbers(options)
        code = commands[parsed.command](**options)
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
