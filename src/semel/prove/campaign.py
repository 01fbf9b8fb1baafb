"""Runs a schedule: feeds, inflicts, waits until the pipeline has caught up, checks, and reports, round by round."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import msgspec

from semel.prove.checker.check import CheckResult, Violation, ViolationKind, check
from semel.prove.checker.reading import (
    CheckerError,
    Observation,
    Seen,
    Watcher,
    create_topics,
    group_offsets,
    read,
    topics_like,
)
from semel.prove.inflict import Inflictor
from semel.prove.schedule import Fault, Round, Schedule, WorkloadPlan
from semel.prove.table_workloads import WORKLOADS
from semel.prove.testbed import Testbed, TestbedError
from semel.prove.workloads import PRODUCER, Workload

TICK_S = 0.02
WARM_UP_TRANSACTIONS = 2  # without faults, so that faults meet a pipeline that works
LOOK_EVERY_S = 0.3
QUIET_S = 1.5  # nothing new for so long, and the groups stand at the end: nothing more will come
QUIET_WITHOUT_GROUP_S = 60.0  # nobody knows where it stands: it may be waiting for a session to expire
FEED_TIMEOUT_S = 120.0
QUICK_ENDS = 3  # so often a process may end with an error before the pipeline has written anything
PROGRESS_EVERY_S = 10.0
FIRE_TIMEOUT_S = 1.0  # after all is done, for faults that are armed to meet what still goes on

# What a guarantee does not promise: counted, and not a violation.
ALLOWED: dict[str, frozenset[ViolationKind]] = {
    "exactly_once": frozenset(),
    "at_least_once": frozenset({ViolationKind.DUPLICATED, ViolationKind.REORDERED}),
    "at_most_once": frozenset({ViolationKind.LOST, ViolationKind.OFFSETS}),
}


class RoundResult(msgspec.Struct):
    workload: str
    guarantee: str
    number: int
    fired: list[Fault]
    not_fired: list[Fault]
    transactions: int
    records: int
    took_s: float
    violations: list[Violation]
    allowed: dict[str, int]  # kinds that the guarantee does not rule out
    ends: list[str] = []  # processes that ended by themselves with an error: exit code and last output
    caught_up_s: float = 0.0  # from the end of the input and of the last fault until all of it had come out
    start_s: float = 0.0  # what the pipeline takes to start, without faults


class CampaignResult(msgspec.Struct):
    rounds: list[RoundResult] = []
    never_fired: list[Fault] = []
    error: str = ""

    @property
    def violations(self) -> list[Violation]:
        return [violation for result in self.rounds for violation in result.violations]

    @property
    def fired(self) -> list[Fault]:
        return [fault for result in self.rounds for fault in result.fired]

    @property
    def boundaries(self) -> Counter[str]:
        return Counter(fault.boundary for fault in self.fired if fault.boundary)

    @property
    def allowed(self) -> Counter[str]:
        return sum((Counter(result.allowed) for result in self.rounds), Counter())


Tell = Callable[[RoundResult], None]
Say = Callable[[str], None]


def run(
    testbed: Testbed,
    schedule: Schedule,
    prefix: str,
    result: CampaignResult,
    *,
    on_round: Tell,
    say: Say,
    stop_at_violation: bool,
) -> None:
    """Runs it to its end. TestbedError or CheckerError if that is not possible; `result` has what was done by then.

    `tell` gets each round's result, `say` gets lines about the progress."""
    for number, plan in enumerate(schedule.plans):
        workload_run = WorkloadRun(testbed, plan, f"{prefix}.{number}", say)
        try:
            workload_run.begin()
            for round_number, round_ in enumerate(plan.rounds):
                is_last = round_number == len(plan.rounds) - 1
                done = workload_run.round(round_number, round_, is_last)
                result.rounds.append(done)
                on_round(done)
                if done.violations:
                    break  # what follows would only find the same records again
            result.never_fired += workload_run.unfired
        finally:
            workload_run.end()
        if stop_at_violation and result.violations:
            break


class WorkloadRun:
    """One workload on topics of its own."""

    def __init__(self, testbed: Testbed, plan: WorkloadPlan, prefix: str, say: Say) -> None:
        self._testbed = testbed
        self._plan = plan
        self._workload: Workload = WORKLOADS[plan.workload](testbed, prefix, plan.guarantee, plan.options)
        self._prefix = prefix
        self._say = say
        self._watcher: Watcher | None = None
        self._transactions = 0
        self._start_s = self._caught_up_s = 0.0
        self._stuck_after_s = float(plan.options.get("stuck_after_s", self._workload.stuck_after_s))
        self.unfired: list[Fault] = []

    def begin(self) -> None:
        there = topics_like(self._testbed.direct, self._prefix + ".")
        if there:
            raise TestbedError(
                f"topics {', '.join(there)} exist already; they may be somebody's: choose another --prefix"
            )
        transactions = WARM_UP_TRANSACTIONS + sum(round_.transactions for round_ in self._plan.rounds)
        ids = self._workload.expectation(transactions).ids
        if ids is not None and not ids:
            raise TestbedError(
                f"{self._plan.workload}: no output is expected for any of the inputs of {transactions} transactions, "
                "so nothing could be shown: the function that says what is expected must return values for some"
            )
        topics = self._workload.topics()
        create_topics(self._testbed.direct, topics)
        self._watcher = Watcher(self._testbed.direct, topics).start()
        began_s = time.monotonic()
        self._say(f"{self._plan.workload}: starting; {WARM_UP_TRANSACTIONS} transactions without faults come first")
        self._workload.start()
        self._warm_up()
        self._start_s = time.monotonic() - began_s
        self._say(f"{self._plan.workload}: works after {self._start_s:.1f} s; the faults begin")

    def _warm_up(self) -> None:
        """A pipeline that does not work without faults says nothing about the guarantee, and why it does not is in its
        output. One that runs, and has written something else than expected, is left to the checker."""
        self._transactions = WARM_UP_TRANSACTIONS
        if stuck := self._work(Inflictor([], self._testbed), "before the first round", self._check_start):
            raise TestbedError(f"the pipeline does not work even without faults: {stuck[0].detail}")
        is_broken = any(supervised.ends for name, supervised in self._testbed.processes.items() if name != PRODUCER)
        if is_broken and not self._workload.complete(self._outputs(), self._transactions):
            raise self._not_up()

    def _check_start(self) -> None:
        processes = self._testbed.processes.values()
        if any(len(supervised.ends) >= QUICK_ENDS for supervised in processes) and not self._outputs():
            raise self._not_up()

    def _not_up(self) -> TestbedError:
        return TestbedError(f"the pipeline does not work even without faults.\n{self._testbed.last_output(PRODUCER)}")

    @property
    def _observation(self) -> Observation:
        assert self._watcher is not None
        return self._watcher.observation

    def _outputs(self) -> list[Seen]:
        return [record for record in list(self._observation.records) if record.topic in self._workload.outputs]

    def end(self) -> None:
        self._testbed.clear()
        self._workload.end()
        if self._watcher is not None:
            self._watcher.stop()

    # --- a round ---
    def round(self, number: int, round_: Round, is_last: bool) -> RoundResult:
        began_s = time.monotonic()
        carried = [msgspec.structs.replace(fault, at_ms=0) for fault in self.unfired]
        inflictor = Inflictor([*carried, *round_.faults], self._testbed, self._workload)
        self._transactions += round_.transactions
        ended_before = {name: len(supervised.ends) for name, supervised in self._testbed.processes.items()}
        try:
            stuck = self._work(inflictor, f"round {number + 1}")
        finally:
            inflictor.disarm()
        self.unfired = [running.fault for running in inflictor.running if not running.fired]
        for supervised in self._testbed.processes.values():  # what is down comes up, so that it can be looked at
            supervised.thaw()
        self._testbed.supervise()
        verdict = self._verdict(is_last)
        allowed = ALLOWED[self._plan.guarantee]
        counted = Counter(v.kind.value for v in verdict.violations if v.kind in allowed)
        return RoundResult(
            self._plan.workload,
            self._plan.guarantee,
            number,
            inflictor.fired,
            list(self.unfired),
            round_.transactions,
            verdict.records_read,
            time.monotonic() - began_s,
            [*stuck, *(v for v in verdict.violations if v.kind not in allowed)],
            dict(counted),
            [
                end
                for name, supervised in self._testbed.processes.items()
                for end in supervised.ends[ended_before.get(name, 0) if name != PRODUCER else 0 :]
            ],
            self._caught_up_s,
            self._start_s,
        )

    def _work(self, inflictor: Inflictor, when: str, check: Callable[[], None] = lambda: None) -> list[Violation]:
        """Until everything that was fed in has come out, or it is certain that it will not. `check` may raise."""
        producer = self._workload.feed(self._transactions)
        progress = _Progress(self._testbed, self._workload, self._observation, self._transactions, self._stuck_after_s)
        fed_s = done_s = calm_s = 0.0
        began_s = said_s = time.monotonic()
        deadline_s = began_s + FEED_TIMEOUT_S
        while True:
            inflictor.poll()
            self._testbed.supervise()
            check()
            now_s = time.monotonic()
            calm_s = now_s if inflictor.lasting or not fed_s else calm_s
            if now_s - said_s >= PROGRESS_EVERY_S:
                said_s = now_s
                doing = progress.behind if fed_s else "feeding in"
                self._say(f"     {self._plan.workload}, {when}, {now_s - began_s:.0f} s: {doing:.120}")
            if not fed_s and not producer.wanted:
                fed_s, deadline_s = now_s, now_s + self._stuck_after_s
            if fed_s and not inflictor.lasting and (done_s or progress.done()):
                done_s = done_s or now_s
                self._caught_up_s = max(0.0, done_s - calm_s)
                if now_s - done_s >= FIRE_TIMEOUT_S or all(running.fired for running in inflictor.running):
                    return []
            if now_s > deadline_s:
                lasting = [str(running.fault) for running in inflictor.running if running.fired and not running.over]
                what = f"not caught up in time: {progress.behind}" if fed_s else "the producer did not finish"
                return [self._stuck(what + (f"; still going on: {'; '.join(lasting)}" if lasting else ""))]
            time.sleep(TICK_S)

    def _stuck(self, what: str) -> Violation:
        if self._plan.workload != "app":  # which may not survive the signal
            self._testbed.show_stacks()
        detail = f"{what}\n{self._testbed.last_output(PRODUCER)}".strip()
        return Violation(ViolationKind.STUCK, "/".join(self._workload.outputs), -1, -1, "", "", detail)

    def _verdict(self, is_last: bool) -> CheckResult:
        expectations = [self._workload.expectation(self._transactions)]
        if is_last:
            expectations += self._workload.source_expectations(self._transactions)
            expectations += self._workload.further_expectations(self._transactions)
        verdicts = [check(expectation, self._testbed.direct, self._observation) for expectation in expectations]
        violations = [violation for verdict in verdicts for violation in verdict.violations]
        violations += self._workload.table_violations(self._transactions)
        return msgspec.structs.replace(verdicts[0], violations=violations)


class _Progress:
    """Has the pipeline caught up with what was fed in?"""

    def __init__(
        self, testbed: Testbed, workload: Workload, observation: Observation, transactions: int, stuck_after_s: float
    ) -> None:
        self._testbed, self._workload, self._observation = testbed, workload, observation
        self._began_s = time.monotonic()
        self._quiet_s = min(QUIET_WITHOUT_GROUP_S, stuck_after_s / 2)
        self._transactions = transactions
        self._looked_s = 0.0
        self._source_ends: dict[tuple[str, int], int] | None = None
        self.behind = "nothing was seen yet"  # why it has not

    def done(self) -> bool:
        """Cheap enough to be called often: it looks a few times a second."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_EVERY_S:
            return False
        self._looked_s = now_s
        try:
            return self._look(now_s)
        except CheckerError as error:
            self.behind = str(error)  # the broker is coming back
            return False

    def _look(self, now_s: float) -> bool:
        observation = self._observation
        outputs = [record for record in list(observation.records) if record.topic in self._workload.outputs]
        complete = self._workload.complete(outputs, self._transactions)
        last_s = observation.times_s[-1] if observation.times_s else 0.0
        groups = self._workload.groups()
        if not groups:
            self.behind = f"{len(outputs)} records in the output"
            # Before its first record it may still be starting.
            is_quiet = bool(outputs) and now_s - max(last_s, self._began_s) >= self._quiet_s
            return complete or (is_quiet and self._workload.ends_when_quiet)
        if not self._at_the_end(groups):
            return False
        self.behind = f"the groups are at the end, but only {len(outputs)} records are in the output"
        return complete or (self._workload.may_end_quietly and now_s - last_s >= QUIET_S)

    def _at_the_end(self, groups: list[tuple[str, str]]) -> bool:
        for group, topic in groups:
            last = self._last_offsets(topic)
            if not last:
                self.behind = f"{topic} is empty"
                return False
            offsets = group_offsets(self._testbed.direct, group, last, timeout_s=5)
            behind = {
                place: (offsets.get(place, 0), end) for place, end in last.items() if offsets.get(place, 0) <= end
            }
            if behind:
                self.behind = f"group {group} is behind (offset, last record): {behind}"
                return False
        return True

    def _last_offsets(self, topic: str) -> dict[tuple[str, int], int]:
        """Of the source it is read once, since the producer has finished; other topics may still grow."""
        if topic != self._workload.source:
            return _last_records(self._testbed.direct, topic)
        if self._source_ends is None:
            self._source_ends = _last_records(self._testbed.direct, topic)
        return self._source_ends


def _last_records(brokers: str, topic: str) -> dict[tuple[str, int], int]:
    return {(seen.topic, seen.partition): seen.offset for seen in read(brokers, [topic])}
