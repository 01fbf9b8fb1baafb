"""`semel doctor`: what is wrong with the transactions of a cluster, and the command that cures it."""

from __future__ import annotations

import argparse
import re
import shlex
import textwrap
from typing import TYPE_CHECKING

from semel.cli.client_options import (
    DEFAULT_BROKERS,
    add_common_options,
    client_options,
    print_json,
    printable,
    seconds,
)
from semel.progress import ProgressBar

if TYPE_CHECKING:
    from semel.doctor.findings import Diagnosis

HELP = """Examines a cluster, semel's or any Kafka, and changes nothing: hanging and long transactions and what they
hold back, groups that stand still, transactional ids that leak, ledgers that do not fit their topics, and more. Each
finding comes with what it means, how sure it is, and the command that cures it.
With --environment it looks at this machine instead: Python, Java, Spark, packages, disk, the port of the broker.
Exit codes: 0 nothing was found, 3 something was found, 1 the cluster could not be examined."""
EXAMPLE = """semel doctor
semel doctor --brokers localhost:9092 --json
semel doctor --long-transaction 30
semel doctor --environment"""
FOUND = 3
WIDTH = 100


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--environment", action="store_true", help="examine this machine, not a cluster")
    parser.add_argument(
        "--long-transaction",
        type=seconds,
        metavar="SECONDS",
        help="how long a transaction may be open (default: 80 %% of its timeout, at most 15 minutes)",
    )
    parser.add_argument("--list", action="store_true", help="print the names of everything that can be found, and stop")
    add_common_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.list:
        return _list(args)
    if args.environment:
        from semel.doctor.environment import look_around

        return _show_environment(args, look_around(args.brokers))
    return _examine(args)


def _examine(args: argparse.Namespace) -> int:
    from semel.client.admin import Admin
    from semel.client.immediate import run as complete
    from semel.doctor.checks import Limits, as_json, examine
    from semel.doctor.snapshot import STEPS

    limits = Limits(long_transaction_s=args.long_transaction)
    with Admin(client_options(args)) as admin, ProgressBar("examining", len(STEPS), "steps") as bar:
        found = complete(examine(admin.calls, limits, args.timeout * 1000, bar.show))
    for finding in found.findings:
        if args.json:
            print_json({**as_json(finding), "cure": _complete(finding, args)})
        else:
            _print(finding, _complete(finding, args))
    if not args.json:
        count = len(found.findings)
        words = "nothing was found" if not count else f"{count} finding{'s' if count > 1 else ''}"
        print(f"{words} ({found.took_ms / 1000:.1f} s)")
        for missing in found.not_looked_at:
            print(f"not looked at: {missing}")
    return FOUND if found.findings else 0


def _complete(finding: Diagnosis, args: argparse.Namespace) -> str:
    """The command, with how to reach the cluster."""
    if not finding.is_command:
        return finding.cure
    from semel.doctor.findings import with_options

    words = [] if args.brokers == DEFAULT_BROKERS else [f" -b {shlex.quote(args.brokers)}"]
    words += [f" -X {_without_secret(option)}" for option in args.options]
    return with_options(finding.cure, "".join(words))


def _without_secret(option: str) -> str:
    """What is printed ends up in logs and alerts; the shell asks for what is left out."""
    name = option.partition("=")[0]
    is_secret = re.search(r"password|jaas|secret|token", name, re.IGNORECASE)
    return f"{shlex.quote(name)}=..." if is_secret else shlex.quote(option)


def _print(finding: Diagnosis, cure: str) -> None:
    print(f"{finding.name}: {printable(finding.where)} ({finding.certainty.value})")
    for text in (printable(f"{finding.title}: {finding.seen}."), finding.meaning):
        print(textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False))
    print(f"  cure: {printable(cure)}\n")


def _list(args: argparse.Namespace) -> int:
    from semel.doctor.findings import AILMENTS

    for name, ailment in AILMENTS.items():
        if args.json:
            print_json({"name": name, "title": ailment.title, "meaning": ailment.meaning})
        else:
            print(f"{name}: {ailment.title}")
    return 0


def _show_environment(args: argparse.Namespace, facts: list) -> int:  # type: ignore[type-arg]
    for fact in facts:
        if args.json:
            print_json(fact)
        else:
            print(f"{'ok ' if fact.is_well else '!! '} {fact.name}: {fact.seen}{f'. {fact.cure}' if fact.cure else ''}")
    return 0 if all(fact.is_well for fact in facts) else FOUND
