"""`semel audit` finds what is planted, says nothing where nothing is, and says so when it cannot look."""

from __future__ import annotations

import json
import socket
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from semel.audit import Audit, CannotLookError, FindingKind, audit
from semel.cli import main
from semel.spark.ledger import LedgerEntry
from semel.spark.ledger import Written as LedgerWritten
from tests.support.broker import Cluster
from tests.support.reading import settle
from tests.support.waiting import PATIENCE_S


class Application:
    """A ledger, a source and an output, written by confluent-kafka as the sink writes them."""

    def __init__(self, cluster: Cluster) -> None:
        self.brokers = cluster.bootstrap
        self.id = cluster.unique("audited")
        self.source, self.output = f"{self.id}.in", f"{self.id}.out"
        self._admin = AdminClient({"bootstrap.servers": self.brokers, "log_level": 0})
        self.create(f"{self.id}.ledger", self.source, self.output)
        self._producer = Producer({"bootstrap.servers": self.brokers, "transactional.id": self.id, "log_level": 0})
        self._producer.init_transactions(PATIENCE_S)
        self.entries: list[LedgerEntry] = []
        self.plain(self.source, 100)

    def create(self, *names: str, **config: str) -> None:
        for future in self._admin.create_topics([NewTopic(name, 1, 1, config=config) for name in names]).values():
            future.result(PATIENCE_S)

    def plain(self, topic: str, count: int) -> None:
        producer = Producer({"bootstrap.servers": self.brokers, "log_level": 0})
        for number in range(count):
            producer.produce(topic, b"%d" % number)
        assert producer.flush(PATIENCE_S) == 0

    def batch(
        self, start: int, end: int, *, writes: int | None = None, says: int | None = None, **changes: Any
    ) -> None:
        """A batch that reads [start, end), writes so many rows, and may say otherwise."""
        writes = end - start if writes is None else writes
        offsets: list[int] = []
        self._producer.begin_transaction()
        for number in range(writes):
            self._producer.produce(
                self.output, b"%d" % number, on_delivery=lambda _, message: offsets.append(message.offset())
            )
        assert self._producer.flush(PATIENCE_S) == 0
        count = writes if says is None else says
        written = [LedgerWritten(self.output, 0, count, min(offsets), max(offsets))] if offsets else []
        entry = LedgerEntry(
            **{
                "sequence": len(self.entries),
                "query_id": "query",
                "run_id": "run",
                "batch_id": len(self.entries),
                "starts": [self.at(start)],
                "ends": [self.at(end)],
                "written": written,
                "rows": count,
                "committed_at_ms": 1_700_000_000_000,
                **changes,
            }
        )
        self._producer.produce(f"{self.id}.ledger", entry.encode(), key=entry.key)
        self._producer.commit_transaction(PATIENCE_S)
        settle(self.brokers)
        self.entries.append(entry)

    def at(self, offset: int) -> str:
        return json.dumps({self.source: {"0": offset}}, separators=(",", ":"))

    def move_group(self, offset: int) -> None:
        with closing(Consumer({"bootstrap.servers": self.brokers, "group.id": self.id, "log_level": 0})) as consumer:
            consumer.commit(offsets=[TopicPartition(self.source, 0, offset)], asynchronous=False)

    def leave_open(self) -> None:
        """A driver that died before EndTxn."""
        self._producer.begin_transaction()
        self._producer.produce(f"{self.id}.ledger", b"{}", key=b"open")
        assert self._producer.flush(PATIENCE_S) == 0

    def audit(self, **options: Any) -> Audit:
        return audit(self.brokers, self.id, **options)


@pytest.fixture
def app(cluster: Cluster) -> Application:
    return Application(cluster)


def kinds(result: Audit) -> list[FindingKind]:
    return [finding.kind for finding in result.findings]


def test_a_whole_ledger_is_clean_and_its_rows_are_counted(app: Application) -> None:
    app.batch(0, 40)
    app.batch(40, 70, writes=31)  # rows out need not be rows in
    app.batch(70, 90)
    app.move_group(90)
    result = app.audit()
    assert result.clean, result.findings
    assert [entry.batch_id for entry in result.entries] == [0, 1, 2]
    assert result.counted == 40 + 31 + 20
    assert result.lag == {f"{app.source}-0": 10}
    assert result.notes == []


def test_a_gap_in_the_input_is_found(app: Application) -> None:
    app.batch(0, 40)
    app.batch(45, 70)
    (finding,) = app.audit().findings
    assert (finding.kind, finding.sequence, finding.place) == (FindingKind.GAP, 1, f"{app.source}-0")
    assert "offsets 40 to 44 were skipped" in str(finding)


def test_an_overlap_in_the_input_is_found(app: Application) -> None:
    app.batch(0, 40)
    app.batch(30, 70)
    (finding,) = app.audit().findings
    assert (finding.kind, finding.sequence) == (FindingKind.OVERLAP, 1)
    assert "offsets 30 to 39 were read before" in str(finding)


@pytest.mark.parametrize(("writes", "says", "why"), [(9, 10, "missing"), (11, 10, "another producer")])
def test_a_count_that_is_not_what_the_output_holds_is_found(app: Application, writes: int, says: int, why: str) -> None:
    app.batch(0, 40)
    app.batch(40, 50, writes=writes, says=says)
    (finding,) = app.audit().findings
    assert (finding.kind, finding.sequence, finding.place) == (FindingKind.COUNT, 1, f"{app.output}-0")
    assert f"hold {writes} records, it says {says}" in finding.detail
    assert why in finding.detail
    assert app.audit(counting=False).clean  # the ledger alone fits together


def test_offsets_that_two_batches_claim_are_found(app: Application) -> None:
    app.batch(0, 40)
    app.batch(40, 50, written=[LedgerWritten(app.output, 0, 10, 35, 44)])
    assert FindingKind.OVERLAP in kinds(app.audit(counting=False))


def test_missing_and_doubled_entries_are_found(app: Application) -> None:
    app.batch(0, 40)
    app.batch(40, 50, sequence=2)
    app.batch(50, 60, sequence=2)
    first, second = app.audit().findings
    assert (first.kind, second.kind) == (FindingKind.LEDGER, FindingKind.LEDGER)
    assert "those in between are gone" in str(first)
    assert "two writers" in str(second)


def test_a_group_that_was_moved_is_found(app: Application) -> None:
    app.batch(0, 40)
    app.move_group(12)
    (finding,) = app.audit().findings
    assert finding.kind is FindingKind.OFFSETS
    assert "stands at 12, the ledger ends at 40" in finding.detail


def test_records_of_others_between_the_batches_are_noted_and_no_finding(app: Application) -> None:
    app.batch(0, 40)
    app.plain(app.output, 5)
    app.batch(40, 50)
    result = app.audit()
    assert result.clean
    assert "5 records between the batches are not this application's" in result.notes[0]


def test_a_batch_job_in_between_is_no_gap_and_new_partitions_may_begin_anywhere(app: Application) -> None:
    app.batch(0, 40)
    app.batch(0, 0, writes=3, starts=[], ends=[], query_id="job:load")
    both = json.dumps({app.source: {"0": 40, "1": 7}})
    app.batch(40, 50, starts=[both])
    assert app.audit().clean


def test_a_topic_that_was_created_anew_may_begin_anywhere(app: Application) -> None:
    def at(offset: int, topic_id: str) -> list[str]:
        return [json.dumps({app.source: {"0": offset}, "$ids": {app.source: topic_id}})]

    app.batch(0, 40, starts=at(0, "A"), ends=at(40, "A"))
    app.batch(0, 40, starts=at(0, "B"), ends=at(40, "B"))
    assert app.audit().clean
    app.batch(0, 40, starts=at(0, "B"), ends=at(40, "B"))
    assert kinds(app.audit()) == [FindingKind.OVERLAP]


def test_sources_that_are_not_kafka_are_compared_as_they_are(app: Application) -> None:
    app.batch(0, 10, starts=[None], ends=["file-7"])
    app.batch(10, 20, starts=["file-7"], ends=["file-9"])
    assert app.audit().clean
    app.batch(20, 30, starts=["file-10"], ends=["file-11"])
    assert kinds(app.audit()) == [FindingKind.GAP]


def test_only_the_last_batches_are_looked_at_if_asked(app: Application) -> None:
    app.batch(0, 40)
    app.batch(45, 70)
    app.batch(70, 80)
    assert app.audit(last=2).clean
    assert not app.audit(last=3).clean


def test_an_open_transaction_of_a_dead_driver_holds_nobody_up(app: Application) -> None:
    app.batch(0, 40)
    app.leave_open()
    result = app.audit()
    assert result.clean
    assert len(result.entries) == 1


# --- the command ---


def test_the_command_prints_batches_and_says_clean(app: Application, capsys: pytest.CaptureFixture[str]) -> None:
    app.batch(0, 40)
    assert main(["audit", "--app", app.id, "--brokers", app.brokers]) == 0
    out = capsys.readouterr().out
    assert f"{app.source}-0[0..40)" in out
    assert f"{app.output}-0[0..39]" in out
    assert "clean: every batch starts where the one before ended, 40 records counted" in out


def test_the_command_ends_with_1_and_names_what_is_wrong(app: Application, capsys: pytest.CaptureFixture[str]) -> None:
    app.batch(0, 40)
    app.batch(41, 50)
    assert main(["audit", "--app", app.id, "--brokers", app.brokers, "--json"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["finding"]["kind"] for line in lines if "finding" in line] == ["gap"]
    assert lines[-1]["summary"]["clean"] is False
    assert [line["batch"]["rows"] for line in lines if "batch" in line] == [40, 9]


@pytest.mark.parametrize("cluster", ["semel"], indirect=True)
def test_rows_and_dead_letters_are_told_apart(app: Application, capsys: pytest.CaptureFixture[str]) -> None:
    app.batch(0, 40, dead_letters=3)
    app.batch(40, 50)
    assert main(["audit", "--app", app.id, "--brokers", app.brokers]) == 0
    assert "50 rows written, 3 of them dead letters" in capsys.readouterr().out
    assert main(["audit", "--app", app.id, "--brokers", app.brokers, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])["summary"]
    assert (summary["rows"], summary["dead_letters"]) == (50, 3)


@pytest.mark.parametrize("cluster", ["semel"], indirect=True)
def test_an_application_of_semel_process_is_said_to_have_no_ledger(
    app: Application, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", "--app", "a-loop", "--brokers", app.brokers]) == 2
    message = capsys.readouterr().err
    assert "semel.process keeps no ledger" in message
    assert "semel group describe a-loop" in message


@pytest.mark.parametrize("cluster", ["semel"], indirect=True)
def test_the_command_ends_with_2_when_it_cannot_look(app: Application, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--app", app.id, "--brokers", app.brokers]) == 2
    assert "has not committed a batch yet" in capsys.readouterr().err
    assert main(["audit", "--app", app.id[:-1] + "x", "--brokers", app.brokers]) == 2
    assert f"Did you mean '{app.id[:-1]}" in capsys.readouterr().err
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    assert main(["audit", "--app", app.id, "--brokers", f"127.0.0.1:{port}", "--timeout", "1"]) == 2
    assert "is a broker running there" in capsys.readouterr().err


@pytest.mark.parametrize("cluster", ["semel"], indirect=True)
def test_what_is_no_entry_is_named_with_its_offset(app: Application) -> None:
    app.batch(0, 40)
    app.plain(f"{app.id}.ledger", 1)
    with pytest.raises(CannotLookError, match=r"offset \d+ of the ledger is no entry"):
        app.audit()
