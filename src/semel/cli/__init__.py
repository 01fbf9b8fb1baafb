"""The command line: `semel COMMAND`. Each command is a module of this package, imported only when it is called.

A command's module has
    HELP       what it does, in a sentence or a paragraph, for its --help page
    EXAMPLE    one or more command lines that work as they stand
    configure(parser: argparse.ArgumentParser) -> None    adds its arguments
    run(args: argparse.Namespace) -> int                  does it; the exit code
and imports everything heavy inside `run`. Exit codes: 0 done, 1 failed, 2 wrong usage, 70 a bug in semel, 130 Ctrl-C;
`audit`, `doctor` and `prove` have more.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import NoReturn

from semel import __version__
from semel.cli.errors import CommandError, exit_code_of

COMMANDS = {
    "broker": "run a Kafka-compatible broker, one process, no JVM",
    "topic": "create, list, describe, alter and delete topics",
    "produce": "write records to a topic",
    "consume": "read records from a topic",
    "group": "list and describe consumer groups, their lag and offsets",
    "outbox": "relay the rows of a PostgreSQL table to topics, exactly once",
    "saga": "list sagas, and those whose compensation is stuck",
    "files": "list and compact the files that a loop has written",
    "txn": "list, describe and abort transactions",
    "ui": "a page that shows topics, transactions, groups and what is wrong",
    "trace": "one transaction step by step",
    "doctor": "what is wrong with transactions, and the command that cures it",
    "demo": "see semel at work",
    "audit": "what an application has read and written, and whether that fits",
    "prove": "try to break the guarantee, and have an independent checker count",
    "completion": "completion of commands and options for bash, zsh and fish",
    "bench": "measure semel side by side with its peers",
}


def available_commands() -> dict[str, str]:
    """The commands whose module is installed, each with its summary."""
    return {name: summary for name, summary in COMMANDS.items() if find_spec(f"semel.cli.{name}") is not None}


def main(arguments: Sequence[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):  # what the terminal's encoding lacks is printed as an escape
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if sys.stdout is None:
            raise CommandError("stdout is closed; redirect what is not needed: >/dev/null")
        code = _dispatch(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()  # a reader that went away is noticed here, not at interpreter exit
        return code
    except BaseException as error:
        return exit_code_of(error)


def _dispatch(arguments: list[str]) -> int:
    """Finds the command before parsing, so that only its module is imported."""
    commands = available_commands()
    if not arguments or arguments[0] not in commands:
        return _without_command(arguments, commands)
    name, *rest = arguments
    module = import_module(f"semel.cli.{name}")
    parser = _Parser(
        prog=f"semel {name}",
        description=module.HELP,
        epilog=f"example:\n{_indented(module.EXAMPLE)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.configure(parser)
    code: int = module.run(parser.parse_args(rest))
    return code


def _without_command(arguments: list[str], commands: dict[str, str]) -> int:
    listing = "\n".join(f"  {name:<12}{summary}" for name, summary in commands.items())
    parser = _Parser(
        prog="semel",
        usage="semel [--version] COMMAND ...",
        description="Exactly-once Kafka pipelines on PySpark, with a Kafka-compatible broker.",
        epilog=f"commands:\n{listing}\n\n`semel COMMAND --help` says more.\n\nexample:\n  semel demo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"semel {__version__}")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    known, _ = parser.parse_known_args(arguments)  # type: ignore[no-untyped-call]
    if known.command is not None:
        parser.error(f"there is no command {known.command!r}; the commands are {', '.join(commands)}")
    if arguments:
        parser.error(f"there is no option {arguments[0]!r} before the command; `semel --help` says what there is")
    parser.print_help()
    return 0


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines())


class _Parser(argparse.ArgumentParser):
    """Reports wrong usage in one line, like every other error, an unknown option with the nearest one."""

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and self.prog.count(" ") > 1:  # an action's own page helps, not that of its command
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"semel: {message}{self._nearest_option(message)} (`{self.prog} --help` helps)\n")

    def _nearest_option(self, message: str) -> str:
        problem, _, unknown = message.partition(": ")
        if problem != "unrecognized arguments" or not unknown.startswith("--"):
            return ""
        import difflib

        given = unknown.split()[0].partition("=")[0]
        near = difflib.get_close_matches(given, [name for name in self._option_string_actions if name[:2] == "--"], n=1)
        return f"; did you mean {near[0]}?" if near else ""
