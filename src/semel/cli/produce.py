"""`semel produce`: write records to a topic, from lines, JSON or whole files."""

from __future__ import annotations

import argparse
import base64
import difflib
import errno
import json
import os
import stat
import sys
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from semel.cli.client_options import add_connection_options, at_least_one, client_options, pairs, print_json
from semel.cli.errors import CommandError, UsageError, text_of
from semel.progress import ProgressBar

# The fields of a record, each with the other names that stand for it.
NAMES = {
    "value": ("value", "value_base64", "payload"),
    "key": ("key", "key_base64"),
    "headers": ("headers",),
    "partition": ("partition",),
    "timestamp": ("timestamp", "ts"),
}
# Where a record came from, which says nothing about where it goes.
IGNORED = ("topic", "offset", "tstype", "broker")
KNOWN = (*(name for names in NAMES.values() for name in names), *IGNORED)


class Line(NamedTuple):
    value: bytes | None
    key: bytes | None = None
    partition: int | None = None
    timestamp: int | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()


def json_line(data: bytes, where: str) -> Line:
    """A record from a JSON object; `where` it stands, for the error."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{where}: this is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise CommandError(f"{where}: expected a JSON object with a value, got {type(fields).__name__}")
    try:
        return _line(fields)
    except (TypeError, ValueError) as error:
        raise CommandError(f"{where}: {error}") from None


def _line(fields: dict[str, Any]) -> Line:
    for name in fields:
        if name not in KNOWN:
            raise ValueError(f"unknown field {name!r}; {_advice(name)}")
    value, key, headers, partition, timestamp = (_one_of(fields, names) for names in NAMES.values())
    if value is None:
        raise ValueError('there is no value; write "value": null for a null (it deletes the key of a compacted topic)')
    return Line(
        _bytes_of(fields, value),
        None if key is None else _bytes_of(fields, key),
        # The partition of another topic says nothing about this one.
        _number(fields, partition) if fields.get("topic") is None else None,
        _number(fields, timestamp),
        () if headers is None else tuple(_headers(fields[headers])),
    )


def _advice(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), KNOWN, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    return f'the fields are {", ".join(NAMES)}; an object that is itself the value goes into "value"'


def _one_of(fields: dict[str, Any], names: tuple[str, ...]) -> str | None:
    """Which of the names of a field is there."""
    found = [name for name in names if name in fields]
    if len(found) > 1:
        raise ValueError(f"{' and '.join(found)} are two names of one field; give one of them")
    return found[0] if found else None


def _number(fields: dict[str, Any], name: str | None) -> int | None:
    number = None if name is None else fields[name]
    if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
        raise ValueError(f"{name} is {number!r}; expected a whole number")
    return number


def _headers(given: Any) -> list[tuple[str, bytes | None]]:
    """An object, a list of [name, value], or kcat's list of names and values in turn."""
    listed = given
    if given is None:
        return []
    if isinstance(given, dict):
        listed = list(given.items())
    elif isinstance(given, list) and given and isinstance(given[0], str) and not len(given) % 2:
        listed = list(zip(given[::2], given[1::2], strict=True))
    if not isinstance(listed, list) or not all(
        isinstance(entry, list | tuple) and len(entry) == 2 and isinstance(entry[0], str) for entry in listed
    ):
        raise ValueError(f"headers is {given!r}; expected an object, or a list of [name, value]")
    return [(name, _plain_bytes(value)) for name, value in listed]


def _bytes_of(fields: dict[str, Any], name: str) -> bytes | None:
    if name.endswith("_base64"):
        return _plain_bytes({"base64": fields[name]})
    return _plain_bytes(fields[name])


def _plain_bytes(value: Any) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and set(value) == {"base64"}:
        return base64.b64decode(value["base64"], validate=True)
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


# --- the command ---
if TYPE_CHECKING:
    from semel.client.producer import Producer

HELP = """Writes records to a topic: one for each line of the given files, or of stdin (-, the default).
It ends with code 0 only if the brokers have stored every record; what they refuse for a moment is sent again for two
minutes (-X delivery.timeout.ms=120000)."""
EXAMPLE = r"""
echo hello | semel produce orders
semel produce orders -K : -H source=shop lines.txt
semel consume orders -J -e | semel produce copy -J
semel produce images --whole photo.jpg --transactional-id uploads
"""

CHUNK_BYTES = 1 << 20
KEPT_DELIVERIES = 50_000


def configure(parser: argparse.ArgumentParser) -> None:
    # Options may stand between the topic and the files, which argparse takes only in this way.
    parser.parse_args = parser.parse_intermixed_args  # type: ignore[method-assign]
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument("files", metavar="FILE", nargs="*", default=["-"], help="- is stdin (default)")
    parser.add_argument("-K", "--key-delimiter", metavar="TEXT", help="what stands before it in a line is the key")
    parser.add_argument("-k", "--key", metavar="KEY", help="the key of all records")
    delimiter = r"between records (default: \n; give \r\n for a file with Windows line ends)"
    parser.add_argument("-D", "--delimiter", metavar="TEXT", default=r"\n", help=delimiter)
    parser.add_argument("-H", "--header", metavar="NAME=VALUE", action="append", default=[], help="may be repeated")
    parser.add_argument("-p", "--partition", type=int, metavar="N", help="default: by key, or any without one")
    parser.add_argument("-Z", "--null", action="store_true", help="an empty value (or key) is null")
    parser.add_argument("-c", "--count", type=at_least_one, metavar="N", help="stop after N records")
    parser.add_argument(
        "-z", "--compression", choices=("none", "gzip", "snappy", "lz4", "zstd"), default="none", metavar="CODEC"
    )
    parser.add_argument(
        "-J",
        "--json",
        action="store_true",
        help="lines are JSON objects as `semel consume -J` and kcat write them: value (or payload; a null is written "
        "as null), key, headers, partition, timestamp; a field that is not known is refused",
    )
    parser.add_argument("--whole", action="store_true", help="each file is one record")
    parser.add_argument(
        "--transactional-id", metavar="ID", help="write all records in one transaction: all become visible, or none"
    )
    parser.add_argument("--summary", action="store_true", help="at the end, one JSON line with the count on stdout")
    add_connection_options(parser)


def run(args: argparse.Namespace) -> int:
    from semel.client.producer import Producer
    from semel.client.settings import ProducerSettings

    if args.key is not None and args.key_delimiter is not None:
        raise UsageError("-k gives all records one key, -K each its own; choose one")
    if args.json and (args.whole or args.key_delimiter is not None):
        raise UsageError("-J reads keys from the JSON; it does not go with -K or --whole")
    if args.key_delimiter == "":
        raise UsageError("-K must not be empty; -k gives all records one key")
    _check_files(args.files)
    options = client_options(
        args,
        ProducerSettings,
        compression_type=args.compression,
        max_block_ms=max(1, int(args.timeout * 1000)),
        transactional_id=args.transactional_id,  # an empty one is refused
    )
    with Producer(options) as producer:
        if args.transactional_id is not None:
            producer.init_transactions()
            with producer.transaction():
                count = _send_all(producer, args)
        else:
            count = _send_all(producer, args)
    if args.summary:
        print_json({"topic": args.topic, "records": count})
    return 0


def _check_files(names: list[str]) -> None:
    """Before anything is written. Nothing is opened: a pipe would lose what is in it."""
    for name in names:
        if name == "-":
            if sys.stdin is None:
                raise CommandError("stdin is closed; name files, or pipe the records in")
            continue
        try:
            if stat.S_ISDIR(os.stat(name).st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
            if not os.access(name, os.R_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        except OSError as error:
            raise CommandError(f"{text_of(error)}; nothing was written") from None


def _send_all(producer: Producer, args: argparse.Namespace) -> int:
    """Sends, checking deliveries as they come, so that memory stays bounded."""
    count, deliveries = 0, []
    with ProgressBar(f"writing to {args.topic}", args.count) as shown:
        for line in _lines(args):
            partition = args.partition if line.partition is None else line.partition
            deliveries.append(
                producer.send(args.topic, line.value, line.key, partition, line.timestamp, line.headers or None)
            )
            count += 1
            shown.show(count)
            if len(deliveries) >= KEPT_DELIVERIES:
                for delivery in deliveries[: KEPT_DELIVERIES // 2]:
                    delivery.result()
                del deliveries[: KEPT_DELIVERIES // 2]
            if args.count is not None and count >= args.count:
                break
        producer.flush()
        for delivery in deliveries:
            delivery.result()
    return count


# -- reading -----------------------------------------------------------------------------------------------------------
def _lines(args: argparse.Namespace) -> Iterator[Line]:
    named = (pair for given in args.header for pair in pairs([given], "-H").items())
    headers = tuple((name, os.fsencode(value)) for name, value in named)
    for data, where in _pieces(args):
        if args.json:
            line = json_line(data, where)
            yield line._replace(headers=headers + line.headers)
        else:
            key, value = _split_key(data, args)
            yield Line(value, key, headers=headers)


def _split_key(data: bytes, args: argparse.Namespace) -> tuple[bytes | None, bytes | None]:
    key: bytes | None = None if args.key is None else os.fsencode(args.key)
    value: bytes | None = data
    if args.key_delimiter is not None:
        first, found, rest = data.partition(unescape(args.key_delimiter))
        if found:
            key, value = first, rest
    if args.null:
        key, value = key or None, value or None
    return key, value


def _pieces(args: argparse.Namespace) -> Iterator[tuple[bytes, str]]:
    """The bytes of each record, and where they stand."""
    delimiter = unescape(args.delimiter)
    if not delimiter:
        raise UsageError("-D must not be empty; --whole makes each file one record")
    for name in args.files:
        stream: IO[bytes] = sys.stdin.buffer if name == "-" else open(name, "rb")  # noqa: SIM115 - closed below
        try:
            if args.whole:
                yield stream.read(), name
                continue
            for number, piece in enumerate(split_stream(stream, delimiter), 1):
                yield piece, f"{'stdin' if name == '-' else name}, record {number}"
        finally:
            if name != "-":
                stream.close()


def split_stream(stream: IO[bytes], delimiter: bytes) -> Iterator[bytes]:
    """What stands between delimiters; one at the very end starts no record. Records leave as soon as they are whole."""
    read = getattr(stream, "read1", stream.read)
    rest = b""
    while data := read(CHUNK_BYTES):
        *whole, rest = (rest + data).split(delimiter)
        yield from whole
    if rest:
        yield rest


def unescape(text: str) -> bytes:
    r"""\n, \t, \0 and \xHH as the bytes that they name."""
    try:
        return os.fsencode(text).decode("unicode_escape").encode("latin-1") if "\\" in text else os.fsencode(text)
    except UnicodeError:
        raise UsageError(rf"invalid escape in {text}: expected \n, \t, \0, \xHH, or \\ for a backslash") from None
