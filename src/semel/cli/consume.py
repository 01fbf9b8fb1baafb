"""`semel consume`: read records from a topic and print them."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any

from semel.cli.client_options import add_connection_options, at_least_one, client_options, record_to_json
from semel.cli.errors import CommandError, UsageError
from semel.progress import ProgressBar

if TYPE_CHECKING:
    from semel.client.consumer import Consumer
    from semel.client.types import ConsumerRecord, TopicPartition

HELP = r"""Reads records from a topic and prints them, one for each line. It waits for new ones unless -e or -c end it.

-o says where to start in each partition:
  beginning | end | stored    the first record, past the last one, or the committed offset of the group (-G)
  N | -N                      offset N; N records before the end
  s@TIME                      the first record at or after a time (milliseconds or ISO); e@TIME ends before one

-f takes %t topic, %p partition, %o offset, %k key, %s value, %T timestamp, %h headers, %K and %S lengths, \n, \t."""
EXAMPLE = r"""
semel consume orders -e
semel consume orders -o -10 -e -K :
semel consume orders -o s@2026-01-31T12:00 -J
semel consume orders -p 0 -o 1000 -c 1 -f '%p %o %k=%s\n'
semel consume orders -G billing
"""

POLL_MS = 500
FORMAT_FIELDS = "tpoksThKS"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument(
        "-o", "--offset", metavar="WHERE", action="append", default=[], help="where to start (default: beginning)"
    )
    parser.add_argument(
        "-p", "--partition", type=int, action="append", default=[], metavar="N", help="only this one; may be repeated"
    )
    parser.add_argument("-c", "--count", type=at_least_one, metavar="N", help="stop after N records")
    parser.add_argument("-e", "--exit", action="store_true", help="stop at the end of what is there now")
    parser.add_argument("-f", "--format", metavar="FORMAT", help="how to print a record; see above")
    parser.add_argument("-J", "--json", action="store_true", help="one JSON object for each line")
    parser.add_argument("-K", "--key-delimiter", metavar="TEXT", help="print the key and this before the value")
    parser.add_argument("-D", "--delimiter", metavar="TEXT", default=r"\n", help=r"after each record (default: \n)")
    parser.add_argument("-Z", "--null", action="store_true", help="print NULL for null keys and values")
    parser.add_argument("-G", "--group", metavar="GROUP", help="read as a member of a group and commit offsets")
    parser.add_argument(
        "--uncommitted", action="store_true", help="also records of transactions that are open or were aborted"
    )
    add_connection_options(parser)


def run(args: argparse.Namespace) -> int:
    from semel.client.consumer import Consumer
    from semel.client.settings import ConsumerSettings

    if sum((args.json, args.format is not None, args.key_delimiter is not None)) > 1:
        raise UsageError("-J, -f and -K are three ways to print a record; choose one")
    if args.group is not None and (args.partition or args.exit):
        raise UsageError("a group (-G) shares partitions out by itself: it does not go with -p or -e")
    write = writer(args, sys.stdout.buffer)
    options = client_options(
        args,
        ConsumerSettings,
        isolation_level="read_uncommitted" if args.uncommitted else "read_committed",
        allow_auto_create_topics=False,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        group_id=args.group,
    )
    with Consumer(options) as consumer:
        if args.group is not None:
            _read_as_member(consumer, args, write)
        else:
            _read(consumer, args, write)
    return 0


# -- reading -----------------------------------------------------------------------------------------------------------
def _read(consumer: Consumer, args: argparse.Namespace, write: Callable[[ConsumerRecord], object]) -> None:
    from semel.client.types import TopicPartition

    there = _partitions(args)
    missing = set(args.partition) - set(there)
    if missing:
        raise CommandError(f"topic {args.topic!r} has no partition {min(missing)}; it has 0 to {max(there)}")
    partitions = [TopicPartition(args.topic, number) for number in (args.partition or there)]
    starts, ends, there_now = places(consumer, partitions, args)
    consumer.assign(partitions)
    for partition, offset in starts.items():
        consumer.seek(partition, min(offset, there_now[partition]))  # past the end, a consumer begins anew
    left = args.count if args.count is not None else sys.maxsize
    total = sum(end - starts[partition] for partition, end in ends.items()) if ends else None
    with ProgressBar(f"reading {args.topic}", total if args.count is None else args.count) as shown:
        count = 0
        while left > count and not _is_done(consumer, ends):
            for record in consumer.poll(POLL_MS, max_records=min(left - count, 10_000)):
                partition = TopicPartition(record.topic, record.partition)
                if starts[partition] <= record.offset < ends.get(partition, sys.maxsize):
                    write(record)
                    count += 1
            sys.stdout.buffer.flush()
            if not sys.stdout.isatty():
                shown.show(count)


def _is_done(consumer: Consumer, ends: dict[TopicPartition, int]) -> bool:
    """Partitions at their end are not fetched any more."""
    done = [partition for partition, end in ends.items() if consumer.position(partition) >= end]
    consumer.pause(*done) if done else None
    return bool(ends) and len(done) == len(ends)


def _read_as_member(consumer: Consumer, args: argparse.Namespace, write: Callable[[ConsumerRecord], object]) -> None:
    _partitions(args)
    if args.offset not in ([], ["stored"], ["beginning"], ["end"]):
        raise UsageError("with -G, -o is stored (default), beginning or end")
    listener = _move_to(consumer, args.offset[0]) if args.offset and args.offset != ["stored"] else None
    consumer.subscribe([args.topic], listener)
    count = 0
    while args.count is None or count < args.count:
        most = 500 if args.count is None else min(500, args.count - count)
        records = consumer.poll(POLL_MS, max_records=most)
        for record in records:
            write(record)
        sys.stdout.buffer.flush()
        count += len(records)
        if records:
            consumer.commit()


def _move_to(consumer: Consumer, where: str) -> Any:
    from semel.client.consumer.core import RebalanceListener

    class Mover(RebalanceListener):
        def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
            if partitions:
                (consumer.seek_to_beginning if where == "beginning" else consumer.seek_to_end)(*partitions)

    return Mover()


def _partitions(args: argparse.Namespace) -> list[int]:
    from semel.client.admin import Admin
    from semel.client.settings import ConsumerSettings

    with Admin(ConsumerSettings.of(client_options(args, ConsumerSettings))) as admin:
        return [part.partition for part in admin.describe_topics([args.topic])[0].partitions]


def places(
    consumer: Consumer, partitions: list[TopicPartition], args: argparse.Namespace
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int], dict[TopicPartition, int]]:
    """(where to start, where to end, the end now) in each partition; no end where reading goes on for ever."""
    first = consumer.beginning_offsets(partitions)
    end = consumer.settled_ends(partitions) if args.exit else consumer.end_offsets(partitions)
    starts, ends = dict(first), dict(end) if args.exit else {}
    for where in args.offset:
        if where.startswith("e@"):
            found = _at_time(consumer, partitions, where[2:])
            ends = {part: end[part] if offset is None else offset for part, offset in found.items()}
        elif where.startswith("s@"):
            found = _at_time(consumer, partitions, where[2:])
            starts = {part: end[part] if offset is None else offset for part, offset in found.items()}
        elif where in ("beginning", "end"):
            starts = dict(first if where == "beginning" else end)
        elif re.fullmatch(r"-?\d+", where):
            number = int(where)
            starts = {
                part: max(first[part], end[part] + number) if where.startswith("-") else number for part in partitions
            }
        else:
            raise UsageError(f"-o is beginning, end, N, -N, s@TIME or e@TIME (stored only with -G), got {where!r}")
    return starts, ends, end


def _at_time(consumer: Consumer, partitions: list[TopicPartition], text: str) -> dict[TopicPartition, int | None]:
    from semel.cli.group import milliseconds

    found = consumer.offsets_for_times(dict.fromkeys(partitions, milliseconds(text)))
    return {partition: None if at is None else at.offset for partition, at in found.items()}


# -- printing ----------------------------------------------------------------------------------------------------------
def writer(args: argparse.Namespace, out: IO[bytes]) -> Callable[[ConsumerRecord], object]:
    """A function that prints a record in the format that the options name."""
    from semel.cli.produce import unescape

    null = b"NULL" if args.null else b""
    end = unescape(args.delimiter)
    if args.json:
        return lambda record: out.write(record_to_json(record).encode() + b"\n")
    if args.format is not None:
        template = parse_format(args.format)
        return lambda record: out.write(b"".join(render(part, record, null) for part in template))
    if args.key_delimiter is not None:
        between = unescape(args.key_delimiter)
        return lambda record: out.write(_or(record.key, null) + between + _or(record.value, null) + end)
    return lambda record: out.write(_or(record.value, null) + end)


def parse_format(text: str) -> list[bytes | str]:
    """Plain bytes and the letters of fields, in order."""
    from semel.cli.produce import unescape

    parts: list[bytes | str] = []
    for piece in re.split(r"(%.)", text):
        if piece == "%%":
            parts.append(b"%")
        elif piece.startswith("%"):
            if len(piece) < 2 or piece[1] not in FORMAT_FIELDS:
                raise UsageError(f"-f does not know {piece!r}; it takes {' '.join('%' + f for f in FORMAT_FIELDS)}")
            parts.append(piece[1])
        elif piece:
            parts.append(unescape(piece))
    return parts


def render(part: bytes | str, record: ConsumerRecord, null: bytes) -> bytes:
    if isinstance(part, bytes):
        return part
    fields: dict[str, Callable[[], bytes | int | str]] = {
        "t": lambda: record.topic,
        "p": lambda: record.partition,
        "o": lambda: record.offset,
        "k": lambda: _or(record.key, null),
        "s": lambda: _or(record.value, null),
        "T": lambda: record.timestamp,
        "h": lambda: b",".join(name.encode() + b"=" + _or(value, null) for name, value in record.headers),
        "K": lambda: -1 if record.key is None else len(record.key),
        "S": lambda: -1 if record.value is None else len(record.value),
    }
    value = fields[part]()
    return value if isinstance(value, bytes) else str(value).encode()


def _or(data: bytes | None, null: bytes) -> bytes:
    return null if data is None else data
