"""What the commands that talk to a cluster share: where it is, how to reach it, and how to print."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from semel.cli.errors import UsageError

if TYPE_CHECKING:
    from semel.client.admin import Admin
    from semel.client.settings import ClientSettings

DEFAULT_BROKERS = "localhost:9092"
MOST_SECONDS = 1e9


def add_connection_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("connection")
    group.add_argument(
        "-b",
        "--brokers",
        metavar="HOST:PORT,...",
        default=os.environ.get("SEMEL_BROKERS") or DEFAULT_BROKERS,
        help=f"brokers to ask (default: SEMEL_BROKERS, else {DEFAULT_BROKERS})",
    )
    group.add_argument(
        "-X",
        "--option",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        dest="options",
        help="an option of the client by Kafka's name, such as security.protocol=SASL_SSL; may be repeated",
    )
    group.add_argument(
        "--timeout", metavar="SECONDS", type=seconds, default=10.0, help="give up after so long (default: 10)"
    )


def seconds(text: str) -> float:
    """The type of an option that is a time."""
    value = float(text)
    if not 0 < value <= MOST_SECONDS:  # false for nan, too
        raise argparse.ArgumentTypeError(f"expected seconds, above 0, got {text}")
    return value


def at_least_one(text: str) -> int:
    """The type of an option that is a count."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return value


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-J", "--json", action="store_true", help="one JSON object for each line, for scripts")


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Of an action on a cluster."""
    add_json_option(parser)
    add_connection_options(parser)


def run_action(args: argparse.Namespace, actions: Mapping[str, Callable[[Admin, argparse.Namespace], None]]) -> int:
    """Calls the function of the action that was named."""
    from semel.client.admin import Admin

    with Admin(client_options(args)) as admin:
        actions[args.action](admin, args)
    return 0


def client_options(
    args: argparse.Namespace, kind: type[ClientSettings] | None = None, **defaults: Any
) -> dict[str, Any]:
    """The options of a client: defaults, then the connection, then what -X says. Raises UsageError for what a client of
    this kind (else, of any kind) does not take."""
    from semel.client.errors import ConfigError
    from semel.client.settings import ClientSettings

    timeout_ms = max(1, int(args.timeout * 1000))
    options: dict[str, Any] = {
        "client_id": "semel-cli",
        "bootstrap_servers": args.brokers,
        "default_api_timeout_ms": timeout_ms,
        **defaults,
    }
    for given in args.options:
        name, equals, value = given.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"-X wants NAME=VALUE, got {given!r}")
        options[name.strip().replace(".", "_")] = value
    try:
        (kind or ClientSettings).of(options)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    return options


def pairs(given: Iterable[str], flag: str) -> dict[str, str]:
    """NAME=VALUE arguments as a dict."""
    found = {}
    for entry in given:
        name, equals, value = entry.partition("=")
        if not equals or not name:
            raise UsageError(f"{flag} wants NAME=VALUE, got {entry!r}")
        found[name] = value
    return found


def print_json(value: Any) -> None:
    import msgspec

    line = msgspec.json.encode(value) + b"\n"
    sys.stdout.flush()
    if hasattr(sys.stdout, "buffer"):  # JSON is UTF-8, whatever the terminal's encoding is
        sys.stdout.buffer.write(line)
    else:  # a stream of text, as in a notebook
        sys.stdout.write(line.decode())
    sys.stdout.flush()


def report(args: argparse.Namespace, value: Any, text: str) -> None:
    """What was done, for scripts or for people."""
    print_json(value) if args.json else print(text)


def print_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Aligned columns; '-' for what is not known."""
    cells = [list(head), *(["-" if cell is None else printable(str(cell)) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    for line in cells:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def printable(text: str) -> str:
    """A name that somebody else has chosen, without what a terminal would obey."""
    return text if text.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


# -- records as JSON ---------------------------------------------------------------------------------------------------
def record_to_json(record: Any) -> str:
    """A record as one line. Bytes that are no UTF-8 go into a field with _base64 after its name."""
    line: dict[str, Any] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
    }
    for name in ("key", "value"):
        _put(line, name, getattr(record, name))
    if record.headers:
        line["headers"] = [_header_to_json(name, value) for name, value in record.headers]
    return json.dumps(line, ensure_ascii=False)


def _put(line: dict[str, Any], name: str, data: bytes | None) -> None:
    import base64

    try:
        line[name] = None if data is None else data.decode()
    except UnicodeDecodeError:
        line[f"{name}_base64"] = base64.b64encode(data or b"").decode()


def _header_to_json(name: str, value: bytes | None) -> list[Any]:
    entry: dict[str, Any] = {}
    _put(entry, "value", value)
    return [name, entry["value"]] if "value" in entry else [name, {"base64": entry["value_base64"]}]
