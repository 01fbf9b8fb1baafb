"""Settings have Kafka's names, types and defaults; what is unknown or means nothing is refused by name."""

from __future__ import annotations

import pytest

from semel.broker import topic_configs
from semel.broker.settings import MEANINGLESS, TABLE, SettingError, Settings, as_text, read_properties, row_of
from semel.storage.config import SETTINGS as STORAGE_SETTINGS


def test_every_default_can_be_written_and_read_back() -> None:
    for name, row in TABLE.items():
        if row.default is not None:
            text = as_text(row.default)
            assert text is not None
            assert row.parse(text) == row.default, name


def test_a_setting_is_either_known_or_meaningless() -> None:
    assert not set(TABLE) & set(MEANINGLESS)


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
        ("num.io.threads", "8", "num.io.threads means nothing"),
        ("ssl.keystore.location", "x", "no security layer"),
        ("num.partitions", "many", "Invalid value many for configuration num.partitions: Not a number of type INT"),
        ("num.partitions", "1_000", "Not a number of type INT"),
        ("log.cleaner.min.cleanable.ratio", "nan", "Not a number of type DOUBLE"),
        ("num.partitions", "0", "Value must be at least 1"),
        ("auto.create.topics.enable", "yes", "either true or false"),
        ("fsync", "never", "must be one of: commit, os"),
        ("log.cleanup.policy", "burn", "must be one of: compact, delete"),
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
        return topic_configs.base_config(Settings(named)).retention_ms

    assert retention_ms() == 7 * 24 * 3_600_000
    assert retention_ms(log_retention_hours="2") == 2 * 3_600_000
    assert retention_ms(log_retention_hours="2", log_retention_minutes="3") == 3 * 60_000
    assert retention_ms(log_retention_minutes="3", log_retention_ms="4") == 4
    assert retention_ms(log_retention_hours="-1") == -1


def test_every_setting_of_the_storage_can_be_set_for_a_topic_and_for_the_broker() -> None:
    assert set(STORAGE_SETTINGS) <= set(topic_configs.NAMES)
    for name in topic_configs.NAMES:
        assert row_of(topic_configs.SYNONYMS[name][0][0])


@pytest.mark.parametrize(
    ("name", "message"),
    [("remote.storage.enable", "there is no tiered storage"), ("nope", "Unknown topic config name: nope")],
)
def test_wrong_topic_settings_are_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        topic_configs.validate({name: "true"})


def test_topic_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(SettingError, match=r"min\.compaction\.lag\.ms \(10\) > max\.compaction\.lag\.ms \(5\)"):
        topic_configs.validate({"min.compaction.lag.ms": "10", "max.compaction.lag.ms": "5"})


def test_properties_files_have_comments_and_equals_signs() -> None:
    lines = ["# comment", "", "num.partitions = 3", "advertised.listeners=PLAINTEXT://a=b:1", "! other comment"]
    assert read_properties(lines) == {"num.partitions": "3", "advertised.listeners": "PLAINTEXT://a=b:1"}
    with pytest.raises(SettingError, match=r"line 1 is 'num.partitions 3'; expected name=value"):
        read_properties(["num.partitions 3"])
