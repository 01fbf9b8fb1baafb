"""What a log takes from clients, what it refuses and with which code, and where things land."""

from __future__ import annotations

import struct

import pytest

from semel.protocol.batch import read_header, seal_crc
from semel.protocol.errors import ErrorCode
from semel.protocol.rows import Record, encode_batch, encode_single
from semel.storage import HeavyBatch, LogConfig, PartitionLog, StorageError
from tests.support.batches import decode_batches
from tests.unit.storage.helpers import (
    START_MS,
    Folder,
    all_records,
    append,
    append_in_transaction,
    batch,
    find_producer,
    producers,
)


def code_of(log: PartitionLog, data: bytearray, **options: object) -> ErrorCode:
    """The code that a batch is refused with. A refused batch must not leave a trace."""
    end, size = log.end_offset, log.size_bytes
    with pytest.raises(StorageError) as refused:
        log.append(memoryview(data), now_ms=START_MS, **options)  # type: ignore[arg-type]
    assert (log.end_offset, log.size_bytes) == (end, size)
    return refused.value.code


def patched(data: bytearray, position: int, layout: str, value: int) -> bytearray:
    struct.pack_into(layout, data, position, value)
    seal_crc(data)
    return data


def test_batches_get_consecutive_offsets_and_the_leader_epoch(folder: Folder) -> None:
    log = folder.log()
    log.leader_epoch = 3
    assert append(log, values=[b"a", b"b"])[:2] == (0, 1)
    assert append(log, values=[b"c"])[:2] == (2, 2)
    headers = [decoded.header for decoded in decode_batches(log.read(0, 1 << 20).records)]
    assert [(header.base_offset, header.leader_epoch) for header in headers] == [(0, 3), (2, 3)]
    assert [record.value for record in all_records(log)] == [b"a", b"b", b"c"]


def test_create_time_keeps_timestamps_and_returns_no_append_time(folder: Folder) -> None:
    assert append(folder.log(), timestamp_ms=START_MS - 5).append_time_ms == -1
    assert all_records(folder.log())[0].timestamp == START_MS - 5


def test_log_append_time_stamps_every_record_and_stays_valid(folder: Folder) -> None:
    log = folder.log(message_timestamp_type="LogAppendTime")
    result = append(log, values=[b"a", b"b"], timestamp_ms=5, now_ms=START_MS + 7)
    assert result.append_time_ms == START_MS + 7
    assert [record.timestamp for record in all_records(log)] == [START_MS + 7] * 2


def test_retry_after_log_append_time_returns_the_first_offset_and_time(folder: Folder) -> None:
    log = folder.log(message_timestamp_type="LogAppendTime")
    append(log, producer_id=1, epoch=0, sequence=0, now_ms=START_MS)
    again = append(log, producer_id=1, epoch=0, sequence=0, now_ms=START_MS + 100)
    assert again.duplicate
    assert (again.base_offset, again.append_time_ms) == (0, START_MS)
    assert log.end_offset == 1


def test_garbage_and_torn_batches_are_corrupt(folder: Folder) -> None:
    log = folder.log()
    whole = batch([b"x" * 100])
    assert code_of(log, bytearray()) is ErrorCode.CORRUPT_MESSAGE
    assert code_of(log, whole[:60]) is ErrorCode.CORRUPT_MESSAGE
    assert code_of(log, whole[:-1]) is ErrorCode.CORRUPT_MESSAGE
    for position in (21, 30, 60, 61, 100, len(whole) - 1):
        broken = bytearray(whole)
        broken[position] ^= 0x40
        assert code_of(log, broken) is ErrorCode.CORRUPT_MESSAGE, position
    negative = bytearray(whole)
    struct.pack_into(">i", negative, 8, -1)
    assert code_of(log, negative) is ErrorCode.CORRUPT_MESSAGE
    huge = bytearray(whole)
    struct.pack_into(">i", huge, 8, 2**31 - 1)
    assert code_of(log, huge) is ErrorCode.CORRUPT_MESSAGE


def test_old_message_formats_are_refused_as_invalid_records(folder: Folder) -> None:
    old = batch()
    old[16] = 1
    assert code_of(folder.log(), old) is ErrorCode.INVALID_RECORD


def test_two_batches_in_one_produce_are_refused(folder: Folder) -> None:
    assert code_of(folder.log(), batch() + batch()) is ErrorCode.INVALID_RECORD


def test_base_offset_of_a_client_must_be_zero(folder: Folder) -> None:
    assert code_of(folder.log(), patched(batch(), 0, ">q", 5)) is ErrorCode.INVALID_RECORD


@pytest.mark.parametrize(
    ("position", "layout", "value", "code"),
    [
        (57, ">i", 2, ErrorCode.INVALID_RECORD),  # count != last offset delta + 1
        (57, ">i", 0, ErrorCode.INVALID_RECORD),
        (57, ">i", -1, ErrorCode.INVALID_RECORD),
        (23, ">i", 7, ErrorCode.INVALID_RECORD),
        (23, ">i", -1, ErrorCode.INVALID_RECORD),
        (21, ">h", 0x20, ErrorCode.INVALID_RECORD),  # a control batch
        (21, ">h", 0x05, ErrorCode.UNSUPPORTED_COMPRESSION_TYPE),
        (21, ">h", 0x07, ErrorCode.UNSUPPORTED_COMPRESSION_TYPE),
        (21, ">h", 0x08, ErrorCode.INVALID_TIMESTAMP),  # LogAppendTime set by the producer
        (21, ">h", 0x40, ErrorCode.INVALID_RECORD),
        (43, ">q", 9, ErrorCode.INVALID_RECORD),  # a producer id without a sequence
    ],
)
def test_header_fields_that_cannot_be(folder: Folder, position: int, layout: str, value: int, code: ErrorCode) -> None:
    assert code_of(folder.log(), patched(batch(), position, layout, value)) is code


def test_batch_above_max_message_bytes_is_too_large_even_if_corrupt(folder: Folder) -> None:
    log = folder.log(max_message_bytes=200)
    large = batch([b"x" * 200])
    assert code_of(log, large) is ErrorCode.MESSAGE_TOO_LARGE
    large[-1] ^= 1
    assert code_of(log, large) is ErrorCode.MESSAGE_TOO_LARGE
    assert append(log, values=[b"x" * 50]).base_offset == 0


def test_batch_above_segment_bytes_is_refused(folder: Folder) -> None:
    assert code_of(folder.log(segment_bytes=200), batch([b"x" * 300])) is ErrorCode.RECORD_LIST_TOO_LARGE


def test_timestamps_too_far_in_the_future_or_past(folder: Folder) -> None:
    log = folder.log(message_timestamp_after_max_ms=1000, message_timestamp_before_max_ms=1000)
    assert code_of(log, batch(timestamp_ms=START_MS + 1001)) is ErrorCode.INVALID_TIMESTAMP
    assert code_of(log, batch(timestamp_ms=START_MS - 1001)) is ErrorCode.INVALID_TIMESTAMP
    assert append(log, timestamp_ms=START_MS + 1000).base_offset == 0
    assert append(log, timestamp_ms=START_MS - 1000).base_offset == 1
    assert append(log, timestamp_ms=-1).base_offset == 2


def test_one_old_record_in_a_batch_is_found_where_the_past_is_limited(folder: Folder) -> None:
    log = folder.log(message_timestamp_before_max_ms=1000)
    mixed = encode_batch([Record(0, START_MS, b"k", b"a"), Record(1, START_MS - 5000, b"k", b"b")])
    assert code_of(log, mixed) is ErrorCode.INVALID_TIMESTAMP


def test_base_timestamp_is_no_record_s_timestamp(folder: Folder) -> None:
    """Writers may use it as a mark; only what records say counts."""
    log = folder.log(message_timestamp_before_max_ms=1000)
    marked = encode_batch([Record(0, START_MS, b"k", b"a")], base_timestamp=42)
    assert append(log, marked).base_offset == 0
    assert all_records(log)[0].timestamp == START_MS


def test_compacted_topic_refuses_records_without_key_and_names_them(folder: Folder) -> None:
    log = folder.log(cleanup_policy=frozenset({"compact"}))
    with pytest.raises(StorageError) as refused:
        append(log, values=[b"a", b"b", b"c"], keys=[b"k", None, None])
    assert refused.value.code is ErrorCode.INVALID_RECORD
    assert [index for index, _ in refused.value.record_errors] == [1, 2]
    assert append(log, values=[b"a"], keys=[b""]).base_offset == 0


def test_compacted_topic_looks_into_compressed_batches(folder: Folder) -> None:
    log = folder.log(cleanup_policy=frozenset({"compact"}))
    assert code_of(log, batch([b"a"] * 10, keys=[None] * 10, compression=1)) is ErrorCode.INVALID_RECORD
    broken = batch([b"a"] * 10, compression=1)
    broken[80] ^= 0xFF
    seal_crc(broken)
    assert code_of(log, broken) is ErrorCode.INVALID_RECORD


def claiming(whole: bytearray, count: int) -> bytearray:
    """The batch with another number of records in its header."""
    struct.pack_into(">i", whole, 23, count - 1)
    struct.pack_into(">i", whole, 57, count)
    struct.pack_into(">i", whole, 8, len(whole) - 12)
    seal_crc(whole)
    return whole


@pytest.mark.parametrize("compression", [0, 1, 2, 3, 4])
def test_records_that_are_not_there_are_not_stored(folder: Folder, compression: int) -> None:
    """As in Kafka: the records of a batch are counted, and each of them has to be whole."""
    log = folder.log()
    whole = batch([b"a"] * 10, compression=compression)
    for count in (1, 9, 11, 1000, 2**31 - 1):
        assert code_of(log, claiming(bytearray(whole), count)) is ErrorCode.INVALID_RECORD, count
    broken = bytearray(whole)
    broken[62:] = bytes((37 * number + 11) & 0xFF for number in range(len(broken) - 62))
    assert code_of(log, claiming(broken, 10)) is ErrorCode.INVALID_RECORD
    assert code_of(log, claiming(bytearray(whole[:61]), 2**31 - 1)) is ErrorCode.INVALID_RECORD
    assert log.end_offset == 0
    assert append(log, bytearray(whole)).last_offset == 9


def test_a_record_beyond_the_latest_timestamp_is_refused_though_the_header_hides_it(folder: Folder) -> None:
    log = folder.log()
    records = [Record(number, START_MS + number * 200_000, None, b"x" * 9) for number in range(40)]
    hidden = encode_batch(records)
    struct.pack_into(">q", hidden, 35, START_MS)
    seal_crc(hidden)
    assert code_of(log, hidden) is ErrorCode.INVALID_TIMESTAMP


def test_a_batch_that_decompresses_to_gigabytes_is_left_to_a_thread(folder: Folder) -> None:
    """A thousand times its size: on the event loop it is opened only up to a limit."""
    log = folder.log()
    bomb = memoryview(batch([bytes(5 << 20)], compression=4))
    assert len(bomb) < 4096
    with pytest.raises(HeavyBatch):
        log.append(bomb, now_ms=START_MS, light_only=True)
    inspection = log.inspect(bomb)
    assert log.append(bomb, now_ms=START_MS, inspection=inspection, light_only=True).last_offset == 0


@pytest.mark.parametrize(
    ("wanted", "stored"), [("uncompressed", 0), ("gzip", 1), ("snappy", 2), ("lz4", 3), ("zstd", 4)]
)
def test_batches_are_stored_in_the_compression_of_the_topic(folder: Folder, wanted: str, stored: int) -> None:
    log = folder.log(compression_type=wanted)
    for compression in range(5):
        append(log, batch([b"value %d" % number for number in range(50)], compression=compression))
    found = decode_batches(log.read(0, 1 << 20).records)
    assert [(header.compression, len(records)) for header, records in found] == [(stored, 50)] * 5


def test_a_batch_that_outgrows_its_limit_when_it_is_stored_uncompressed_is_refused(folder: Folder) -> None:
    log = folder.log(compression_type="uncompressed", max_message_bytes=1000)
    assert code_of(log, batch([bytes(5000)], compression=4)) is ErrorCode.MESSAGE_TOO_LARGE


def test_refused_sequences_change_nothing(folder: Folder) -> None:
    log = folder.log()
    append(log, producer_id=1, epoch=0, sequence=0)
    assert code_of(log, batch(producer_id=1, epoch=0, sequence=5)) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert append(log, producer_id=1, epoch=0, sequence=1).base_offset == 1


def test_segment_rolls_when_full_and_reading_goes_on_across_it(folder: Folder) -> None:
    log = folder.log(segment_bytes=1000)
    for number in range(20):
        append(log, values=[b"%d" % number * 50])
    assert len(log.segments) > 2
    assert all(segment.size <= 1000 for segment in log.segments)
    assert [record.offset for record in all_records(log)] == list(range(20))
    for segment in log.segments[1:]:
        assert (folder.partition_path / f"{segment.base_offset:020d}.snapshot").exists()


def test_segment_rolls_by_the_age_of_its_records(folder: Folder) -> None:
    log = folder.log(segment_ms=1000)
    append(log, timestamp_ms=START_MS)
    append(log, timestamp_ms=START_MS + 1000)
    assert len(log.segments) == 1
    append(log, timestamp_ms=START_MS + 1001)
    assert len(log.segments) == 2


def test_segment_age_is_known_after_a_restart(folder: Folder) -> None:
    log = folder.log(segment_ms=1000)
    append(log, timestamp_ms=START_MS)
    log = folder.restart(clean=True)
    append(log, timestamp_ms=START_MS + 1001)
    assert len(log.segments) == 2


def test_segment_rolls_when_its_index_is_full(folder: Folder) -> None:
    log = folder.log(segment_index_bytes=16, index_interval_bytes=0)
    for _ in range(6):
        append(log)
    assert len(log.segments) > 1
    assert [record.offset for record in all_records(log)] == list(range(6))


def test_coordinator_appends_several_batches_as_one(folder: Folder) -> None:
    log = folder.log()
    append(log)
    result = log.append_records(batch([b"a", b"b"]) + batch([b"c"]), now_ms=START_MS)
    assert result[:2] == (1, 3)
    assert [record.value for record in all_records(log)][1:] == [b"a", b"b", b"c"]
    with pytest.raises(StorageError) as refused:
        log.append_records(batch() + b"\x00", now_ms=START_MS)
    assert refused.value.code is ErrorCode.CORRUPT_MESSAGE


@pytest.mark.parametrize("kind", ["CreateTime", "LogAppendTime"])
def test_one_record_of_a_coordinator_is_stored_as_the_batch_it_makes(folder: Folder, kind: str) -> None:
    single, batches = (folder.log(topic, message_timestamp_type=kind, segment_bytes=250) for topic in ("one", "two"))
    single.leader_epoch = batches.leader_epoch = 3
    for number in range(5):
        key, value = b"key-%d" % number, None if number == 3 else b"value"
        assert single.append_record(key, value, now_ms=START_MS + number) == number
        batches.append_records(encode_single(START_MS + number, key, value), now_ms=START_MS + number)
    assert single.read(0, 1 << 20).records == batches.read(0, 1 << 20).records
    assert [each.size for each in single.segments] == [each.size for each in batches.segments]
    assert (len(single.segments), single.high_watermark) == (2, 5)
    single.config = LogConfig(max_message_bytes=60)
    with pytest.raises(StorageError) as refused:
        single.append_record(b"key", b"value", now_ms=START_MS)
    assert (refused.value.code, single.end_offset) == (ErrorCode.MESSAGE_TOO_LARGE, 5)


def test_a_changed_setting_counts_from_the_next_append(folder: Folder) -> None:
    log = folder.log()
    append(log, values=[b"x" * 500])
    log.config = LogConfig(max_message_bytes=100)
    assert code_of(log, batch([b"x" * 500])) is ErrorCode.MESSAGE_TOO_LARGE


def test_marker_is_a_control_batch_that_ends_the_transaction(folder: Folder) -> None:
    log = folder.log()
    append_in_transaction(log, 5, 0)
    assert log.has_open_transaction(5)
    assert log.has_open_transaction(5, 0)
    assert not log.has_open_transaction(5, 1)
    result = log.append_marker(5, 0, 2, commit=True, now_ms=START_MS)
    assert not log.has_open_transaction(5)
    header = read_header(bytes(log.read(result.base_offset, 1 << 20).records))
    assert (header.is_control, header.is_transactional, header.producer_id) == (True, True, 5)
    info = find_producer(log, 5)
    assert info is not None
    assert (info.coordinator_epoch, info.txn_first_offset, info.last_sequence) == (2, -1, 0)


def test_producers_have_what_describe_producers_needs(folder: Folder) -> None:
    log = folder.log()
    append(log, producer_id=1, epoch=0, sequence=0, values=[b"a", b"b"])
    append_in_transaction(log, 2, 0, epoch=4)
    assert producers(log) == {1: (0, 1, START_MS + 1, -1, -1), 2: (4, 0, START_MS, -1, 2)}


def test_leader_epochs_give_the_offset_for_leader_epoch(folder: Folder) -> None:
    log = folder.log()
    append(log)
    append(log)
    log.leader_epoch = 5
    append(log)
    assert log.epoch_end_offset(0) == (0, 2)
    assert log.epoch_end_offset(3) == (0, 2)
    assert log.epoch_end_offset(5) == (5, 3)
    assert log.epoch_end_offset(6) == (-1, -1)
    assert (log.epoch_at(0), log.epoch_at(2)) == (0, 5)
    checkpoint = (folder.partition_path / "leader-epoch-checkpoint").read_text()
    assert checkpoint == "0\n2\n0 0\n5 2\n"
