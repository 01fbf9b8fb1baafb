"""Settings have Kafka's names, types and defaults; those without effect are kept, unknown ones refused by name."""

from __future__ import annotations

import dataclasses

import pytest

from semel.broker import resource_settings, settings
from semel.broker.runner import advertised_address, listen_address
from semel.broker.settings import MEANINGLESS, TABLE, SettingError, Settings, as_text, read_properties, row_of
from semel.storage.config import LogConfig


def test_every_default_can_be_written_and_read_back() -> None:
    for name, row in TABLE.items():
        if row.default is not None:
            text = as_text(row.default)
            assert text is not None
            assert row.parse(text) == row.default, name


def test_a_setting_with_a_reason_to_have_no_effect_has_none() -> None:
    assert {name for name in MEANINGLESS if name in TABLE and not TABLE[name].no_effect} == set()
    assert sum(bool(row.no_effect) for row in TABLE.values()) > 200


STOCK_SERVER_PROPERTIES = """
process.roles=broker,controller
node.id=1
controller.quorum.bootstrap.servers=localhost:9093
listeners=PLAINTEXT://:9092,CONTROLLER://:9093
inter.broker.listener.name=PLAINTEXT
advertised.listeners=PLAINTEXT://localhost:9092,CONTROLLER://localhost:9093
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SSL:SSL,SASL_PLAINTEXT:SASL_PLAINTEXT
num.network.threads=3
num.io.threads=8
socket.send.buffer.bytes=102400
socket.receive.buffer.bytes=102400
socket.request.max.bytes=104857600
log.dirs=/tmp/kraft-combined-logs
num.partitions=1
num.recovery.threads.per.data.dir=1
offsets.topic.replication.factor=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
log.retention.hours=168
log.segment.bytes=1073741824
log.retention.check.interval.ms=300000
"""


def test_a_stock_server_properties_is_taken_and_what_has_no_effect_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = read_properties(STOCK_SERVER_PROPERTIES.splitlines())
    settings = Settings(given)
    settings.accept([row_of("num.io.threads")])
    assert caplog.messages.count("setting num.io.threads has no effect: the broker is one event loop") == 1
    assert not any("log.retention" in message for message in caplog.messages)
    assert settings["num.io.threads"] == 8
    assert listen_address(settings) == ("", 9092)
    assert advertised_address(settings, "0.0.0.0", 9092) == ("localhost", 9092)
    with pytest.raises(SettingError, match=r"process\.roles has no effect here: .*without --strict"):
        Settings(given, strict=True)


def test_a_listener_with_a_security_protocol_is_refused_under_any_name() -> None:
    settings = Settings({"listeners": "OUT://:9092", "listener.security.protocol.map": "OUT:SASL_SSL"})
    with pytest.raises(SettingError, match="there is no security layer"):
        listen_address(settings)


def test_given_settings_win_over_defaults_and_altered_ones_over_both() -> None:
    settings = Settings({"num.partitions": "4", "log.retention.ms": "100"})
    assert settings["num.partitions"] == 4
    assert settings["auto.create.topics.enable"] is True
    settings.replace_altered({"log.retention.ms": "200"}, for_cluster=True)
    assert settings["log.retention.ms"] == 200
    settings.replace_altered({"log.retention.ms": "300"})
    assert settings["log.retention.ms"] == 300
    settings.replace_altered({})
    settings.replace_altered({}, for_cluster=True)
    assert settings["log.retention.ms"] == 100


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("num.partition", "1", "did you mean num.partitions?"),
        ("zookeeper.connect", "x", "zookeeper.connect means nothing to this broker: there is no ZooKeeper"),
        ("num.io.threads", "x", "Not a number of type INT"),
        ("authorizer.class.name", "x", "no security layer"),  # it would promise what nobody keeps
        ("num.partitions", "many", "Invalid value many for configuration num.partitions: Not a number of type INT"),
        ("num.partitions", "1_000", "Not a number of type INT"),
        ("log.cleaner.min.cleanable.ratio", "nan", "Not a number of type DOUBLE"),
        ("num.partitions", "0", "Value must be at least 1"),
        ("auto.create.topics.enable", "yes", "either true or false"),
        ("fsync", "never", "must be one of: commit, os"),
        ("log.cleanup.policy", "burn", "must be one of: compact, delete"),
        ("log.cleanup.policy", "compact,burn", "Invalid value burn for configuration log.cleanup.policy: String must"),
        ("default.replication.factor", "3", "no more than 1"),
    ],
)
def test_wrong_settings_are_refused_by_name(name: str, text: str, message: str) -> None:
    with pytest.raises(SettingError, match=message.replace("?", r"\?")):
        Settings({name: text})


def test_only_dynamic_settings_may_be_altered() -> None:
    settings = Settings()
    with pytest.raises(SettingError, match=r"node\.id"):
        settings.replace_altered({"node.id": "5"})


def test_retention_and_rolling_take_the_finest_unit_that_was_given() -> None:
    def retention_ms(**given: str) -> int:
        named = {name.replace("_", "."): text for name, text in given.items()}
        return resource_settings.base_config(Settings(named)).retention_ms

    assert retention_ms() == 7 * 24 * 3_600_000
    assert retention_ms(log_retention_hours="2") == 2 * 3_600_000
    assert retention_ms(log_retention_hours="2", log_retention_minutes="3") == 3 * 60_000
    assert retention_ms(log_retention_minutes="3", log_retention_ms="4") == 4
    assert retention_ms(log_retention_hours="-1") == -1


def test_every_setting_of_the_storage_can_be_set_for_a_topic_and_for_the_broker() -> None:
    fields = {field.name.replace("_", ".") for field in dataclasses.fields(LogConfig)} - {"producer.id.expiration.ms"}
    assert fields == set(resource_settings.NAMES) - set(resource_settings.BROKER_SIDE)
    for name in set(resource_settings.NAMES) - set(resource_settings.NO_EFFECT):
        assert row_of(resource_settings.SYNONYMS[name][0][0])


@pytest.mark.parametrize(
    ("name", "message"),
    [("remote.storage.enable", "there is no tiered storage"), ("nope", "Unknown topic config name: nope")],
)
def test_wrong_topic_settings_are_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        resource_settings.validate({name: "true"})


def test_topic_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(SettingError, match=r"min\.compaction\.lag\.ms \(10\) > max\.compaction\.lag\.ms \(5\)"):
        resource_settings.validate({"min.compaction.lag.ms": "10", "max.compaction.lag.ms": "5"})


def test_properties_files_have_comments_and_equals_signs() -> None:
    lines = ["# comment", "", "num.partitions = 3", "advertised.listeners=PLAINTEXT://a=b:1", "! other comment"]
    assert read_properties(lines) == {"num.partitions": "3", "advertised.listeners": "PLAINTEXT://a=b:1"}
    with pytest.raises(SettingError, match=r"line 1 is 'num.partitions 3'; expected name=value"):
        read_properties(["num.partitions 3"])


def test_topic_settings_become_the_storages() -> None:
    texts = {"segment.bytes": "2097152", "cleanup.policy": "compact, delete", "retention.ms": "-1"}
    config = resource_settings.with_overrides(LogConfig(), texts)
    assert (config.segment_bytes, config.compact, config.delete, config.retention_ms) == (2097152, True, True, -1)
    assert resource_settings.base_config(Settings()) == LogConfig()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("segment.bytes", "1000"),
        ("segment.bytes", "many"),
        ("segment.ms", "0"),
        ("retention.ms", "-2"),
        ("retention.bytes", str(2**63)),
        ("cleanup.policy", "shred"),
        ("message.timestamp.type", "createtime"),
        ("min.cleanable.dirty.ratio", "1.5"),
        ("no.such.setting", "1"),
    ],
)
def test_a_bad_topic_setting_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(SettingError, match=name):
        resource_settings.validate({name: text})


def test_no_setting_that_has_an_effect_is_listed_among_those_without() -> None:
    with_effect = {
        row.name
        for row in (*settings._GENERAL, *settings._SOCKET, *settings._LOG, *settings._GROUP, *settings._TRANSACTION)
    }
    assert not with_effect & {row.name for row in settings._without_effect()}
