"""The other tests in this folder stand on this: Apache Kafka starts, survives kill -9, and its tools run."""

from __future__ import annotations

import pytest

from semel.local.apache_kafka import ApacheKafka, ToolFailed, java_tool, quick_jvm


def test_kafkas_tools_write_and_read_through_a_shared_node(apache_kafka: ApacheKafka) -> None:
    apache_kafka.tool("TopicCommand", "--create", "--topic", "tools", "--partitions", "1")
    apache_kafka.tool("ConsoleProducer", "--topic", "tools", stdin="one\ntwo\n")
    read = apache_kafka.tool("ConsoleConsumer", "--topic", "tools", "--from-beginning", "--max-messages", "2")
    assert read.split() == ["one", "two"]


def test_a_tool_that_fails_says_why(apache_kafka: ApacheKafka) -> None:
    with pytest.raises(ToolFailed, match="does not exist"):
        apache_kafka.tool("TopicCommand", "--describe", "--topic", "never-created")
    assert java_tool("TopicCommand", "--nonsense", check=False).returncode != 0


@pytest.mark.full
def test_a_killed_classic_protocol_node_keeps_port_data_and_features(tmp_path) -> None:
    with ApacheKafka(tmp_path / "node", transaction_version=1, fsync="commit", jvm=quick_jvm()) as kafka:
        address = kafka.bootstrap
        kafka.tool("ConsoleProducer", "--topic", "kept", stdin="survivor\n")
        kafka.kill()
        kafka.restart()
        assert kafka.bootstrap == address
        assert "survivor" in kafka.tool("ConsoleConsumer", "--topic", "kept", "--from-beginning", "--max-messages", "1")
        features = kafka.tool("FeatureCommand", "describe").splitlines()
        (transactions,) = [line for line in features if "transaction.version" in line]
        assert "FinalizedVersionLevel: 1" in transactions
