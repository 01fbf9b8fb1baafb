"""`semel demo`: a pipeline under kill -9, once for each guarantee."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = """Runs a pipeline on this machine three times side by side, at most once, at least once and exactly once, and
kills it (kill -9) while it commits: the Spark driver twice, the broker once. An independent client counts what came
out. Ends with a table and a page with plots. Takes one to two minutes; without Java it runs without Spark."""
EXAMPLE = """
semel demo
semel demo ads --seed 7 --report /tmp/ads.html
semel demo --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "workload",
        nargs="?",
        choices=("bank", "ads"),
        default="bank",
        help="bank: deposits and transfers become statements (default); ads: views become counts per second",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="another one gives other records (default: 1)")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="where the page goes (default: ./semel-demo-NAME.html)"
    )
    parser.add_argument("-J", "--json", action="store_true", help="the result as one JSON object, nothing else")
    parser.add_argument("--keep", action="store_true", help="keep the broker's data and the checkpoints, and say where")
    parser.add_argument(
        "--engine",
        choices=("auto", "spark", "process"),
        default="auto",
        help="spark; process: semel.process, no Java needed; auto (default): spark where it can run",
    )


def run(args: argparse.Namespace) -> int:
    from semel.demo.run import Options
    from semel.demo.run import run as run_demo

    return run_demo(
        Options(args.workload, args.engine, args.seed, report=args.report, as_json=args.json, keep=args.keep)
    )
