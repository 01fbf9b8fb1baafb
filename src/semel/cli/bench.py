"""`semel bench`: measures semel side by side with its peers.

The benchmarks are not installed with semel: they are the folder `benchmarks` of a checkout.
"""

from __future__ import annotations

import argparse

from semel.local import checkout

HELP = (
    "Runs a benchmark, semel and its peers in turns, and prints medians. A ratio above 1 means that semel is better.\n"
    "With --json one object per comparison and line, with the keys bench, case, unit, semel, peer, peer_value, ratio,\n"
    "runs (of each contestant) and spread ((max - min) / median; the larger of the two).\n"
    "Works in a checkout only: benchmarks are not installed with semel."
)
EXAMPLE = """
semel bench codec
semel bench all --quick --json
"""
HARNESS = "benchmarks.harness"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help=f"a benchmark: {', '.join([*_names(), 'all'])}")
    parser.add_argument("--json", action="store_true", help="one JSON object per comparison and line")
    parser.add_argument("--quick", action="store_true", help="smaller and fewer runs: a look, not a measurement")


def run(args: argparse.Namespace) -> int:
    from semel.cli.errors import UsageError

    harness = checkout.module(HARNESS)
    if harness is None:
        raise UsageError("benchmarks are not installed with semel: `make bench` runs them in a checkout (benchmarks/)")
    names = harness.available()
    if args.name != "all" and args.name not in names:
        raise UsageError(f"there is no benchmark {args.name!r}; there are: {', '.join(names)}, all")
    chosen = names if args.name == "all" else [args.name]
    code: int = harness.run_benchmarks(chosen, as_json=args.json, quick=args.quick)
    return code


def _names() -> list[str]:
    harness = checkout.module(HARNESS)
    return [] if harness is None else list(harness.available())
