"""`semel outbox`: makes the outbox's tables, relays their rows to topics, shows what waits."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from semel.cli.client_options import add_connection_options, add_json_option, client_options, print_json, report
from semel.cli.errors import UsageError
from semel.progress import ProgressBar

if TYPE_CHECKING:
    from semel.patterns.outbox import Outbox

DSN_VARIABLE = "SEMEL_DSN"
HELP = f"""Relays rows that an application inserts into a PostgreSQL table, in its own transactions, to topics:
exactly once, and per key in the order of insertion. The DSN may stand in the environment variable {DSN_VARIABLE}, where
no list of processes shows its password."""
EXAMPLE = """
semel outbox init --dsn postgresql://bank@localhost/ledger
semel outbox run --dsn postgresql://bank@localhost/ledger --application-id bank
semel outbox status --dsn postgresql://bank@localhost/ledger --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    one = actions.add_parser("init", help="create the tables, if they are not there")
    _add_database(one)

    one = actions.add_parser("run", help="relay rows until SIGTERM or Ctrl-C")
    _add_database(one)
    one.add_argument("--application-id", required=True, metavar="ID", help="names the relay and its topic of chunks")
    one.add_argument(
        "--max-rows", type=int, default=5_000, metavar="N", help="rows per Kafka transaction (default 5000)"
    )
    one.add_argument("--until-empty", action="store_true", help="return when all rows are sent")
    one.add_argument(
        "--accept-database",
        action="store_true",
        help="after a restore: send what the table holds, although the topic of chunks says that it is older",
    )
    add_connection_options(one)

    one = actions.add_parser("status", help="rows that wait, for how long and for whom; rows that were set aside")
    _add_database(one)


def _add_database(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dsn", default=os.environ.get(DSN_VARIABLE), help=f"where it is (default: ${DSN_VARIABLE})")
    parser.add_argument("--schema", default="semel", help="the schema of the tables (default semel)")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    return {"init": _init, "run": _run, "status": _status}[args.action](args)


def _outbox(args: argparse.Namespace, **options: Any) -> Outbox:
    from semel.patterns.outbox import Outbox

    if not args.dsn:
        raise UsageError(f"there is no database: give --dsn, or set {DSN_VARIABLE}")
    return Outbox(args.dsn, schema=args.schema, **options)


def _init(args: argparse.Namespace) -> int:
    outbox = _outbox(args)
    outbox.init()
    outbox.close()
    report(args, {"schema": args.schema}, f"the outbox is {args.schema}.outbox")
    return 0


def _run(args: argparse.Namespace) -> int:
    options = client_options(args)
    brokers = options.pop("bootstrap_servers")
    with ProgressBar("relaying", None, "rows") as bar:
        outbox = _outbox(
            args,
            application_id=args.application_id,
            bootstrap_servers=brokers,
            max_rows=args.max_rows,
            accept_database=args.accept_database,
            client=options,
            on_chunk=lambda stats: bar.show(stats.rows, f"{stats.set_aside} set aside" if stats.set_aside else ""),
        )
        stats = outbox.run(until_empty=args.until_empty)
    report(args, stats, f"sent {stats.rows} rows in {stats.chunks} chunks, set aside {stats.set_aside}")
    return 0


def _status(args: argparse.Namespace) -> int:
    outbox = _outbox(args)
    status = outbox.status()
    outbox.close()
    if args.json:
        print_json(status._asdict())
        return 0
    print(f"relayed as     {status.application_id or '-'}")
    print(f"sent           {status.sent_rows} rows")
    print(f"waiting        {status.waiting_rows} rows, the oldest for {status.oldest_ms} ms")
    print(f"oldest writer  {status.held_by or '-'}")
    print(f"set aside      {status.set_aside_rows} rows (see {args.schema}.outbox_set_aside)")
    return 0
