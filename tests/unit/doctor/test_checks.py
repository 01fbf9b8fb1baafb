"""Findings follow from a snapshot, with nothing else: also those that a single node cannot show."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import yaml

from semel.cli import available_commands, doctor, main, txn
from semel.cli.client_options import print_table
from semel.client.admin.calls import ClusterInfo, PartitionInfo, TopicInfo
from semel.client.admin.transactions import NO_TIMEOUT_MS, ProducerInfo, TransactionInfo
from semel.client.errors import KafkaError, error_of
from semel.client.immediate import run
from semel.client.metadata import BrokerAddress
from semel.client.timing import Deadline
from semel.client.types import TopicPartition
from semel.doctor import checks
from semel.doctor import snapshot as snapshots
from semel.doctor.checks import CHECKS, Limits, find
from semel.doctor.findings import AILMENTS, Certainty, with_options
from semel.doctor.snapshot import AUTHORIZER, OFFSETS_TOPIC, Bounds, CommitSeen, GroupSeen, Snapshot, _Reader
from semel.protocol.errors import ErrorCode
from semel.protocol.partitioning import coordinator_partition
from semel.spark.ledger import SUFFIX, LedgerEntry, Written

NOW_MS = 1_800_000_000_000
PLACE = TopicPartition("orders", 0)
ROOT = Path(__file__).parents[3]


def transaction(state: str = "Ongoing", age_s: float = 0, timeout_ms: int = 60_000, pid: int = 7) -> TransactionInfo:
    return TransactionInfo("app", state, pid, 3, timeout_ms, NOW_MS - int(age_s * 1000), [PLACE], 1)


def snapshot(*transactions: TransactionInfo, **fields: object) -> Snapshot:
    bounds = {PLACE: Bounds(0, 10, 30)}
    known = {each.transactional_id: each for each in transactions}
    return Snapshot(NOW_MS, **{"bounds": bounds, "transactions": known, **fields})  # type: ignore[arg-type]


def names(given: Snapshot, limits: Limits | None = None) -> list[str]:
    return [finding.name for finding in find(given, limits)]


def test_an_empty_cluster_has_nothing() -> None:
    assert find(Snapshot(NOW_MS)) == []


@pytest.mark.parametrize(
    ("age_s", "timeout_ms", "is_long"),
    [(47, 60_000, False), (49, 60_000, True), (899, 3_600_000, False), (901, 3_600_000, True)],
)
def test_a_transaction_is_long_by_its_own_timeout_or_after_fifteen_minutes(
    age_s: float, timeout_ms: int, is_long: bool
) -> None:
    assert names(snapshot(transaction(age_s=age_s, timeout_ms=timeout_ms))) == ["long-transaction"] * is_long


def test_a_prepared_transaction_is_not_called_long_and_is_aborted_by_force_only() -> None:
    (finding,) = find(snapshot(transaction(age_s=100_000, timeout_ms=NO_TIMEOUT_MS)))
    assert finding.name == "prepared-transaction"
    assert finding.certainty is Certainty.POSSIBLE
    assert finding.cure == "semel txn abort app --force"
    assert "holds back 20 offsets of orders-0" in finding.seen


def test_a_decision_without_markers_is_found() -> None:
    assert names(snapshot(transaction("PrepareCommit", age_s=61))) == ["unfinished-decision"]
    assert names(snapshot(transaction("PrepareCommit", age_s=59))) == []


@pytest.mark.parametrize("state", ["CompleteCommit", "PrepareCommit"])
def test_a_long_transaction_that_is_being_ended_is_looked_at_twice(state: str) -> None:
    """It is decided for a moment only, however long it was open."""

    class Calls:
        async def describe_transactions(self, *_: object, **__: object) -> list[TransactionInfo]:
            return [transaction(state, age_s=300)]

    seen = snapshot(transaction("PrepareCommit", age_s=300))
    reader = _Reader(Calls(), Deadline(10.0), seen)  # type: ignore[arg-type]
    run(reader._read_decisions_again())
    assert names(seen) == ["unfinished-decision"] * (state == "PrepareCommit")


@pytest.mark.parametrize(
    "fields",
    [
        {"transactions": {"app": transaction()}},  # its coordinator knows it
        {"known_later": {(7, PLACE)}},  # it did at the second look
        {"still_open": set()},  # it had ended at the second look
    ],
)
def test_what_only_looks_like_hanging_is_not_found(fields: dict[str, object]) -> None:
    opened = {"still_open": {(PLACE, 7, 3, 10)}}
    assert names(snapshot(**opened)) == ["hanging-transaction"]
    assert names(snapshot(**{**opened, **fields})) == []


def test_what_a_coordinator_cannot_say_is_not_aborted_for_certain() -> None:
    """A transaction whose coordinator is away, or whose id this user may not see, may be alive."""
    opened: dict[str, object] = {"still_open": {(PLACE, 7, 3, 10)}}
    (finding,) = find(snapshot(**opened, coordinators_away=2))
    assert (finding.certainty, finding.is_command) == (Certainty.POSSIBLE, False)
    assert "2 partitions of __transaction_state" in finding.seen
    (finding,) = find(snapshot(**opened, settings={"authorizer.class.name": "org.apache.Authorizer"}))
    assert finding.certainty is Certainty.LIKELY
    assert "may describe all transactional ids" in finding.seen


def test_a_ledger_of_a_topic_that_is_read_elsewhere_is_no_certain_misfit() -> None:
    entry = LedgerEntry(1, "q", "r", 0, [None], ['{"orders": {"0": 100}}'])
    (finding,) = find(snapshot(ledgers={f"app{SUFFIX}": [entry]}))
    assert (finding.name, finding.certainty) == ("ledger-misfit", Certainty.POSSIBLE)
    assert "another cluster" in finding.seen


def test_what_has_no_leader_is_neither_missing_nor_waited_for() -> None:
    """A broker is down: what it led is there, and nobody responds for it."""
    lost = TopicPartition("out", 0)

    class Calls:
        cluster = None

        async def describe_topics(self, timeout_ms: float) -> list[TopicInfo]:
            leaders = {"orders": 1, "out": -1}
            return [TopicInfo(name, "", False, [PartitionInfo(0, at, [1], [1], 0, 0)]) for name, at in leaders.items()]

        async def offsets_of_existing(self, places: list, *_: object) -> dict:
            assert lost not in places
            return dict.fromkeys(places, 5)

    seen = Snapshot(NOW_MS)
    seen.ledgers = {f"app{SUFFIX}": [LedgerEntry(1, "q", "r", 0, [None], [None], [Written("out", 0, 5, 0, 4)])]}
    seen.groups = {"g": GroupSeen("Empty", {lost: 3}, [])}
    reader = _Reader(Calls(), Deadline(10.0), seen)  # type: ignore[arg-type]
    run(reader._read_bounds())
    run(reader._read_ends_again())
    assert find(seen) == []
    assert seen.not_looked_at == ["1 partitions have no leader"]
    (finding,) = find(snapshot(ledgers=seen.ledgers))
    assert (finding.name, finding.certainty) == ("ledger-misfit", Certainty.CERTAIN)
    (finding,) = find(snapshot(ledgers=seen.ledgers, settings={AUTHORIZER: "org.apache.Authorizer"}))
    assert finding.certainty is Certainty.POSSIBLE


def test_pending_offsets_are_looked_for_where_their_group_is_also_without_all_leaders() -> None:
    """Otherwise a transaction that has nothing to do with the group would be named, with the command that aborts it."""
    places = [TopicPartition(OFFSETS_TOPIC, index) for index in range(50)]
    here, lost = places[:33], places[33:]
    kept_in, wrong = places[coordinator_partition("g", len(places))], places[coordinator_partition("g", len(here))]
    assert wrong != kept_in
    state: dict[str, object] = {
        "bounds": dict.fromkeys(here, Bounds(0, 10, 30)),
        "leaderless": set(lost),
        "groups": {"g": GroupSeen("Stable", {}, [PLACE])},
    }

    def found(holder: TopicPartition) -> list[str]:
        one = msgspec.structs.replace(transaction(age_s=300), partitions=[holder])
        return sorted(names(snapshot(one, **state)))

    assert found(kept_in) == ["long-transaction", "unstable-offsets"]
    assert found(wrong) == ["long-transaction"]


def test_settings_that_this_user_may_not_read_may_name_an_authorizer() -> None:
    class Calls:
        cluster = None

        async def describe_configs(self, **_: object) -> None:
            raise error_of(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "the broker")

    seen = snapshot(still_open={(PLACE, 7, 3, 10)})
    reader = _Reader(Calls(), Deadline(10.0), seen)  # type: ignore[arg-type]
    reader._cluster = ClusterInfo("", 1, [BrokerAddress(1, "here", 1)], {})
    with pytest.raises(KafkaError):
        run(reader._read_settings())
    (finding,) = find(seen)
    assert (finding.name, finding.certainty) == ("hanging-transaction", Certainty.LIKELY)


def test_groups_that_are_too_many_to_look_at_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Calls:
        cluster = None

        async def committed_of_all(self, timeout_ms: float) -> dict:
            return {name: SimpleNamespace(state="Empty", committed={}, unstable=[]) for name in ("a", "b", "c")}

    monkeypatch.setattr(snapshots, "GROUPS_AT_MOST", 2)
    seen = Snapshot(NOW_MS)
    run(_Reader(Calls(), Deadline(10.0), seen)._read_groups())  # type: ignore[arg-type]
    assert (len(seen.groups), seen.not_looked_at) == (2, ["1 of 3 groups"])


@pytest.mark.parametrize("name", ["-J", "--force", "-x y", "-a -- 'b"])
def test_the_cure_for_a_name_that_looks_like_an_option_can_be_pasted(name: str) -> None:
    one = transaction(age_s=1000, timeout_ms=NO_TIMEOUT_MS)
    (finding,) = find(snapshot(type(one)(name, *[getattr(one, field) for field in one.__struct_fields__[1:]])))
    words = shlex.split(with_options(finding.cure, " -b here:1"))
    parser = argparse.ArgumentParser()
    txn.configure(parser)
    args = parser.parse_args(words[2:])
    assert (args.id, args.brokers, args.force) == (name, "here:1", True)
    assert shlex.split(checks.command_line("audit", "--app", checks.Name(name))) == ["semel", "audit", f"--app={name}"]


@pytest.mark.parametrize("name", ["a -- b", "it's -- \"b\" -- 'c"])
def test_the_options_of_a_cure_do_not_get_into_a_name(name: str) -> None:
    cure = checks.command_line("txn", "abort", checks.Name(name), "--force")
    assert shlex.split(with_options(cure, " -b here:1")) == ["semel", "txn", "abort", name, "--force", "-b", "here:1"]


@pytest.mark.parametrize("name", ["a\n'b'", "\u202epuorg \\", "\x1b[2J\x80", "\U000e0041x"])
def test_the_cure_for_a_name_with_hidden_characters_shows_them_and_can_be_pasted(name: str) -> None:
    line = checks.command_line("txn", "abort", checks.Name(name))
    assert line.isprintable()
    said = subprocess.run(["bash", "-c", f"printf %s {line.removeprefix('semel txn abort ')}"], stdout=-1, check=True)
    assert said.stdout == name.encode()


def test_the_password_of_a_connection_is_not_in_the_cure() -> None:
    given = [f"{name}=hunter2" for name in ("sasl.password", "ssl.key.password", "sasl.jaas.config")]
    args = argparse.Namespace(brokers="here:1", options=[*given, "security.protocol=SASL_SSL"])
    (finding,) = find(snapshot(transaction(age_s=1000)))
    cure = doctor._complete(finding, args)
    assert "hunter2" not in cure
    assert "-X security.protocol=SASL_SSL" in cure


def test_a_name_cannot_write_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    one = transaction(age_s=1000)
    evil = type(one)("\x1b[2J\x1b]0;owned\x07\r\nok", *[getattr(one, name) for name in one.__struct_fields__[1:]])
    (finding,) = find(snapshot(evil))
    doctor._print(finding, finding.cure)
    print_table(("id",), [(evil.transactional_id,)])
    shown = capsys.readouterr().out
    assert all(line.isprintable() for line in shown.split("\n"))
    assert "\\x1b[2J" in shown


def test_a_name_with_shell_characters_is_quoted_in_the_cure() -> None:
    evil = transaction(age_s=1000)
    evil = type(evil)("a'b; rm -rf /", *[getattr(evil, name) for name in evil.__struct_fields__[1:]])
    (finding,) = find(snapshot(evil))
    assert shlex.split(finding.cure) == ["semel", "txn", "abort", "a'b; rm -rf /"]


def test_epochs_tell_nothing_about_transactions_of_the_second_generation() -> None:
    worn = {PLACE: [ProducerInfo(7, 32_000, 0, 0, 0, -1)]}
    assert names(snapshot(transaction(), producers=worn)) == []
    assert names(snapshot(transaction(), producers=worn, transaction_version=1)) == ["worn-out-epoch"]
    assert names(snapshot(producers=worn)) == ["worn-out-epoch"], "a producer without transactions"


def test_an_operator_who_moves_a_group_once_is_not_an_automatic_commit() -> None:
    kinds = [True, True, False, False]
    commits = [CommitSeen("g", "orders", 0, n, kind) for n, kind in enumerate(kinds)]
    assert names(snapshot(commits=commits)) == []
    commits.append(CommitSeen("g", "orders", 0, 9, True))
    assert names(snapshot(commits=commits)) == ["autocommit-beside-transactions"]


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("app-1f0c9a4e-6a3c-4f7e-9b1d-5d5d7c9f0e11", "app-*"),
        ("shouter-0a1b2c3d4e5f60718293a4b5c6d7e8f9", "shouter-*"),
        ("stream-3-7", "stream-*-*"),
        ("facade", "facade"),
    ],
)
def test_the_changing_part_of_a_name_is_recognised(name: str, pattern: str) -> None:
    assert checks._pattern(name) == pattern


@pytest.mark.parametrize(
    ("ids", "is_leak"),
    [
        ([f"worker-{number}" for number in range(500)], False),
        ([f"eu2-task-{a}_{b}" for a in range(20) for b in range(1, 26)], False),
        ([f"worker-{number}" for number in range(1_500)], True),  # one for each start
        ([f"batch-{1_700_000_000 + 17 * number}" for number in range(300)], True),
        ([f"app-{number:08x}-6a3c-4f7e-9b1d-5d5d7c9f0e11" for number in range(300)], True),
    ],
    ids=["a pool", "tasks", "a counter", "times", "uuids"],
)
def test_instances_that_are_numbered_are_no_leak(ids: list[str], is_leak: bool) -> None:
    assert names(snapshot(ids=ids)) == ["leaking-ids"] * is_leak


def test_risks_of_the_settings_are_findings() -> None:
    text = "topic '__transaction_state' has 1 replica on a cluster of 3 brokers: it is lost. Add replicas"
    (finding,) = find(snapshot(risks=[text]))
    assert (finding.name, finding.where, finding.cure) == ("at-risk", "__transaction_state", "Add replicas")


# --- the table, the commands and the alert rules ---


def test_every_name_in_the_table_is_looked_for_and_the_other_way_round() -> None:
    text = Path(checks.__file__).read_text(encoding="utf-8")
    assert {name for name in AILMENTS if f'"{name}"' in text} == set(AILMENTS)
    assert len(CHECKS) == len(AILMENTS)


def test_every_command_that_a_cure_names_exists() -> None:
    text = Path(checks.__file__).read_text(encoding="utf-8")
    import re

    commands = set(re.findall(r'command_line\(\s*"(\w+)"', text))
    assert commands >= {"txn", "group", "audit"}
    assert commands <= set(available_commands())
    for command in commands:
        import_module(f"semel.cli.{command}")


def test_alert_rules_name_findings_that_exist() -> None:
    rules = yaml.safe_load((ROOT / "observability" / "alert-rules.yml").read_text(encoding="utf-8"))
    named = {rule["labels"]["finding"] for group in rules["groups"] for rule in group["rules"]}
    assert named - {"none"} <= set(AILMENTS)


# --- this machine ---


def test_a_java_home_without_java_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert main(["doctor", "--environment", "-b", "127.0.0.1:1"]) == 3
    assert f"!!  java: JAVA_HOME is {tmp_path}, and there is no bin/java in it. " in capsys.readouterr().out


def test_the_environment_is_described_and_a_missing_broker_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--environment", "-b", "127.0.0.1:1"])
    shown = capsys.readouterr().out
    assert code == 3
    for name in ("python", "semel", "java", "disk", "open files", "broker"):
        assert f" {name}: " in shown
    assert "!!  broker: 127.0.0.1:1 cannot be reached" in shown


@pytest.mark.parametrize(
    ("said", "is_well"),
    [
        ('openjdk version "17.0.15" 2025-04-15', True),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "21" 2023-09-19', True),
        ('openjdk version "1.8.0_392"', False),
        ("Picked up JAVA_TOOL_OPTIONS: -Xmx1g", False),
    ],
)
def test_java_is_known_by_its_version(
    said: str, is_well: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{said}\nEND\n", encoding="utf-8")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    main(["doctor", "--environment", "-b", "127.0.0.1:1", "--json"])
    facts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (fact,) = [fact for fact in facts if fact["name"] == "java"]
    assert (fact["is_well"], fact["cure"] == "") == (is_well, is_well)
    assert said.splitlines()[-1] in fact["seen"]


def test_an_address_that_is_none_is_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--environment", "-b", "localhost"]) == 3
    assert "!!  broker: bootstrap.servers has 'localhost'; expected host:port" in capsys.readouterr().out
    assert main(["doctor", "--environment", "-b", "two..dots:9092"]) == 3
    assert "!!  broker: two..dots:9092 cannot be reached" in capsys.readouterr().out


def test_the_names_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--list"]) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == list(AILMENTS)
