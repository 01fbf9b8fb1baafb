"""`semel audit`: what an application has done, by its ledger and its topics."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from semel.cli.client_options import add_connection_options, add_json_option, pairs, print_json, print_table
from semel.progress import ProgressBar

if TYPE_CHECKING:
    from semel.audit import Audit, AuditEntry

HELP = """Says for an application on Spark which input each committed batch covered and what it wrote where, looks for
gaps and overlaps, and counts the records that are really there. Reads the ledger and the topics, nothing else, through
a client that is not semel's; changes nothing. The application may run meanwhile. Applications of semel.process keep no
ledger and cannot be audited: `semel group describe` shows what they have read.

Exit code: 0 all is well; 1 a gap, an overlap or a count that is wrong; 2 it could not look."""
EXAMPLE = """
semel audit --app payments
semel audit --app payments --brokers kafka-1:9092 --last 50 --json
"""
SHOWN = 20
COULD_NOT_LOOK = 2


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--app", required=True, metavar="ID", help="the application id of the sink")
    parser.add_argument(
        "--last", type=int, default=0, metavar="N", help="only the last N batches (default: all in the ledger)"
    )
    parser.add_argument("--no-count", action="store_true", help="do not read the output, only the ledger")
    add_json_option(parser)
    add_connection_options(parser)


def run(args: argparse.Namespace) -> int:
    from semel.cli.errors import UsageError

    if args.last < 0:
        raise UsageError(f"--last must not be negative, got {args.last}")
    try:
        from semel.audit import CannotLookError, audit
    except ModuleNotFoundError as missing:
        return _refuse(f"it reads through {missing.name}, which is not installed: pip install 'semel[prove]'")
    try:
        with ProgressBar(f"auditing {args.app}") as bar:
            result = audit(
                args.brokers,
                args.app,
                last=args.last,
                counting=not args.no_count,
                options=pairs(args.options, "-X"),
                timeout_s=args.timeout,
                progress=bar,
            )
    except CannotLookError as error:
        return _refuse(str(error))
    _print_json(result) if args.json else _print(result, args)
    return 0 if result.clean else 1


def _refuse(message: str) -> int:
    print(f"semel: {message}", file=sys.stderr)
    return COULD_NOT_LOOK


def _print_json(result: Audit) -> None:
    for entry in result.entries:
        print_json({"batch": entry})
    for finding in result.findings:
        print_json({"finding": finding})
    summary = {
        "application_id": result.application_id,
        "clean": result.clean,
        "batches": len(result.entries),
        "rows": sum(entry.rows for entry in result.entries),  # dead letters among them
        "dead_letters": sum(entry.dead_letters for entry in result.entries),
        "counted": result.counted,
        "findings": len(result.findings),
        "lag": result.lag,
        "notes": result.notes,
    }
    print_json({"summary": summary})


def _print(result: Audit, args: argparse.Namespace) -> None:
    entries = result.entries
    ago_s = max(0.0, time.time() - entries[-1].committed_at_ms / 1000)
    print(f"{result.application_id}: {len(entries)} committed batches, the last one {_ago(ago_s)} ago")
    if len(entries) > SHOWN:
        print(f"the last {SHOWN} of them (--json has all):")
    print()
    head = ("entry", "batch", "committed (UTC)", "input", "output", "rows", "of them dead")
    print_table(head, map(_row, entries[-SHOWN:]))
    rows, dead = (sum(getattr(entry, name) for entry in entries) for name in ("rows", "dead_letters"))
    print(f"\n{rows:,} rows written, {dead:,} of them dead letters")
    for note in result.notes:
        print(f"note: {note}")
    for finding in result.findings:
        print(finding)
    if result.lag:
        print(f"not read yet: {sum(result.lag.values()):,} offsets in {len(result.lag)} source partitions")
    print(_verdict(result, counting=not args.no_count))


def _verdict(result: Audit, counting: bool) -> str:
    if not result.clean:
        return f"NOT CLEAN: {len(result.findings)} findings"
    counted = f", {result.counted:,} records counted, as many as the ledger says" if counting else ""
    return f"clean: every batch starts where the one before ended{counted}"


def _ago(duration_s: float) -> str:
    for unit_s, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if duration_s >= 2 * unit_s:
            return f"{duration_s / unit_s:.0f} {unit}"
    return f"{duration_s:.0f} s"


def _row(entry: AuditEntry) -> tuple[object, ...]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(entry.committed_at_ms / 1000))
    output = " ".join(f"{w.topic}-{w.partition}[{w.first_offset}..{w.last_offset}]" for w in entry.written if w.count)
    return entry.sequence, entry.batch_id, when, _input(entry), output or "nothing", entry.rows, entry.dead_letters


def _input(entry: AuditEntry) -> str:
    """Ranges of offsets, end not included; the text itself for a source that is not Kafka."""
    from semel.audit import offsets_in

    words = []
    for start, end in zip(entry.starts, entry.ends, strict=False):
        old, new = offsets_in(start) or {}, offsets_in(end)
        if new is None:
            words.append(f"{start or '(start)'} to {end}")
            continue
        words += [
            f"{topic}-{partition}[{old.get((topic, partition), '?')}..{offset})"
            for (topic, partition), offset in sorted(new.items())
        ]
    return " ".join(words) or "a batch job"
