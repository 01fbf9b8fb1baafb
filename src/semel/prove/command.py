"""What `semel prove` does: plan or load a schedule, run it, report, clean up."""

from __future__ import annotations

import random
import signal
import sys
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

from semel.local import checkout
from semel.progress import ProgressBar
from semel.prove.campaign import CampaignResult, RoundResult
from semel.prove.campaign import run as run_schedule
from semel.prove.checker.reading import CheckerError, delete_topics, topics_like
from semel.prove.injection import Patch
from semel.prove.inputs import TRANSACTION_SIZE
from semel.prove.schedule import (
    BROKER,
    FIRST_GENERATION_APIS,
    NODE,
    TRANSACTIONS,
    Schedule,
    ScheduleError,
    WorkloadPlan,
    load_schedule,
    mixed_with_nodes,
    network_faults,
    node_faults,
    shuffled_rounds,
)
from semel.prove.table_workloads import WORKLOADS
from semel.prove.testbed import NodesError, Testbed, TestbedError
from semel.prove.workloads import AppError, expectation_name, load_function

ROUNDS_PER_PLAN = 12  # then topics, groups and checkpoints are made anew
NODE_FAULT_EVERY_MS = 600
PER_NODE_FAULT = 8  # transactions of input
FIRST_GENERATION = "transaction.version=1"  # the protocol of Kafka before 4.0


def plan(
    seed: int,
    workloads: list[str],
    guarantee: str,
    rounds: int,
    *,
    own_broker: bool,
    per_round: int | None = None,
    options: Mapping[str, str] | None = None,
    settings: Sequence[str] = (),
    nodes: int = 0,
) -> Schedule:
    """`rounds` of each workload."""
    plans: list[WorkloadPlan] = []
    for name in workloads:
        kind = WORKLOADS[name]
        rng = random.Random(f"{seed}-{name}-{guarantee}")
        faults = kind.faults(guarantee, broker=own_broker)
        if FIRST_GENERATION in settings:
            faults += network_faults(FIRST_GENERATION_APIS, "")
        many = per_round or kind.faults_per_round
        spread_ms, transactions = kind.spread_ms, TRANSACTIONS
        if nodes:  # they go one at a time, and come back in seconds: there must be something to do meanwhile
            faults = mixed_with_nodes(list(node_faults(kind.led(guarantee))), faults)
            spread_ms, transactions = (
                max(spread_ms, many * NODE_FAULT_EVERY_MS),
                max(TRANSACTIONS, many * PER_NODE_FAULT),
            )
        drawn = shuffled_rounds(faults, rng, rounds, many, spread_ms, transactions)
        plans += [
            WorkloadPlan(name, guarantee, drawn[first : first + ROUNDS_PER_PLAN], dict(options or {}))
            for first in range(0, len(drawn), ROUNDS_PER_PLAN)
        ]
    return Schedule(seed, plans, settings=list(settings), nodes=nodes)


# --- the command ---
KEPT, VIOLATED, NOTHING_FIRED, COULD_NOT_RUN, INTERRUPTED = 0, 1, 3, 4, 130
MUTANTS = "tests.mutants"  # of a checkout
SHOWN_VIOLATIONS = 10
SHOWN_FAULTS = 3


class CampaignOptionError(Exception):
    """The options do not make sense."""


class CampaignOptions(NamedTuple):
    """The command line."""

    workloads: tuple[str, ...] = ()
    app: str | None = None
    expected: str | None = None
    guarantee: str = "exactly_once"
    brokers: str | None = None
    nodes: int | None = None
    prefix: str | None = None
    mutant: str = ""
    seed: int | None = None
    rounds: int = 12
    faults_per_round: int | None = None
    stuck_after_s: float | None = None
    settings: tuple[str, ...] = ()
    replay: str | None = None
    save: str | None = None
    as_json: bool = False
    only_list: bool = False
    delete_topics: bool | None = None


def main(options: CampaignOptions) -> int:
    """The exit code."""
    if options.only_list:
        _list()
        return KEPT
    schedule = schedule_of(options)
    output = CampaignOutput(
        sys.stderr if options.as_json else sys.stdout, sum(len(planned.rounds) for planned in schedule.plans)
    )
    path = Path(options.save or options.replay or f"semel-prove-{schedule.seed}.json")
    schedule.save(path)
    output.begin(schedule, path)
    result = CampaignResult()
    code = _campaign(options, schedule, output, result)
    output.end(result, code, path)
    if options.as_json:
        sys.stdout.write(msgspec.json.encode(summary(result, schedule, code)).decode() + "\n")
    return code


def _campaign(options: CampaignOptions, schedule: Schedule, output: CampaignOutput, result: CampaignResult) -> int:
    """Runs it on a testbed of its own, and leaves nothing running, whatever happens."""
    prefix = options.prefix or f"semel-prove-{uuid.uuid4().hex[:8]}"
    testbed, others = None, None
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        patch = Patch(str(checkout.ROOT), MUTANTS, schedule.mutant) if schedule.mutant else None
        testbed = Testbed(options.brokers, patch, tuple(schedule.settings), schedule.nodes or None)
        others = _topics(testbed.direct, prefix)
        stops = bool(schedule.mutant)
        run_schedule(testbed, schedule, prefix, result, on_round=output.round, say=output.say, stop_at_violation=stops)
        return _code(result)
    except (TestbedError, CheckerError, NodesError) as error:
        result.error = str(error)
        output.say(f"could not run: {error}")
        return COULD_NOT_RUN
    except KeyboardInterrupt:
        output.say("interrupted: its processes are stopped")
        return INTERRUPTED
    finally:
        output.hide_bar()
        if testbed is not None:
            testbed.clear()
            _clean_up(testbed, options, prefix, others, output)


def _code(result: CampaignResult) -> int:
    if result.violations:
        return VIOLATED
    return KEPT if result.fired else NOTHING_FIRED


# --- what is to be run ---
def schedule_of(options: CampaignOptions) -> Schedule:
    """Loaded, or planned from the seed."""
    if options.replay:
        try:
            schedule = load_schedule(Path(options.replay))
        except ScheduleError as error:
            raise CampaignOptionError(str(error)) from error
        _check_replay(schedule, options)
        return schedule
    if options.nodes is not None and (options.brokers is not None or options.nodes < 2):
        raise CampaignOptionError("--nodes starts a cluster of its own, of 2 nodes or more; leave --brokers out")
    if options.settings and options.brokers is not None:
        raise CampaignOptionError("--set is for a broker of one's own; leave --brokers out")
    if options.rounds < 1 or (options.faults_per_round is not None and options.faults_per_round < 1):
        raise CampaignOptionError("--rounds and --faults-per-round must be at least 1")
    seed = random.SystemRandom().randrange(1, 1 << 31) if options.seed is None else options.seed
    if options.mutant:
        return _mutant_schedule(options, seed)
    workloads = _workloads(options)
    return plan(
        seed,
        workloads,
        options.guarantee,
        options.rounds,
        own_broker=options.brokers is None and not options.nodes,
        per_round=options.faults_per_round,
        options=_options(options),
        settings=options.settings,
        nodes=options.nodes or 0,
    )


def _check_replay(schedule: Schedule, options: CampaignOptions) -> None:
    if schedule.mutant:
        _mutants()
    unknown = sorted({planned.workload for planned in schedule.plans} - set(WORKLOADS))
    if unknown:
        raise CampaignOptionError(f"{options.replay} has workloads that are not there: {', '.join(unknown)}")
    faults = [fault for planned in schedule.plans for round_ in planned.rounds for fault in round_.faults]
    if options.brokers is not None and any(fault.target in (BROKER, NODE) for fault in faults):
        raise CampaignOptionError(
            f"{options.replay} kills the broker, which is done to a broker of one's own only; leave --brokers out"
        )


def _mutant_schedule(options: CampaignOptions, seed: int) -> Schedule:
    mutants = _mutants()
    if options.mutant not in mutants.HUNTS:
        raise CampaignOptionError(
            f"there is no mutant {options.mutant!r}; the mutants are {', '.join(sorted(mutants.HUNTS))}"
        )
    if options.brokers is not None or options.nodes is not None:
        raise CampaignOptionError("a mutant is looked for with a broker of one's own; leave --brokers out, and --nodes")
    schedule: Schedule = mutants.plan_hunt(seed, options.mutant, options.rounds)
    return schedule


def _mutants() -> ModuleType:
    """The deliberate bugs: only a checkout has them."""
    module = checkout.module(MUTANTS)
    if module is None:
        raise CampaignOptionError("deliberate bugs are not installed with semel: --mutant works in a checkout only")
    return module


def _workloads(options: CampaignOptions) -> list[str]:
    if options.app is not None:
        if options.workloads:
            raise CampaignOptionError("--app is a workload of its own; leave --workload out")
        return ["app"]
    named = list(options.workloads) or ["loop"]
    known = [name for name in WORKLOADS if name != "app"]
    if named == ["all"]:
        return [name for name in known if options.guarantee in WORKLOADS[name].guarantees]
    for name in named:
        if name not in known:
            raise CampaignOptionError(
                f"there is no workload {name!r}; there are {', '.join(known)} and all (yours: --app)"
            )
        if options.guarantee not in WORKLOADS[name].guarantees:
            raise CampaignOptionError(f"workload {name} runs with {', '.join(WORKLOADS[name].guarantees)} only")
    return named


def _options(options: CampaignOptions) -> dict[str, str]:
    """The options of the workload."""
    limit = {} if options.stuck_after_s is None else {"stuck_after_s": str(options.stuck_after_s)}
    if options.app is None:
        return limit
    expected = options.expected or expectation_name(options.app)
    try:
        load_function(options.app)
        load_function(expected)
    except AppError as error:
        raise CampaignOptionError(str(error)) from error
    return {**limit, "app": options.app, "expected": expected}


# --- output for people and for programs ---
class CampaignOutput:
    def __init__(self, out: Any, rounds: int) -> None:
        self._out = out
        self._rounds = rounds
        self._shown = 0
        self._bar = ProgressBar("proving", rounds, "rounds")

    def say(self, line: str) -> None:
        """A line that stays, above the bar."""
        self._bar.hide()
        print(line, file=self._out, flush=True)
        if self._shown < self._rounds:
            self._bar.show(self._shown, now=True)

    def hide_bar(self) -> None:
        """No bar any more: what follows are results, or a question."""
        self._bar.hide()
        self._rounds = self._shown

    def begin(self, schedule: Schedule, path: Path) -> None:
        names = ", ".join(dict.fromkeys(f"{planned.workload} {planned.guarantee}" for planned in schedule.plans))
        self.say(f"{names}: {self._rounds} rounds, {schedule.fault_count} faults, seed {schedule.seed}")
        self.say(f"the schedule is in {path}; `semel prove --replay {path}` runs it again")
        if schedule.mutant:
            self.say(f"deliberate bug: {_mutants().MUTANTS[schedule.mutant].__doc__}")

    def round(self, result: RoundResult) -> None:
        self._shown += 1
        shown = "; ".join(str(fault) for fault in result.fired[:SHOWN_FAULTS])
        more = len(result.fired) - SHOWN_FAULTS
        shown += f"; {more} more" if more > 0 else ""
        price = "".join(f", {count} {kind}" for kind, count in result.allowed.items())
        verdict = "VIOLATED" if result.violations else "ok"
        self.say(
            f"{self._shown:>4}/{self._rounds} {result.workload:<22}{verdict:<9}{result.took_s:5.1f} s "
            f"{len(result.fired):>3} faults, {result.records} records{price}  ({shown})"
        )
        for violation in result.violations[:SHOWN_VIOLATIONS]:
            self.say(f"       {violation}")
        if len(result.violations) > SHOWN_VIOLATIONS:
            self.say(f"       and {len(result.violations) - SHOWN_VIOLATIONS} more")
        if result.violations and result.ends:
            self.say(f"       {len(result.ends)} times a process ended by itself with an error; the last time:")
            self.say(result.ends[-1])

    def end(self, result: CampaignResult, code: int, path: Path) -> None:
        kinds = Counter(
            f"{fault.what} {fault.target}" if fault.target != "network" else fault.what for fault in result.fired
        )
        self.say("")
        self.say(f"{len(result.fired)} faults fired: " + ", ".join(f"{n} {kind}" for kind, n in kinds.most_common()))
        self.say(
            f"{len(result.boundaries)} boundaries of the protocol were hit: {', '.join(sorted(result.boundaries))}"
        )
        if result.never_fired:
            self.say(f"{len(result.never_fired)} did not fire: {'; '.join(map(str, result.never_fired[:5]))} ...")
        found = Counter(violation.kind.value for violation in result.violations)
        verdicts = {
            KEPT: "kept: nothing was violated",
            VIOLATED: "VIOLATED: " + ", ".join(f"{n} {kind}" for kind, n in found.most_common()),
            NOTHING_FIRED: "nothing is shown: no fault fired",
            COULD_NOT_RUN: "nothing is shown: it could not run to its end",
            INTERRUPTED: "interrupted before its end",
        }
        self.say(verdicts[code] + (f"; run it again with `semel prove --replay {path}`" if code == VIOLATED else ""))


def summary(result: CampaignResult, schedule: Schedule, code: int) -> dict[str, Any]:
    return {
        "exit_code": code,
        "seed": schedule.seed,
        "mutant": schedule.mutant,
        "rounds": len(result.rounds),
        "transactions_fed": sum(round_.transactions for round_ in result.rounds),
        "records_fed": sum(round_.transactions for round_ in result.rounds) * TRANSACTION_SIZE,
        "faults_fired": len(result.fired),
        "faults_not_fired": len(result.never_fired),
        "faults_by_kind": dict(Counter(f"{fault.what} {fault.target}" for fault in result.fired)),
        "boundaries": dict(result.boundaries),
        "allowed": dict(result.allowed),
        "violations": result.violations,
        "error": result.error,
        "details": result.rounds,
    }


def _list() -> None:
    for name, workload in WORKLOADS.items():
        print(f"workload {name:<30}{workload.help}")
    mutants = checkout.module(MUTANTS)
    if mutants is not None:
        for name, hunt in mutants.HUNTS.items():
            print(f"mutant   {name:<30}{mutants.MUTANTS[name].__doc__} (looked for with {hunt.workload})")


# --- cleaning up ---
def _clean_up(
    testbed: Testbed, options: CampaignOptions, prefix: str, others: list[str] | None, output: CampaignOutput
) -> None:
    """A broker of our own goes with its data. On somebody else's cluster only what is surely ours is deleted.

    `others`: topics with our prefix that were there before us; None if nobody knows, and then nothing was made.
    """
    try:
        if options.brokers is not None and others is not None:
            _leave_cluster(testbed.direct, options, prefix, others, output)
    except CheckerError as error:
        output.say(f"left behind on {options.brokers}: topics that begin with {prefix} ({error})")
    finally:
        testbed.close()


def _topics(brokers: str, prefix: str) -> list[str]:
    return topics_like(brokers, prefix + ".") + topics_like(brokers, prefix + "-")


def _leave_cluster(
    brokers: str, options: CampaignOptions, prefix: str, others: list[str], output: CampaignOutput
) -> None:
    topics = [topic for topic in _topics(brokers, prefix) if topic not in others]
    if not topics:
        return
    if _may_delete(options, topics):
        delete_topics(brokers, topics)
        output.say(f"deleted {len(topics)} topics that this run made; its groups expire by themselves")
    else:
        output.say(
            f"left behind on {brokers}: topics {', '.join(topics)}, and consumer groups that begin with {prefix}"
        )


def _may_delete(options: CampaignOptions, topics: list[str]) -> bool:
    if options.delete_topics is not None:
        return options.delete_topics
    if not all(stream and stream.isatty() for stream in (sys.stdin, sys.stderr)):  # None: it is closed
        return False
    sys.stderr.write(f"delete the {len(topics)} topics that this run made ({topics[0]}, ...)? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
