"""`semel trace`: one transaction step by step."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from semel.cli.client_options import add_common_options, client_options, print_json, printable
from semel.cli.errors import UsageError

if TYPE_CHECKING:
    from semel.doctor.timeline import Timeline, TimelineStep

HELP = """Shows the last transaction of a transactional id step by step, with the numbers of the figure in KIP-98:
1 find the coordinator, 2 get a producer id, 3 begin, 4.1 to 4.4 add partitions, records and offsets, 5.1 to 5.3 end,
markers, complete. Semel's broker keeps the last steps of the ids that were used last; of other brokers it shows what
the coordinator's log, DescribeTransactions and the markers in the partitions tell."""
EXAMPLE = """semel trace --transactional-id payments
semel trace --transactional-id payments --all --json"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--transactional-id", metavar="ID", required=True)
    parser.add_argument("--all", action="store_true", help="every step that is known, not only the last transaction")
    add_common_options(parser)


def run(args: argparse.Namespace) -> int:
    from semel.client.admin import Admin
    from semel.client.immediate import run as complete
    from semel.doctor.timeline import timeline

    if not args.transactional_id:
        raise UsageError("--transactional-id is empty")
    with Admin(client_options(args)) as admin:
        found = complete(timeline(admin.calls, args.transactional_id, args.timeout * 1000))
    steps = found.steps if args.all else found.steps[found.last :]
    if args.json:
        for step in steps:
            print_json(step)
    else:
        _print(found, steps)
    return 0


def _print(found: Timeline, steps: list[TimelineStep]) -> None:
    from semel.doctor.timeline import clock

    now = found.now
    print(f"{found.transactional_id}: {now.state}, producer {now.producer_id}, epoch {now.epoch}")
    if not found.has_events:
        print("events of the broker: not available (it is not semel's); from the coordinator's log and the partitions:")
    width = max((len(step.what) for step in steps), default=0)
    for step in steps:
        words = [step.text, f"refused: {step.error}" if step.error else "", f"({step.client})" if step.client else ""]
        line = f"  {step.step:<5}{clock(step.time_ms):<14}{step.what:<{width}}  {' '.join(filter(None, words))}"
        print(printable(line.rstrip()))
    if not steps:
        print("  no transaction is known")
