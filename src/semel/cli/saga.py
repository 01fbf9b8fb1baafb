"""`semel saga`: sagas that are under way, and those whose compensation is stuck."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from semel.cli.client_options import add_common_options, client_options, print_json, print_table

if TYPE_CHECKING:
    from semel.patterns.saga_states import SagaState

HELP = """Lists the sagas of a kind by their log (the topic NAME.log): which step each is at, since when, and why it is
there. A saga is stuck if a compensation has failed as often as its step may be retried, or gets no reply."""
EXAMPLE = """
semel saga list transfer
semel saga list transfer --stuck
semel saga list transfer --all --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    one = actions.add_parser("list", help="sagas that have not ended, oldest first")
    one.add_argument("name", metavar="NAME", help="the kind of saga")
    which = one.add_mutually_exclusive_group()
    which.add_argument("--stuck", action="store_true", help="only those that are stuck; exit code 1 if there are any")
    which.add_argument("--all", action="store_true", help="those that have ended as well")
    add_common_options(one)


def run(args: argparse.Namespace) -> int:
    from semel.patterns.saga_states import ENDED
    from semel.patterns.sagas import read_sagas

    found = read_sagas(args.name, client_options(args))
    if args.stuck:
        found = [saga for saga in found if saga.stuck]
    elif not args.all:
        found = [saga for saga in found if saga.status not in ENDED]
    _print(found, args.json)
    return 1 if args.stuck and found else 0


def _print(sagas: list[SagaState], as_json: bool) -> None:
    if as_json:
        for saga in sagas:
            print_json(saga)
        return
    now_ms = time.time() * 1000
    head = ("saga", "status", "step", "waits for", "tries", "for", "error")
    rows = [
        (
            saga.saga,
            f"{saga.status}, stuck" if saga.stuck else saga.status,
            saga.step,
            saga.waits_for,
            saga.tries,
            f"{max(0, now_ms - saga.since_ms) / 1000:.0f} s",
            saga.error or None,
        )
        for saga in sagas
    ]
    print_table(head, rows)
