"""Commands made from typed functions: options, help and mistakes come from their signatures and docstrings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jsonargparse import ArgumentParser

from promoe.errors import PromoeError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


class _Parser(ArgumentParser):
    """Options as shells have them: hyphens for underscores, and a flag for what is False by default."""

    def add_argument(self, *args: Any, **kwargs: Any) -> Any:
        names = tuple(name.replace("_", "-") if name.startswith("--") else name for name in args)
        if kwargs.get("default") is False and kwargs.get("type") is bool:
            kwargs = {"help": kwargs.get("help"), "action": "store_true"}
        return super().add_argument(*names, **kwargs)


def _with_hyphens(argument: str) -> str:
    """`--trainer.max_epochs=3` as `--trainer.max-epochs=3`: Python's names are accepted too."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


Commands = Mapping[str, Callable[..., int]]


def _make_parser(program: str, description: str, version: str, commands: Commands) -> ArgumentParser:
    parser = _Parser(prog=program, description=description)
    parser.add_argument("--version", action="version", version=f"promoe {version}")
    subcommands = parser.add_subcommands(required=True, dest="command")
    for name, command in commands.items():
        text = (command.__doc__ or "").partition("\n    Args:")[0].strip()
        subparser = _Parser(description=text)
        subparser.add_function_arguments(command, as_group=False, as_positional=True)
        subcommands.add_subcommand(name, subparser, help=text.partition("\n")[0])
    return parser


def run_command(program: str, description: str, version: str, commands: Commands, argv: Sequence[str] | None) -> int:
    """Run the command that `argv` names and return its exit code; 2: the user can mend it, 130: interrupted."""
    parser = _make_parser(program, description, version, commands)
    arguments = [_with_hyphens(text) for text in (sys.argv[1:] if argv is None else argv)]
    parsed = parser.instantiate(parser.parse_args(arguments))
    try:
        return commands[parsed.command](**vars(parsed[parsed.command]))
    except PromoeError as error:
        print(f"{program} {parsed.command}: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(f"\n{program} {parsed.command}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
