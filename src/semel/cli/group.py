"""`semel group`: list and describe consumer groups, reset their offsets, delete them."""

from __future__ import annotations

import argparse
import datetime
from typing import TYPE_CHECKING

from semel.cli.client_options import add_common_options, print_json, print_table, report, run_action
from semel.cli.errors import CommandError, UsageError

if TYPE_CHECKING:
    from semel.client.admin import Admin
    from semel.client.types import TopicPartition

HELP = "Lists and describes consumer groups with their lag, moves their offsets, deletes them."
EXAMPLE = """
semel group list
semel group describe billing
semel group reset billing --topic orders --to-earliest --dry-run
semel group reset billing --topic orders:0,1 --to-offset 1000
semel group reset billing --to-time 2026-01-31T12:00:00
semel group delete billing
"""


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add_common_options(actions.add_parser("list", help="all groups with their states"))

    one = actions.add_parser("describe", help="members, offsets and lag")
    one.add_argument("groups", metavar="GROUP", nargs="+")
    add_common_options(one)

    one = actions.add_parser("reset", help="move the offsets of a group that has no members now")
    one.add_argument("group", metavar="GROUP")
    one.add_argument(
        "--topic",
        metavar="TOPIC[:PARTITION,...]",
        action="append",
        default=[],
        help="which ones (default: all that the group has offsets for); may be repeated",
    )
    to = one.add_mutually_exclusive_group(required=True)
    to.add_argument("--to-earliest", action="store_true", help="to the first record")
    to.add_argument("--to-latest", action="store_true", help="past the last record")
    to.add_argument("--to-offset", type=int, metavar="N", help="to an offset, within the log")
    to.add_argument("--to-time", metavar="TIME", help="to the first record at or after an ISO time or milliseconds")
    to.add_argument("--shift-by", type=int, metavar="N", help="forward, or back if negative")
    one.add_argument("--dry-run", action="store_true", help="only show what would be done")
    add_common_options(one)

    one = actions.add_parser("delete", help="delete groups that have no members now")
    one.add_argument("groups", metavar="GROUP", nargs="+")
    add_common_options(one)


def run(args: argparse.Namespace) -> int:
    return run_action(args, {"list": _list, "describe": _describe, "reset": _reset, "delete": _delete})


def _list(admin: Admin, args: argparse.Namespace) -> None:
    groups = admin.list_groups()
    if args.json:
        for group in groups:
            print_json(group)
    else:
        print_table(("group", "state", "protocol"), ((g.group_id, g.state, g.protocol_type or None) for g in groups))


def _describe(admin: Admin, args: argparse.Namespace) -> None:
    for group_id in args.groups:
        group, offsets = admin.describe_group(group_id), admin.group_lag(group_id)
        if group.state == "Dead" and not offsets:
            raise CommandError(f"there is no group {group_id!r}; `semel group list` shows what there is")
        if args.json:
            import msgspec

            print_json({**msgspec.to_builtins(group), "offsets": offsets})
            continue
        total = sum(each.lag or 0 for each in offsets)
        print(f"{group_id}: {group.state}, {len(group.members)} members, assignor {group.assignor or '-'}, lag {total}")
        print_table(
            ("topic", "partition", "committed", "end", "lag", "client", "host", "member"),
            ((p.topic, p.partition, p.committed, p.end, p.lag, p.client_id, p.host, p.member_id) for p in offsets),
        )


def _delete(admin: Admin, args: argparse.Namespace) -> None:
    for group_id in args.groups:
        admin.delete_groups([group_id])
        report(args, {"group": group_id, "deleted": True}, f"{group_id}: deleted")


def _reset(admin: Admin, args: argparse.Namespace) -> None:
    before = {partition: at.offset for partition, at in admin.group_offsets(args.group).items()}
    partitions = _chosen(admin, args, before)
    after = _targets(admin, args, partitions, before)
    if not args.dry_run:
        admin.alter_group_offsets(args.group, after)
    if args.json:
        for (topic, partition), offset in after.items():
            old = before.get((topic, partition))  # type: ignore[call-overload]
            print_json({"topic": topic, "partition": partition, "before": old, "after": offset})
        return
    print_table(
        ("topic", "partition", "before", "after"),
        ((part.topic, part.partition, before.get(part), offset) for part, offset in after.items()),
    )
    if args.dry_run:
        print("nothing was changed (--dry-run)")


def _chosen(admin: Admin, args: argparse.Namespace, before: dict[TopicPartition, int]) -> list[TopicPartition]:
    from semel.client.types import TopicPartition

    if not args.topic:
        if not before:
            raise CommandError(f"group {args.group!r} has no committed offsets; name topics with --topic")
        return sorted(before)
    chosen = []
    for given in args.topic:
        name, _, numbers = given.partition(":")
        there = [part.partition for part in admin.describe_topics([name])[0].partitions]
        try:
            wanted = [int(number) for number in numbers.split(",")] if numbers else there
        except ValueError:
            raise UsageError(f"--topic wants TOPIC or TOPIC:PARTITION,..., got {given!r}") from None
        missing = set(wanted) - set(there)
        if missing:
            raise CommandError(f"{name!r} has no partition {min(missing)}; it has 0 to {max(there)}")
        chosen += [TopicPartition(name, number) for number in wanted]
    return sorted(set(chosen))


def _targets(
    admin: Admin, args: argparse.Namespace, partitions: list[TopicPartition], before: dict[TopicPartition, int]
) -> dict[TopicPartition, int]:
    from semel.client.group.offset_requests import EARLIEST, LATEST

    first = {part: at.offset for part, at in admin.list_offsets(dict.fromkeys(partitions, EARLIEST)).items()}
    end = {part: at.offset for part, at in admin.list_offsets(dict.fromkeys(partitions, LATEST)).items()}
    if args.to_earliest:
        return first
    if args.to_latest:
        return end
    if args.to_time is not None:
        at_ms = milliseconds(args.to_time)
        found = {part: at.offset for part, at in admin.list_offsets(dict.fromkeys(partitions, at_ms)).items()}
        return {part: offset if offset >= 0 else end[part] for part, offset in found.items()}
    wanted = (
        dict.fromkeys(partitions, args.to_offset)
        if args.to_offset is not None
        else {part: before.get(part, first[part]) + args.shift_by for part in partitions}
    )
    return {part: min(max(offset, first[part]), end[part]) for part, offset in wanted.items()}


def milliseconds(text: str) -> int:
    """An ISO time (local unless it says otherwise) or milliseconds since 1970."""
    if text.isdecimal() and len(text) < 19:  # fits into 64 bits
        return int(text)
    try:
        at_ms = int(datetime.datetime.fromisoformat(text).timestamp() * 1000)
    except (ValueError, OverflowError):
        at_ms = -1
    if at_ms < 0:
        raise UsageError(
            f"invalid time {text!r}: expected one after 1970 as 2026-01-31T12:00:00, with +01:00 or the like if need "
            "be, or milliseconds"
        )
    return at_ms
