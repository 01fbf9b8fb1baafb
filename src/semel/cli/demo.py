"""`semel demo`: a pipeline under kill -9, once for each guarantee."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semel.demo.program import DemoFault

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

    parser.add_argument(
        "--faults",
        metavar="NAMES",
        default="",
        help="only some: half-way (driver, in the middle of a commit), broker, committed (driver, after it)",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also an SVG image of the result")


def run(args: argparse.Namespace) -> int:
    from semel.demo.run import DemoOptions
    from semel.demo.run import run as run_demo

    report = args.report or Path.cwd() / f"semel-demo-{args.workload}.html"
    for flag, path in (("--report", report), ("--picture", args.picture)):
        _check_place(flag, path)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill ends as Ctrl-C does
    return run_demo(
        DemoOptions(
            args.workload,
            args.engine,
            args.seed,
            report=report,
            picture=args.picture,
            as_json=args.json,
            keep=args.keep,
            faults=_faults(args.faults),
        )
    )


def _faults(names: str) -> tuple[DemoFault, ...]:
    from semel.cli.errors import UsageError
    from semel.demo.program import FAULTS

    known = {fault.name: fault for fault in FAULTS}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise UsageError(f"--faults: there is no {unknown[0]!r}; there are {', '.join(known)}")
    return tuple(known[name] for name in wanted or known)


def _check_place(flag: str, path: Path | None) -> None:
    """Before the work, not after it."""
    from semel.cli.errors import UsageError

    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"{flag} {path}: no file can be written there; its folder must exist")
