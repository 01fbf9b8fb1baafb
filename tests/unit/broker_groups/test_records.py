"""Records of `__consumer_offsets`, byte for byte as Apache Kafka 4.3.1 wrote them."""

from __future__ import annotations

import pytest

from semel.broker.groups.classic_group import Group, GroupState
from semel.broker.groups.records import (
    CommittedOffset,
    GroupRecord,
    OffsetKey,
    OffsetRecord,
    encode_group,
    encode_offset,
    read_record,
)
from semel.protocol.errors import UnsupportedVersionError
from semel.protocol.messages.internal_topics import GROUP_METADATA_VALUE, OFFSET_COMMIT_VALUE, OffsetCommitValue

TOPIC_ID = bytes.fromhex("513893d54aa74398b5c828211ddf5774")
COMMIT_TIME_MS = 0x01A1DDD4C4B2
KEY = b"\0\1\0\7simple2\0\2t1\0\0\0\0"
VALUE = (
    b"\0\4\0\0\0\0\0\0\0\5\0\0\0\3\5meta" + COMMIT_TIME_MS.to_bytes(8, "big") + b"\1\0\x10" + TOPIC_ID
)  # version 4, the topic's id as a tagged field
VALUE_WITH_EXPIRY = (
    b"\0\1\0\0\0\0\0\0\0\5\0\4meta" + (0x01A1DDD4C4AE).to_bytes(8, "big") + (0x01A1DDD4C896).to_bytes(8, "big")
)
EMPTY_GROUP = b"\0\3\0\0\0\0\0\0\xff\xff\xff\xff" + (0x01A1DDD4C482).to_bytes(8, "big") + b"\0\0\0\0"
EMPTIED_GROUP = b"\0\3\0\x08consumer\0\0\0\2\xff\xff\xff\xff" + (0x01A1DDD4C51C).to_bytes(8, "big") + b"\0\0\0\0"


def test_offset_is_written_as_kafka_writes_it() -> None:
    committed = CommittedOffset(5, 3, "meta", COMMIT_TIME_MS, topic_id=TOPIC_ID)
    assert encode_offset(OffsetKey("simple2", "t1", 0), committed) == (KEY, VALUE)


def test_offset_with_a_time_of_expiry_is_written_as_kafka_writes_it() -> None:
    committed = CommittedOffset(5, 3, "meta", 0x01A1DDD4C4AE, 0x01A1DDD4C896, TOPIC_ID)
    assert encode_offset(OffsetKey("simple", "t1", 0), committed)[1] == VALUE_WITH_EXPIRY


def test_offset_is_read_back() -> None:
    entry = read_record(KEY, VALUE)
    assert isinstance(entry, OffsetRecord)
    assert entry.slot == OffsetKey("simple2", "t1", 0)
    assert entry.value is not None
    assert entry.value == CommittedOffset(5, 3, "meta", COMMIT_TIME_MS, -1, TOPIC_ID)


@pytest.mark.parametrize("version", range(5))
def test_offsets_of_every_version_are_read(version: int) -> None:
    value = version.to_bytes(2, "big") + OFFSET_COMMIT_VALUE.encode(OffsetCommitValue(offset=9, metadata="m"), version)
    entry = read_record(KEY, value)
    assert isinstance(entry, OffsetRecord)
    assert entry.value is not None
    assert (entry.value.offset, entry.value.metadata) == (9, "m")


def test_version_of_the_future_is_refused() -> None:
    with pytest.raises(UnsupportedVersionError):
        read_record(KEY, b"\0\x63" + VALUE[2:])


def test_new_group_is_written_as_kafka_writes_it() -> None:
    group = Group("g1", 0x01A1DDD4C482)
    assert encode_group("g1", group.to_record()) == (b"\0\2\0\2g1", EMPTY_GROUP)


def test_group_that_became_empty_is_written_as_kafka_writes_it() -> None:
    group = Group("g1", 0x01A1DDD4C51C)
    group.generation, group.protocol_type = 2, "consumer"
    assert encode_group("g1", group.to_record()) == (b"\0\2\0\2g1", EMPTIED_GROUP)


def test_tombstones_have_the_key_alone() -> None:
    assert encode_offset(OffsetKey("simple2", "t1", 0), None) == (KEY, None)
    assert encode_group("g1", None) == (b"\0\2\0\2g1", None)


@pytest.mark.parametrize("version", range(5))
def test_groups_of_every_version_are_read(version: int) -> None:
    entry = read_record(b"\0\2\0\2g1", version.to_bytes(2, "big") + _stable_group(version))
    assert isinstance(entry, GroupRecord)
    assert entry.value is not None
    group = Group.from_record(entry.group, entry.value)
    assert (group.state, group.generation, group.leader, list(group.members)) == (GroupState.STABLE, 3, "m", ["m"])
    member = group.members["m"]
    assert (member.session_timeout_ms, member.assignment, member.protocols) == (6000, b"a", {"range": b"s"})
    assert member.rebalance_timeout_ms == (6000 if version == 0 else 9000)


def _stable_group(version: int) -> bytes:
    from semel.protocol.messages.internal_topics import GroupMetadataValue, MemberMetadata

    member = MemberMetadata("m", None, "c", "/h", 9000, 6000, b"s", b"a")
    value = GroupMetadataValue("consumer", 3, "range", "m", 1, [member])
    return GROUP_METADATA_VALUE.encode(value, version)


@pytest.mark.parametrize("kind", [4, 15, -1])
def test_records_of_other_kinds_of_groups_are_passed_over(kind: int) -> None:
    assert read_record(kind.to_bytes(2, "big", signed=True) + b"\0\1x", b"\0\0") is None
