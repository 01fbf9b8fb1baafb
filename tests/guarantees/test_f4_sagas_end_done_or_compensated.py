"""F4: sagas survive a crash and end in all done or all compensated.

Faults: kill -9 of the orchestrator and of a participant, before and after a commit, between any two steps (in full: at
each of the first commits); a participant that is away; a compensation that fails; commands that come again; records
that are none. What a saga does not give, isolation, is shown too.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer as ForeignProducer

from semel import Sagas, SagaStep, SagaStepError, StepFailedError, TimedOutError
from semel.cli import main
from semel.local.processes import Process
from semel.patterns.process import Processor
from semel.prove.checker.histories import check_sagas, last_values, statuses
from semel.prove.checker.reading import read
from semel.prove.injection import Injection, command
from semel.prove.pattern_workers import transfer, transfers
from tests.support.broker import KAFKA_IN_FULL, Cluster
from tests.support.reading import read_topic
from tests.support.waiting import PATIENCE_S, until

COUNT = 12
semel_only = pytest.mark.parametrize("cluster", ["semel"], indirect=True)
both = pytest.mark.parametrize("cluster", ["semel", KAFKA_IN_FULL], indirect=True)


@contextmanager
def running(*loops: Processor) -> Iterator[None]:
    threads = [threading.Thread(target=loop.run) for loop in loops]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.stop()
        for thread in threads:
            thread.join(PATIENCE_S)


class Transfers:
    """The transfers of the workload `sagas`: programs, and what they must lead to."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.bootstrap, self._folder = cluster.bootstrap, folder
        self.name = cluster.unique("transfer")
        self.sagas = transfers(self.name, self.bootstrap)
        self.sagas.create(partitions=2)
        for number in range(COUNT):
            self.sagas.start(f"s-{number}", transfer(number))
        self.sagas.start("s-0", transfer(1))  # an id starts once

    def process(self, role: str, fault: str = "") -> Process:
        options = {
            "name": self.name,
            "partitions": 2,
            "role": role,
            "bootstrap_servers": self.bootstrap,
            "instance": role,
            "directory": str(self._folder / role),
            "delay_ms": 300,
            "max_records": 4,
            "consumer": {"session_timeout_ms": 6000, "heartbeat_interval_ms": 300},
        }
        return Process(command(Injection(fault), "-m", "semel.prove.workers", "saga-loop", json.dumps(options)))

    def keep_running(self, role: str, faults: list[str]) -> None:
        """One after the other, each until its fault; the last one until all sagas have ended."""
        for fault in faults:
            with self.process(role, fault) as process:
                process.wait_for_line(f"^fault fired: {fault.partition(':')[0]}$", PATIENCE_S)
                process.wait(PATIENCE_S)
        with self.process(role):
            for number in range(COUNT):
                self.sagas.wait(f"s-{number}", timeout_ms=PATIENCE_S * 1000)

    def check(self) -> dict[str, str]:
        log = f"{self.name}.log"
        ends = statuses(read(self.bootstrap, [log]))
        refused = {number for number in range(COUNT) if number % 5 == 4 or number % 7 == 6}
        wanted = {f"s-{number}": ("compensated",) if number in refused else ("done",) for number in range(COUNT)}
        changelog = last_values(read(self.bootstrap, [f"{self.name}.accounts.state.changelog"]))
        balances = {key.decode(): int(value) for key, value in changelog.items() if key[:1] > b"\x01"}
        assert [key for key in changelog if key.startswith(b"\x01")] == [], "receipts of ended sagas are removed"
        assert check_sagas(log, ends, wanted, balances, _effects) == []
        return ends


def _effects(saga: str) -> dict[str, int]:
    data = transfer(int(saga.removeprefix("s-")))
    found = {data["from"]: -data["cents"]}
    found[data["to"]] = found.get(data["to"], 0) + data["cents"]
    return found


def kill_between(transfers: Transfers, orchestrator: list[str], participant: list[str]) -> None:
    errors: list[BaseException] = []

    def guarded(role: str, faults: list[str]) -> None:
        try:
            transfers.keep_running(role, faults)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=guarded, args=each)
        for each in (("orchestrator", orchestrator), ("participant", participant))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert set(transfers.check().values()) == {"done", "compensated"}


@both
@pytest.mark.timeout(240)
def test_sagas_are_whole_after_kill_9_between_steps(cluster: Cluster, tmp_path: Path) -> None:
    """Each saga waits on a timer before its last step, so the timers have survived, too."""
    transfers = Transfers(cluster, tmp_path)
    with running(transfers.sagas.participant("accounts")):
        transfers.keep_running("orchestrator", ["state.committed:kill:3"])
    assert set(transfers.check().values()) == {"done", "compensated"}


@pytest.mark.full
@pytest.mark.timeout(600)
@semel_only
@pytest.mark.parametrize("nth", range(1, 9))
def test_sagas_are_whole_after_kill_9_between_any_two_steps(cluster: Cluster, tmp_path: Path, nth: int) -> None:
    points = [f"state.sent:kill:{nth}", f"state.committed:kill:{nth}"]
    kill_between(Transfers(cluster, tmp_path), points, points)


@semel_only
def test_there_is_no_isolation(cluster: Cluster) -> None:
    """While a saga is under way others see its first steps: here, money that is on neither account."""
    seen: list[int] = []
    name = cluster.unique("transfer")

    def debit(call: Any) -> None:
        call.state.put("a", call.state.get("a", 0) - 5)

    def credit(call: Any) -> None:
        rows = last_values(read(cluster.bootstrap, [f"{name}.steps.state.changelog"]))
        seen.append(sum(int(value) for key, value in rows.items() if key in (b"a", b"b")))
        call.state.put("b", call.state.get("b", 0) + 5)

    sagas = Sagas(name, [SagaStep("debit", debit), SagaStep("credit", credit)], bootstrap_servers=cluster.bootstrap)
    sagas.create(partitions=1)
    sagas.start("s", None)
    with running(sagas.orchestrator(), sagas.participant()):
        assert sagas.wait("s").status == "done"
    assert seen == [-5]
    rows = last_values(read(cluster.bootstrap, [f"{name}.steps.state.changelog"]))
    assert (rows[b"a"], rows[b"b"]) == (b"-5", b"5")


class Stubborn:
    """A saga whose compensation works only when it may, and whose last step nobody runs in time."""

    def __init__(self, cluster: Cluster) -> None:
        self.bootstrap, self.works, self.undone = cluster.bootstrap, False, 0
        quick = {"retries": 1, "backoff_ms": 50}
        steps = [
            SagaStep("take", lambda call: {"id": call.id}, self._undo, **quick),
            SagaStep("pay", self._refuse, lambda call: None, service="away", timeout_ms=400, **quick),
        ]
        self.sagas = Sagas(cluster.unique("stubborn"), steps, bootstrap_servers=cluster.bootstrap, tick_ms=50)
        self.sagas.create(partitions=1)

    def _undo(self, call: Any) -> None:
        if not self.works:
            raise ConnectionError("the shop does not respond")
        assert call.results["take"] == {"id": "s/take"}
        self.undone += 1

    def _refuse(self, call: Any) -> None:
        raise StepFailedError("no money")

    def list_stuck(self) -> int:
        return main(["saga", "list", self.sagas.name, "--brokers", self.bootstrap, "--stuck"])


@semel_only
def test_a_step_without_a_reply_is_compensated_and_a_stuck_compensation_shows(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    stubborn = Stubborn(cluster)
    sagas = stubborn.sagas
    sagas.start("s", None)
    with running(sagas.orchestrator(), sagas.participant()):
        until(lambda: sagas.states() and sagas.states()[0].stuck)
        state = sagas.states()[0]
        assert (state.status, state.step) == ("compensating", "pay"), "it waits for the service that is away"
        assert "no reply within 400 ms; is 'away' running?" in state.error
        with running(sagas.participant("away")):
            until(lambda: sagas.states()[0].step == "take" and sagas.states()[0].stuck)
        assert stubborn.list_stuck() == 1
        output = capsys.readouterr().out
        assert "compensating, stuck" in output
        assert "ConnectionError: the shop does not respond" in output
        with pytest.raises(TimedOutError, match="compensating at step 'take' undo of take: ConnectionError"):
            sagas.wait("s", timeout_ms=3_000)  # time enough to read the log on a busy machine
        stubborn.works = True
        assert sagas.wait("s").status == "compensated"
    assert stubborn.list_stuck() == 0
    assert stubborn.undone == 1
    assert sagas.states()[0].error.startswith("undo of take"), "what went wrong last stays in the log"


@semel_only
def test_an_orchestrator_that_runs_again_keeps_its_timers(cluster: Cluster) -> None:
    steps = [SagaStep("pay", lambda call: None, service="away", timeout_ms=100)]
    sagas = Sagas(cluster.unique("again"), steps, bootstrap_servers=cluster.bootstrap, tick_ms=50)
    sagas.create(partitions=1)
    orchestrator = sagas.orchestrator()
    orchestrator.stop()
    orchestrator.run()
    sagas.start("s", None)
    with running(orchestrator):
        until(lambda: "no reply within 100 ms" in "".join(saga.error for saga in sagas.states()))


@semel_only
def test_commands_that_come_again_are_answered_from_receipts(cluster: Cluster) -> None:
    calls: list[str] = []
    release = threading.Event()

    def once(call: Any) -> int:
        calls.append(call.id)
        return len(calls)

    def wait(call: Any) -> int:
        release.wait(PATIENCE_S)
        return 0

    steps = [SagaStep("once", once), SagaStep("wait", wait, service="slow")]
    sagas = Sagas(cluster.unique("twice"), steps, bootstrap_servers=cluster.bootstrap)
    sagas.create(partitions=1)
    sagas.start("s", None)
    commands, dead = f"{sagas.name}.steps.commands", f"{sagas.name}.dead"
    with running(sagas.orchestrator(), sagas.participant(), sagas.participant("slow")):
        (first,) = until(lambda: read_topic(cluster.bootstrap, commands))
        foreign = ForeignProducer({"bootstrap.servers": cluster.bootstrap})
        for topic, value in ((commands, first.value), (commands, b"{"), (f"{sagas.name}.requests", b"{")):
            foreign.produce(topic, value, key=b"s")
        assert foreign.flush(PATIENCE_S) == 0
        until(lambda: len(read_topic(cluster.bootstrap, f"{sagas.name}.replies")) == 2)
        until(lambda: len(read_topic(cluster.bootstrap, dead)) == 2)
        release.set()
        assert sagas.wait("s").results == {"once": 1, "wait": 0}
    assert calls == ["s/once"]


@semel_only
def test_a_step_that_a_deployment_does_not_have_is_refused(cluster: Cluster) -> None:
    steps = [SagaStep(name, lambda call: None, service=name) for name in ("old", "new")]
    name = cluster.unique("deployed")
    before = Sagas(name, steps, bootstrap_servers=cluster.bootstrap)
    before.create(partitions=1)
    before.start("s", None)
    with running(before.orchestrator()):
        until(before.states)
    after = Sagas(name, steps[1:], bootstrap_servers=cluster.bootstrap)
    with pytest.raises(SagaStepError, match=r"'s' is running at step 'old' .* does not have.*Go back to a version"):
        after.orchestrator().run()
    renamed = [SagaStep("renamed", lambda call: None, service="old")]
    with pytest.raises(SagaStepError, match="orders the step 'old', which this participant does not have"):
        Sagas(name, renamed, bootstrap_servers=cluster.bootstrap).participant("old").run()
    with running(before.orchestrator(), before.participant("old"), before.participant("new")):
        assert before.wait("s").status == "done", "nothing of it is lost"
