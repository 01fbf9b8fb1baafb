"""`semel txn`: list, describe and abort transactions."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from semel.cli.client_options import add_common_options, print_json, print_table, report, run_action
from semel.cli.errors import UsageError

if TYPE_CHECKING:
    from semel.client.admin import Admin
    from semel.client.admin.transactions import TransactionInfo

HELP = "Lists, describes and aborts transactions."
EXAMPLE = """
semel txn list --state Ongoing
semel txn describe billing-0
semel txn list --two-phase
semel txn abort billing-0
semel txn abort --topic orders --partition 0 --start-offset 1234
"""


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    one = actions.add_parser("list", help="the transactional ids that the coordinators know")
    one.add_argument("--state", metavar="STATE", action="append", default=[], help="such as Ongoing; may be repeated")
    one.add_argument("--producer-id", metavar="N", type=int, action="append", default=[], help="may be repeated")
    one.add_argument("--two-phase", action="store_true", help="open ones without a timeout: only their owner ends them")
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
    one.add_argument(
        "--force",
        action="store_true",
        help="also a transaction of two-phase commit, although what it belongs to may be decided elsewhere",
    )
    add_common_options(one)


def run(args: argparse.Namespace) -> int:
    return run_action(args, {"list": _list, "describe": _describe, "abort": _abort})


def _list(admin: Admin, args: argparse.Namespace) -> None:
    if args.two_phase:
        _list_two_phase(admin, args)
        return
    found = admin.list_transactions(args.state, args.producer_id)
    if args.json:
        for entry in found:
            print_json(entry)
    else:
        print_table(("id", "producer id", "state"), ((e.transactional_id, e.producer_id, e.state) for e in found))


def _list_two_phase(admin: Admin, args: argparse.Namespace) -> None:
    """Whether such a transaction is prepared is known to its owner alone: the coordinator sees that it is open."""
    listed = admin.list_transactions(args.state or ["Ongoing"], args.producer_id)
    described = (admin.describe_transaction(entry.transactional_id) for entry in listed)
    found = [info for info in described if info.is_two_phase]
    if args.json:
        for info in found:
            print_json(info)
        return
    rows = ((i.transactional_id, f"{i.producer_id}:{i.epoch}", i.state, f"{_open_s(i):.1f} s") for i in found)
    print_table(("id", "prepared transaction", "state", "open for"), rows)


def _open_s(found: TransactionInfo) -> float:
    return max(time.time() - found.start_time_ms / 1000, 0.0)


def _describe(admin: Admin, args: argparse.Namespace) -> None:
    for name in args.ids:
        found = admin.describe_transaction(name)
        if args.json:
            print_json(found)
            continue
        print(f"{name}: {found.state}" + (f" for {_open_s(found):.1f} s" if found.start_time_ms >= 0 else ""))
        timeout = "no timeout (two-phase commit)" if found.is_two_phase else f"timeout {found.timeout_ms} ms"
        print(f"  producer id {found.producer_id}, epoch {found.epoch}, {timeout}")
        print(f"  partitions: {', '.join(map(str, found.partitions)) or 'none'}")


def _abort(admin: Admin, args: argparse.Namespace) -> None:
    hanging = (args.topic, args.partition, args.start_offset)
    if (args.id is None) == (hanging == (None, None, None)):
        raise UsageError("name a transactional id, or --topic, --partition and --start-offset of a hanging transaction")
    if args.id is not None:
        _check_not_decided_elsewhere(admin, args)
        producer_id, epoch = admin.abort_transaction(args.id)
        text = f"{args.id}: aborted what was open; its owner is fenced (epoch is now {epoch})"
        report(args, {"id": args.id, "aborted": True, "producer_id": producer_id, "epoch": epoch}, text)
        return
    if None in hanging:
        raise UsageError("a hanging transaction is named by --topic, --partition and --start-offset together")
    producer = admin.abort_hanging_transaction((args.topic, args.partition), args.start_offset)
    text = f"{args.topic}-{args.partition}: aborted the transaction of producer {producer.producer_id}"
    report(args, producer, text)


def _check_not_decided_elsewhere(admin: Admin, args: argparse.Namespace) -> None:
    found = admin.describe_transaction(args.id)
    if found.is_two_phase and found.state == "Ongoing" and not args.force:
        raise UsageError(
            f"{args.id} has a transaction of two-phase commit open ({found.producer_id}:{found.epoch}). It may be "
            "decided elsewhere, in the database of the application: start the application, which ends it as decided. "
            "An abort loses its records, although the rows that were decided together with them stay. If the "
            "application will never run again and nothing in its database names this transaction, abort it with --force"
        )
