"""The commands in docs/operations.md give an application the rights that it needs, and no more: with each of them gone
the sink or the loop ends with an error that names the resource."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

import semel
from semel.local.apache_kafka import QUICK_JVM, ApacheKafka, tool_command
from semel.local.processes import free_ports
from tests.support.broker import ROOT
from tests.support.reading import create_topic, read_values
from tests.support.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.full, pytest.mark.kafka, pytest.mark.timeout(900)]

PASSWORD = "secret"
USERS = ("sink", "loop")
NOT_NEEDED = {  # in these runs: the ledger is there, and no row is bad
    ("payments.ledger", "CREATE"),
    ("payments.ledger", "DESCRIBE_CONFIGS"),  # a warning names it
    ("booked.dead", "WRITE"),
}
_numbers = count()


class Guarded(NamedTuple):
    """An Apache Kafka that lets its users do what ACLs say."""

    kafka: ApacheKafka
    address: str  # where users log in
    admin: AdminClient

    def client(self, user: str) -> dict[str, str]:
        return {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": user,
            "sasl.password": PASSWORD,
            "default.api.timeout.ms": "15000",
        }

    def rights(self, user: str) -> list[AclBinding]:
        wanted = AclBindingFilter(
            ResourceType.ANY,
            None,
            ResourcePatternType.ANY,
            f"User:{user}",
            None,
            AclOperation.ANY,
            AclPermissionType.ANY,
        )
        return list(self.admin.describe_acls(wanted).result(PATIENCE_S))

    def take(self, right: AclBinding) -> None:
        exact = AclBindingFilter(
            right.restype,
            right.name,
            right.resource_pattern_type,
            right.principal,
            right.host,
            right.operation,
            right.permission_type,
        )
        for future in self.admin.delete_acls([exact]).values():
            future.result(PATIENCE_S)
        until(lambda: right not in self.rights(right.principal.removeprefix("User:")), "the right is still there")

    def give(self, right: AclBinding) -> None:
        for future in self.admin.create_acls([right]).values():
            future.result(PATIENCE_S)
        until(lambda: right in self.rights(right.principal.removeprefix("User:")), "the right is not there")

    def fill(self, rows: int = 5) -> None:
        producer = Producer({"bootstrap.servers": self.kafka.bootstrap, "log_level": 0})
        for _ in range(rows):
            producer.produce("orders", str(next(_numbers)).encode(), key=b"k")
        assert producer.flush(PATIENCE_S) == 0


@pytest.fixture(scope="module")
def guarded(kafka_installation: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    kafka = ApacheKafka(tmp_path_factory.mktemp("guarded") / "node", jvm=QUICK_JVM)
    (port,) = free_ports(1)
    users = " ".join(f'user_{user}="{PASSWORD}"' for user in USERS)
    kafka.properties |= {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",  # of the listener without a login, where the tests administer
        "listeners": f"PLAINTEXT://127.0.0.1:{kafka.port},CONTROLLER://127.0.0.1:{kafka.controller_port},"
        f"SASL://127.0.0.1:{port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{kafka.port},SASL://127.0.0.1:{port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL:SASL_PLAINTEXT",
        "inter.broker.listener.name": "PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl.plain.sasl.jaas.config": (
            f"org.apache.kafka.common.security.plain.PlainLoginModule required {users};"
        ),
    }
    with kafka:
        for topic in ("orders", "booked", "booked.dead"):
            create_topic(kafka.bootstrap, topic, 1)
        yield Guarded(kafka, f"127.0.0.1:{port}", AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0}))


def paste(guarded: Guarded, user: str, number: int, folder: Path) -> None:
    """Runs a command of the page as it stands there."""
    page = (ROOT / "docs/operations.md").read_text().split("## Rights of an application")[1].split("\n## ")[0]
    command = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)[number]
    tool = folder / "kafka-acls"
    words = " ".join(f"'{word}'" for word in tool_command("org.apache.kafka.tools.AclCommand"))
    tool.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    tool.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    environment = {**os.environ, "BROKERS": guarded.kafka.bootstrap, "PRINCIPAL": f"User:{user}", "PATH": path}
    shell = ["sh", "-c", command]
    done = subprocess.run(shell, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def errors_without_each_right(guarded: Guarded, user: str, run: Callable[[], str]) -> dict[tuple[str, str], str]:
    """What a run ends with when one right is gone, by resource and operation."""
    found = {}
    for right in guarded.rights(user):
        guarded.fill()
        guarded.take(right)
        found[right.name, right.operation.name] = run()
        guarded.give(right)
    return found


def check(found: dict[tuple[str, str], str]) -> None:
    assert set(found) - NOT_NEEDED
    for (name, operation), said in found.items():
        if (name, operation) in NOT_NEEDED:
            assert said == "", f"{operation} on {name} is needed: {said}"
        else:
            assert "AUTHORIZATION_FAILED" in said, f"without {operation} on {name}: {said or 'it succeeded'}"
            assert name.rstrip("-") in said, said
            assert "(ACL)" in said, said


def test_the_sink_runs_with_exactly_the_rights_of_the_page(guarded: Guarded, session: Any, tmp_path: Path) -> None:
    client = guarded.client("sink")

    def run() -> str:
        try:
            sink = semel.sink(
                guarded.address,
                application_id="payments",
                topic="booked",
                dead_letter_topic="booked.dead",
                max_attempts=1,
                client=client,
            )
            options = {"kafka.bootstrap.servers": guarded.address, "subscribe": "orders", "startingOffsets": "earliest"}
            rows = session.readStream.format("semel").options(
                **options, applicationId="payments", **{f"kafka.{name}": value for name, value in client.items()}
            )
            writer = rows.load().selectExpr("key", "value").writeStream.foreachBatch(sink)
            query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
            query.awaitTermination(120)
        except Exception as error:
            return str(error)
        return ""

    guarded.fill()
    assert "AUTHORIZATION_FAILED" in run()
    paste(guarded, "sink", 0, tmp_path)
    assert run() == ""
    check(errors_without_each_right(guarded, "sink", run))
    assert run() == ""
    assert read_values(guarded.kafka.bootstrap, "booked") != []


def test_the_loop_runs_with_exactly_the_rights_of_the_page(guarded: Guarded, tmp_path: Path) -> None:
    client = guarded.client("loop")

    def run() -> str:
        try:
            semel.process(
                "orders",
                "booked",
                lambda record: record,
                application_id="payments",
                bootstrap_servers=guarded.address,
                dead_letter_topic="booked.dead",
                stop_at_end=True,
                consumer=client,
                producer=client,
            )
        except semel.KafkaError as error:
            return str(error)
        return ""

    guarded.fill()
    assert "AUTHORIZATION_FAILED" in run()
    paste(guarded, "loop", 1, tmp_path)
    assert run() == ""
    check(errors_without_each_right(guarded, "loop", run))
    assert run() == ""
