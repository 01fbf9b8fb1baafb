"""`semel topic`: create, list, describe, alter and delete topics."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from semel.cli.client_options import add_common_options, pairs, print_json, print_table, report, run_action
from semel.cli.errors import UsageError

if TYPE_CHECKING:
    from semel.client.admin import Admin

HELP = "Creates, lists, describes, alters and deletes topics."
EXAMPLE = """
semel topic create orders --partitions 6 --config retention.ms=86400000
semel topic list
semel topic describe orders
semel topic alter orders --partitions 12 --config cleanup.policy=compact
semel topic delete orders
"""


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    one = actions.add_parser("list", help="the names of all topics")
    one.add_argument("--internal", action="store_true", help="internal topics, too")
    add_common_options(one)

    one = actions.add_parser("describe", help="partitions, leaders, offsets and changed settings")
    one.add_argument("names", metavar="TOPIC", nargs="+")
    add_common_options(one)

    one = actions.add_parser("create", help="make topics")
    one.add_argument("names", metavar="TOPIC", nargs="+")
    one.add_argument("-p", "--partitions", type=int, default=-1, metavar="N", help="default: the broker's")
    one.add_argument("-r", "--replication-factor", type=int, default=-1, metavar="N", help="default: the broker's")
    one.add_argument("--config", metavar="NAME=VALUE", action="append", default=[], help="may be repeated")
    one.add_argument("--if-not-exists", action="store_true", help="no error if it is there already")
    add_common_options(one)

    one = actions.add_parser("alter", help="add partitions, change settings")
    one.add_argument("names", metavar="TOPIC", nargs="+")
    one.add_argument("-p", "--partitions", type=int, metavar="N", help="raise the number of partitions to N")
    one.add_argument("--config", metavar="NAME=VALUE", action="append", default=[], help="set; may be repeated")
    one.add_argument("--unset", metavar="NAME", action="append", default=[], help="back to the default")
    add_common_options(one)

    one = actions.add_parser("delete", help="delete topics with all their records")
    one.add_argument("names", metavar="TOPIC", nargs="+")
    one.add_argument("--if-exists", action="store_true", help="no error if it is not there")
    add_common_options(one)


def run(args: argparse.Namespace) -> int:
    return run_action(
        args, {"list": _list, "describe": _describe, "create": _create, "alter": _alter, "delete": _delete}
    )


def _list(admin: Admin, args: argparse.Namespace) -> None:
    for name in admin.list_topics(include_internal=args.internal):
        report(args, {"topic": name}, name)


def _describe(admin: Admin, args: argparse.Namespace) -> None:
    for topic in admin.describe_topics(args.names, offsets=True):
        configs = {
            entry.name: entry.value
            for entry in admin.describe_configs(topic=topic.name).values()
            if not entry.is_default
        }
        if args.json:
            import msgspec

            print_json({**msgspec.to_builtins(topic), "configs": configs})
            continue
        changed = ", ".join(f"{name}={value}" for name, value in sorted(configs.items())) or "all by default"
        print(f"{topic.name}: {len(topic.partitions)} partitions, settings: {changed}")
        print_table(
            ("partition", "leader", "replicas", "in sync", "first", "end"),
            (
                (
                    part.partition,
                    _known(part.leader),
                    ",".join(map(str, part.replicas)),
                    ",".join(map(str, part.in_sync)),
                    _known(part.earliest_offset),
                    _known(part.latest_offset),
                )
                for part in topic.partitions
            ),
        )


def _known(number: int) -> int | None:
    """-1 stands for no leader, and for the offsets that only a leader knows."""
    return None if number < 0 else number


def _create(admin: Admin, args: argparse.Namespace) -> None:
    configs = pairs(args.config, "--config")
    for name in args.names:
        created = admin.create_topic(
            name, args.partitions, args.replication_factor, configs, if_not_exists=args.if_not_exists
        )
        report(args, {"topic": name, "created": created}, f"{name}: {'created' if created else 'was there already'}")


def _alter(admin: Admin, args: argparse.Namespace) -> None:
    changes: dict[str, str | None] = {**pairs(args.config, "--config"), **dict.fromkeys(args.unset)}
    if args.partitions is None and not changes:
        raise UsageError("nothing to change: give --partitions, --config or --unset")
    admin.describe_topics(args.names)  # one that is not there is named before another is changed
    for name in args.names:
        if changes:
            admin.alter_configs(changes, topic=name)
        if args.partitions is not None:
            admin.create_partitions(name, args.partitions)
        report(args, {"topic": name, "altered": True}, f"{name}: altered")


def _delete(admin: Admin, args: argparse.Namespace) -> None:
    if not args.if_exists:
        admin.describe_topics(args.names)  # one that is not there is named before another is deleted
    there = set(admin.list_topics(include_internal=True))
    for name in args.names:
        gone = args.if_exists and name not in there
        if not gone:
            admin.delete_topics([name])
        report(args, {"topic": name, "deleted": not gone}, f"{name}: {'was not there' if gone else 'deleted'}")
