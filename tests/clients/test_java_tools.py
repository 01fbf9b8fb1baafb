"""Apache Kafka's own command line tools work on semel's broker as they do on Kafka's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from semel.local.apache_kafka import java_tool
from semel.local.brokers import SemelBroker
from tests.support.broker import Cluster

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("kafka_installation")]


@pytest.fixture
def cluster(shared_semel_broker: SemelBroker) -> Cluster:
    return Cluster("semel", shared_semel_broker)


def tool(cluster: Cluster, name: str, *arguments: str, stdin: str | None = None) -> str:
    return java_tool(name, "--bootstrap-server", cluster.bootstrap, *arguments, stdin=stdin).stdout


def test_topic_command_creates_describes_alters_and_deletes(cluster: Cluster) -> None:
    topic = cluster.unique("tools")
    tool(cluster, "TopicCommand", "--create", "--topic", topic, "--partitions", "2", "--config", "retention.ms=60000")
    described = tool(cluster, "TopicCommand", "--describe", "--topic", topic)
    assert "PartitionCount: 2" in described
    assert "ReplicationFactor: 1" in described
    assert "retention.ms=60000" in described
    assert len(re.findall(r"Leader: 1\s+Replicas: 1\s+Isr: 1", described)) == 2
    tool(cluster, "TopicCommand", "--alter", "--topic", topic, "--partitions", "3")
    assert "PartitionCount: 3" in tool(cluster, "TopicCommand", "--describe", "--topic", topic)
    tool(cluster, "TopicCommand", "--delete", "--topic", topic)
    assert topic not in tool(cluster, "TopicCommand", "--list").split()


def test_console_producer_to_console_consumer(cluster: Cluster) -> None:
    topic = cluster.unique("console")
    lines = [f"line {number}" for number in range(50)]
    tool(cluster, "ConsoleProducer", "--topic", topic, stdin="\n".join(lines) + "\n")
    shown = tool(
        cluster,
        "ConsoleConsumer",
        "--topic",
        topic,
        "--from-beginning",
        "--max-messages",
        "50",
        "--timeout-ms",
        "20000",
    )
    assert shown.splitlines() == lines


def test_verifiable_producer_to_verifiable_consumer(cluster: Cluster) -> None:
    topic = cluster.unique("verifiable")
    produced = tool(cluster, "VerifiableProducer", "--topic", topic, "--max-messages", "500", "--acks", "-1")
    events = [json.loads(line) for line in produced.splitlines()]
    assert sum(event["name"] == "producer_send_success" for event in events) == 500
    group = cluster.unique("group")
    consumed = tool(
        cluster, "VerifiableConsumer", "--topic", topic, "--group-id", group, "--max-messages", "500",
        "--reset-policy", "earliest",
    )  # fmt: skip
    consumed_events = [json.loads(line) for line in consumed.splitlines()]
    assert sum(event["count"] for event in consumed_events if event["name"] == "records_consumed") == 500
    assert all(event["success"] for event in consumed_events if event["name"] == "offsets_committed")


def test_performance_tools(cluster: Cluster) -> None:
    topic = cluster.unique("performance")
    produced = tool(
        cluster, "ProducerPerformance", "--topic", topic, "--num-records", "20000", "--record-size", "100",
        "--throughput", "-1",
    )  # fmt: skip
    assert "20000 records sent" in produced
    consumed = tool(cluster, "ConsumerPerformance", "--topic", topic, "--num-records", "20000")
    assert re.search(r", 20000, ", consumed)


def test_offset_shell_and_config_command(cluster: Cluster) -> None:
    topic = cluster.unique("shell")
    tool(cluster, "ConsoleProducer", "--topic", topic, stdin="a\nb\nc\n")
    assert tool(cluster, "GetOffsetShell", "--topic", topic).strip() == f"{topic}:0:3"
    assert tool(cluster, "GetOffsetShell", "--topic", topic, "--time", "earliest").strip() == f"{topic}:0:0"
    entity = ("--entity-type", "topics", "--entity-name", topic)
    tool(cluster, "ConfigCommand", "--alter", *entity, "--add-config", "max.message.bytes=2000")
    assert "max.message.bytes=2000" in tool(cluster, "ConfigCommand", "--describe", *entity)
    tool(cluster, "ConfigCommand", "--alter", *entity, "--delete-config", "max.message.bytes")
    assert "max.message.bytes=2000" not in tool(cluster, "ConfigCommand", "--describe", *entity)
    broker = tool(cluster, "ConfigCommand", "--describe", "--all", "--entity-type", "brokers", "--entity-name", "1")
    assert "num.partitions=1" in broker


def test_log_dirs_delete_records_and_leader_election(cluster: Cluster, tmp_path: Path) -> None:
    topic = cluster.unique("records")
    tool(cluster, "ConsoleProducer", "--topic", topic, stdin="a\nb\nc\n")
    dirs = tool(cluster, "org.apache.kafka.tools.LogDirsCommand", "--describe", "--topic-list", topic)
    (size,) = re.findall(rf'"partition":"{topic}-0","size":(\d+)', dirs)
    assert int(size) > 60
    offsets = tmp_path / "offsets.json"
    offsets.write_text(json.dumps({"partitions": [{"topic": topic, "partition": 0, "offset": 2}], "version": 1}))
    done = tool(cluster, "org.apache.kafka.tools.DeleteRecordsCommand", "--offset-json-file", str(offsets))
    assert "low_watermark: 2" in done
    assert tool(cluster, "GetOffsetShell", "--topic", topic, "--time", "-2").strip() == f"{topic}:0:2"
    elected = tool(
        cluster, "org.apache.kafka.tools.LeaderElectionCommand", "--election-type", "preferred", "--topic", topic,
        "--partition", "0",
    )  # fmt: skip
    assert "already elected" in elected


def test_versions_and_features_are_shown(cluster: Cluster) -> None:
    versions = tool(cluster, "org.apache.kafka.tools.BrokerApiVersionsCommand")
    assert "Produce(0): 0 to 13 [usable: 13]" in versions
    assert re.search(
        r"Feature: transaction.version.*FinalizedVersionLevel: 2", tool(cluster, "FeatureCommand", "describe")
    )
