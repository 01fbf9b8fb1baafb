"""`semel files`: what a folder of `semel.Files` holds, and the compaction of its small files."""

from __future__ import annotations

import argparse

from semel.cli.client_options import add_json_option, at_least_one, print_json, report

HELP = """Looks after folders that `semel.process` writes with a semel.Files sink. Only what a manifest names is
committed; `list` prints it, for programs that read the files themselves."""
EXAMPLE = """
semel files status /data/orders
semel files list /data/orders
semel files compact /data/orders --target-mb 256
"""
MB = 1024 * 1024


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, summary in (
        ("status", "application, offsets, owners, and how many files and rows"),
        ("list", "the paths of all committed files, in their order"),
        ("compact", "join small files, remove leftovers, shorten the log; the loop may run meanwhile"),
    ):
        one = actions.add_parser(name, help=summary)
        one.add_argument("folder", metavar="FOLDER")
        add_json_option(one)
        if name == "list":
            one.add_argument("--dead-letters", action="store_true", help="the files with the records that were refused")
        if name == "compact":
            one.add_argument(
                "--target-mb", type=at_least_one, default=128, metavar="N", help="size of files (default 128)"
            )


def run(args: argparse.Namespace) -> int:
    return {"status": _status, "list": _list, "compact": _compact}[args.action](args)


def _status(args: argparse.Namespace) -> int:
    from semel.sinks.files.manifests import COMPACTION, DATA
    from semel.sinks.files.reading import folder_state

    state = folder_state(args.folder)
    data = [entry for entry in state.files.values() if entry.kind == DATA]
    partitions = [
        {
            "topic": place.topic,
            "partition": place.partition,
            "next_offset": state.offsets[place].next_offset if place in state.offsets else None,
            "holder": claim.holder,
            "generation": claim.generation,
        }
        for place, claim in sorted(state.claims.items())
        if place != COMPACTION
    ]
    found = {
        "application_id": state.application_id,
        "format": state.file_format,
        "manifest": state.number,
        "files": len(data),
        "rows": sum(entry.rows for entry in data),
        "bytes": sum(entry.bytes for entry in data),
        "dead_letters": sum(entry.rows for entry in state.files.values() if entry.kind != DATA),
        "partitions": partitions,
    }
    if args.json:
        print_json(found)
        return 0
    print(f"application    {state.application_id}, {state.file_format}, manifest {state.number}")
    print(f"committed      {found['files']} files, {found['rows']} rows, {found['bytes']} bytes")
    print(f"dead letters   {found['dead_letters']}")
    for each in partitions:
        at = "-" if each["next_offset"] is None else each["next_offset"]
        print(f"{each['topic']}-{each['partition']}  offset {at}, written by {each['holder']}")
    return 0


def _list(args: argparse.Namespace) -> int:
    from semel.sinks.files.reading import committed_files

    paths = committed_files(args.folder, dead_letters=args.dead_letters)
    if args.json:
        print_json(paths)
    elif paths:
        print("\n".join(paths))
    return 0


def _compact(args: argparse.Namespace) -> int:
    from semel.sinks.files.reading import compact

    done = compact(args.folder, target_bytes=args.target_mb * MB)
    report(args, done._asdict(), f"{done.files_before} files became {done.files_after}, swept {done.swept} leftovers")
    return 0
