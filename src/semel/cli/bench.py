"""`semel bench`: measures semel side by side with its peers."""

from __future__ import annotations

import argparse

HELP = (
    "Runs a benchmark, semel and its peers in turns, and prints medians. A ratio above 1 means that semel is better.\n"
    "With --json one object per comparison and line, with the keys bench, case, unit, semel, peer, peer_value, ratio,\n"
    "runs (of each contestant) and spread ((max - min) / median; the larger of the two)."
)
EXAMPLE = """
semel bench codec
semel bench all --quick --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    from semel.bench.harness import available

    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(available())}, or all")
    parser.add_argument("--json", action="store_true", help="one JSON object per comparison and line")
    parser.add_argument("--quick", action="store_true", help="smaller and fewer runs: a look, not a measurement")


def run(args: argparse.Namespace) -> int:
    from semel.bench.harness import available, run_benchmarks
    from semel.cli.errors import UsageError

    names = available()
    if args.name != "all" and args.name not in names:
        raise UsageError(f"there is no benchmark {args.name!r}; there are: {', '.join(names)}, all")
    return run_benchmarks(names if args.name == "all" else [args.name], as_json=args.json, quick=args.quick)
