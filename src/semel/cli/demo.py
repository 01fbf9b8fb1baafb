"""`semel demo`: shows semel at work."""

from __future__ import annotations

import argparse

HELP = "Shows semel at work, in a few seconds, on this machine alone."
EXAMPLE = "semel demo"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--records", type=int, default=300_000, metavar="N", help="how many records (default: 300000)")


def run(args: argparse.Namespace) -> int:
    from semel.cli.errors import UsageError
    from semel.demo import run as run_demo

    if args.records < 1:
        raise UsageError(f"--records must be at least 1, got {args.records}")
    return run_demo(args.records)
