"""`semel txn`: list, describe and abort transactions."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from semel.cli.client_options import add_common_options, print_json, print_table, report, run_action
from semel.cli.errors import UsageError

if TYPE_CHECKING:
    from semel.client.admin import Admin

HELP = "Lists, describes and aborts transactions."
EXAMPLE = """
semel txn list --state Ongoing
semel txn describe billing-0
semel txn abort billing-0
semel txn abort --topic orders --partition 0 --start-offset 1234
"""


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    one = actions.add_parser("list", help="the transactional ids that the coordinators know")
    one.add_argument("--state", metavar="STATE", action="append", default=[], help="such as Ongoing; may be repeated")
    one.add_argument("--producer-id", metavar="N", type=int, action="append", default=[], help="may be repeated")
    add_common_options(one)

    one = actions.add_parser("describe", help="state, owner and partitions of a transactional id")
    one.add_argument("ids", metavar="ID", nargs="+")
    add_common_options(one)

    one = actions.add_parser(
        "abort",
        help="abort what a transactional id has open and fence its owner; or end a transaction that hangs in a "
        "partition because its coordinator has forgotten it",
    )
    one.add_argument("id", metavar="ID", nargs="?")
    one.add_argument("--topic", metavar="TOPIC", help="of a hanging transaction")
    one.add_argument("--partition", type=int, metavar="N")
    one.add_argument("--start-offset", type=int, metavar="N", help="where the hanging transaction begins")
    add_common_options(one)


def run(args: argparse.Namespace) -> int:
    return run_action(args, {"list": _list, "describe": _describe, "abort": _abort})


def _list(admin: Admin, args: argparse.Namespace) -> None:
    found = admin.list_transactions(args.state, args.producer_id)
    if args.json:
        for entry in found:
            print_json(entry)
    else:
        print_table(("id", "producer id", "state"), ((e.transactional_id, e.producer_id, e.state) for e in found))


def _describe(admin: Admin, args: argparse.Namespace) -> None:
    for name in args.ids:
        found = admin.describe_transaction(name)
        if args.json:
            print_json(found)
            continue
        open_s = time.time() - found.start_time_ms / 1000 if found.start_time_ms >= 0 else None
        print(f"{name}: {found.state}" + (f" for {open_s:.1f} s" if open_s is not None else ""))
        print(f"  producer id {found.producer_id}, epoch {found.epoch}, timeout {found.timeout_ms} ms")
        print(f"  partitions: {', '.join(map(str, found.partitions)) or 'none'}")


def _abort(admin: Admin, args: argparse.Namespace) -> None:
    hanging = (args.topic, args.partition, args.start_offset)
    if (args.id is None) == (hanging == (None, None, None)):
        raise UsageError("name a transactional id, or --topic, --partition and --start-offset of a hanging transaction")
    if args.id is not None:
        producer_id, epoch = admin.abort_transaction(args.id)
        text = f"{args.id}: aborted what was open; its owner is fenced (epoch is now {epoch})"
        report(args, {"id": args.id, "aborted": True, "producer_id": producer_id, "epoch": epoch}, text)
        return
    if None in hanging:
        raise UsageError("a hanging transaction is named by --topic, --partition and --start-offset together")
    producer = admin.abort_hanging_transaction((args.topic, args.partition), args.start_offset)
    text = f"{args.topic}-{args.partition}: aborted the transaction of producer {producer.producer_id}"
    report(args, producer, text)
