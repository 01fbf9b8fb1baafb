"""`semel prove`: tries to break the guarantee."""

from __future__ import annotations

import argparse

from semel.cli.client_options import seconds

HELP = """Tries to break the guarantee: runs a pipeline, kills and freezes its processes, cuts and delays its network,
and has an independent client count what came out. The faults come from a seed; the schedule is saved and can be
replayed.

exit codes: 0 nothing was violated and faults fired; 1 something was violated; 2 wrong usage; 3 no fault fired, so
nothing is shown; 4 it could not run; 130 Ctrl-C"""

EXAMPLE = """semel prove
semel prove --workload loop --rounds 20 --seed 7
semel prove --workload spark --brokers localhost:9092
semel prove --workload loop --nodes 3
semel prove --app mypipeline:run --expected mypipeline:expected
semel prove --replay semel-prove-7.json"""


def configure(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is run")
    what.add_argument(
        "--workload", action="append", metavar="NAME", help="a workload, or `all`; may be repeated (default: loop)"
    )
    what.add_argument("--app", metavar="MODULE:FUNCTION", help="your own pipeline, from topic to topic (docs/prove.md)")
    what.add_argument(
        "--expected",
        metavar="MODULE:FUNCTION",
        help="says what it must write for an input (default: `expected` beside it)",
    )
    what.add_argument(
        "--guarantee",
        default="exactly_once",
        choices=("exactly_once", "at_least_once", "at_most_once"),
        help="the promise",
    )
    what.add_argument("--brokers", metavar="HOST:PORT", help="an existing cluster (default: a broker of its own)")
    what.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help="a cluster of N nodes of Apache Kafka, whose leaders and coordinators move (needs `make kafka` and Java)",
    )
    what.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        dest="settings",
        help="a setting of its own broker, such as transaction.version=1; may be repeated",
    )
    what.add_argument("--prefix", metavar="NAME", help="its topics, groups and ids begin so (default: one of its own)")
    what.add_argument(
        "--mutant", metavar="NAME", help="switch a deliberate bug on (in a checkout); the campaign must find it"
    )
    how = parser.add_argument_group("which faults")
    how.add_argument(
        "--seed", type=int, metavar="N", help="the same seed gives the same faults (default: a random one)"
    )
    how.add_argument("--rounds", type=int, default=12, metavar="N", help="of each workload (default: 12)")
    how.add_argument("--faults-per-round", type=int, metavar="N", help="(default: the workload's own)")
    how.add_argument(
        "--stuck-after",
        type=seconds,
        metavar="S",
        help="a pipeline may take so long to catch up after the faults of a round",
    )
    how.add_argument("--replay", metavar="FILE", help="run a saved schedule again")
    out = parser.add_argument_group("output")
    out.add_argument("--save", metavar="FILE", help="where the schedule goes (default: semel-prove-SEED.json)")
    out.add_argument("--json", action="store_true", help="the result as JSON on stdout; live lines go to stderr")
    out.add_argument("--list", action="store_true", help="print workloads and mutants, and end")
    end = parser.add_mutually_exclusive_group()
    end.add_argument("--delete-topics", action="store_true", help="delete its topics at the end without asking")
    end.add_argument("--keep-topics", action="store_true", help="keep its topics without asking")


def run(args: argparse.Namespace) -> int:
    from semel.cli.errors import UsageError

    try:
        import confluent_kafka  # noqa: F401 (the checker's client)
    except ImportError:
        raise UsageError("the checker reads through confluent-kafka: pip install 'semel[prove]'") from None
    from semel.prove.command import CampaignOptionError, CampaignOptions, main

    options = CampaignOptions(
        workloads=tuple(args.workload or ()),
        app=args.app,
        expected=args.expected,
        guarantee=args.guarantee,
        brokers=args.brokers,
        nodes=args.nodes,
        prefix=args.prefix,
        mutant=args.mutant or "",
        seed=args.seed,
        rounds=args.rounds,
        faults_per_round=args.faults_per_round,
        stuck_after_s=args.stuck_after,
        settings=tuple(args.settings),
        replay=args.replay,
        save=args.save,
        as_json=args.json,
        only_list=args.list,
        delete_topics=True if args.delete_topics else False if args.keep_topics else None,
    )
    try:
        return main(options)
    except CampaignOptionError as error:
        raise UsageError(str(error)) from error
