"""Reading: whole batches, never beyond what may be seen, whatever the sizes."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.protocol.batch import iter_headers
from semel.protocol.errors import ErrorCode
from semel.storage import StorageError
from tests.unit.storage.helpers import (
    START_MS,
    Folder,
    all_records,
    append,
    append_in_transaction,
    committed_values,
    newest_record,
    offset_for_time,
)


def test_offsets_outside_the_log_are_out_of_range(folder: Folder) -> None:
    log = folder.log()
    append(log)
    assert log.read(1, 100).records == b""
    for offset in (-1, 2, 1000):
        with pytest.raises(StorageError) as refused:
            log.read(offset, 100)
        assert refused.value.code is ErrorCode.OFFSET_OUT_OF_RANGE


def test_the_first_search_by_time_of_a_process_is_not_done_on_the_event_loop(folder: Folder) -> None:
    """It loads NumPy, which takes longer than any request may hold up others."""
    append(folder.log())
    batch = folder.log().batch_for_time(0)
    assert batch is not None
    program = (
        "import pickle, sys; batch = pickle.loads(sys.stdin.buffer.read());"
        "print(batch.is_large, batch.first_record().offset, batch.is_large)"
    )
    done = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(batch), capture_output=True, check=True)
    assert done.stdout.split() == [b"True", b"0", b"False"]


def test_an_empty_log_reads_as_empty_and_makes_no_files(folder: Folder) -> None:
    log = folder.log()
    assert log.read(0, 100) == (b"", 0, 0, 0, None, False)
    assert log.read(0, 100, up_to="last_stable").aborted == []
    assert [path.name for path in folder.partition_path.iterdir()] == ["partition.metadata"]


def test_first_batch_comes_whole_even_if_it_is_larger_than_requested(folder: Folder) -> None:
    log = folder.log()
    append(log, values=[b"x" * 5000])
    append(log)
    assert len(log.read(0, 10).records) > 5000
    assert len(log.read(0, 10, min_one_batch=False).records) == 0


def test_reading_from_the_middle_of_a_batch_returns_the_whole_batch(folder: Folder) -> None:
    log = folder.log()
    append(log, values=[b"a"] * 10)
    append(log, values=[b"b"] * 10)
    headers = [header.base_offset for _, header in iter_headers(log.read(13, 1 << 20).records)]
    assert headers == [10]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 5), st.sampled_from([1, 40, 300, 2000, 9000])), min_size=1, max_size=60),
    segment_bytes=st.sampled_from([10_000, 30_000, 1 << 20]),
    interval=st.sampled_from([0, 500, 4096]),
    max_bytes=st.sampled_from([1, 100, 3000, 20_000, 1 << 20]),
    restart=st.sampled_from([None, True, False]),
)
def test_any_offset_reads_the_batches_that_follow_it(
    sizes: list[tuple[int, int]], segment_bytes: int, interval: int, max_bytes: int, restart: bool | None
) -> None:
    with tempfile.TemporaryDirectory() as path:
        folder = Folder(Path(path))
        log = folder.log(segment_bytes=segment_bytes, index_interval_bytes=interval, max_message_bytes=9_900)
        spans = []
        for count, size in sizes:
            size = min(size, 9_000 // count)
            result = append(log, values=[b"x" * size] * count)
            spans.append((result.base_offset, result.last_offset))
        if restart is not None:
            log = folder.restart(clean=restart)
        for offset in range(log.end_offset):
            data = log.read(offset, max_bytes).records
            found = [(header.base_offset, header.last_offset) for _, header in iter_headers(data)]
            expected = [span for span in spans if span[1] >= offset][: len(found)]
            assert found == expected, offset
            assert sum(header.size for _, header in iter_headers(data)) == len(data), "cut in the middle of a batch"
            assert len(found) == 1 or len(data) <= max_bytes
        folder.data_dir.crash()


def test_read_committed_stops_before_the_earliest_open_transaction(folder: Folder) -> None:
    log = folder.log()
    append(log, values=[b"plain"])
    append_in_transaction(log, 1, 0, [b"open"])
    append(log, values=[b"after"])
    assert log.high_watermark == 3
    assert log.last_stable_offset == 1
    assert committed_values(log) == [b"plain"]
    assert [record.value for record in all_records(log)] == [b"plain", b"open", b"after"]
    log.append_marker(1, 0, 0, commit=True, now_ms=START_MS)
    assert log.last_stable_offset == 4
    assert committed_values(log) == [b"plain", b"open", b"after"]


def test_read_committed_leaves_out_what_was_aborted(folder: Folder) -> None:
    log = folder.log(segment_bytes=1000)
    for round_number in range(8):
        for producer_id in (1, 2, 3):
            append_in_transaction(log, producer_id, round_number, [b"%d-%d" % (producer_id, round_number) + b"x" * 50])
        for producer_id in (3, 1, 2):
            commit = (producer_id + round_number) % 3 != 0
            log.append_marker(producer_id, 0, 0, commit=commit, now_ms=START_MS)
    expected = [
        b"%d-%d" % (producer_id, number) + b"x" * 50
        for number in range(8)
        for producer_id in (1, 2, 3)
        if (producer_id + number) % 3 != 0
    ]
    assert len(log.segments) > 3
    assert committed_values(log) == expected
    assert committed_values(folder.restart(clean=True)) == expected
    assert committed_values(folder.restart(clean=False)) == expected


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["data", "commit", "abort", "plain"]), st.integers(1, 4)), min_size=1, max_size=80
    ),
    segment_bytes=st.sampled_from([600, 2000, 1 << 20]),
    restart=st.sampled_from([None, True, False]),
)
def test_read_committed_never_sees_open_or_aborted_transactions(
    steps: list[tuple[str, int]], segment_bytes: int, restart: bool | None
) -> None:
    """Against a model: a list of values, each with the outcome of its transaction."""
    with tempfile.TemporaryDirectory() as path:
        folder = Folder(Path(path))
        log = folder.log(segment_bytes=segment_bytes)
        model: list[list[object]] = []  # [value, producer, outcome]
        sequences = dict.fromkeys(range(1, 5), 0)
        for number, (step, producer) in enumerate(steps):
            value = b"%d" % number
            if step == "plain":
                append(log, values=[value])
                model.append([value, None, "commit"])
            elif step == "data":
                append_in_transaction(log, producer, sequences[producer], [value])
                sequences[producer] += 1
                model.append([value, producer, "open"])
            else:
                log.append_marker(producer, 0, 0, commit=step == "commit", now_ms=START_MS)
                for entry in model:
                    if entry[1] == producer and entry[2] == "open":
                        entry[2] = step
        if restart is not None:
            log = folder.restart(clean=restart)
        expected = []
        for value, _, outcome in model:
            if outcome == "open":
                break
            if outcome == "commit":
                expected.append(value)
        assert committed_values(log) == expected
        folder.data_dir.crash()


def test_offsets_by_time(folder: Folder) -> None:
    log = folder.log(segment_bytes=600, index_interval_bytes=100)
    for number in range(30):
        append(log, values=[b"a", b"b"], timestamp_ms=START_MS + number * 10)
    for number in range(30):
        found = offset_for_time(log, START_MS + number * 10)
        assert found is not None
        assert found == (START_MS + number * 10, number * 2, 0)
        later = offset_for_time(log, START_MS + number * 10 + 1)
        assert later is not None
        assert later == (START_MS + number * 10 + 1, number * 2 + 1, 0)
    assert offset_for_time(log, 0) == (START_MS, 0, 0)
    assert offset_for_time(log, START_MS + 10_000) is None
    assert newest_record(log) == (START_MS + 291, 59, 0)


def test_offsets_by_time_when_time_goes_backwards(folder: Folder) -> None:
    log = folder.log(segment_bytes=500, index_interval_bytes=100)
    for timestamp_ms in (50, 10, 40, 90, 20, 90, 5):
        append(log, values=[b"x" * 60], timestamp_ms=START_MS + timestamp_ms)
    assert offset_for_time(log, START_MS + 51) == (START_MS + 90, 3, 0)
    assert offset_for_time(log, START_MS) == (START_MS + 50, 0, 0)
    assert newest_record(log) == (START_MS + 90, 3, 0)
    restarted = folder.restart(clean=True)
    assert newest_record(restarted) == (START_MS + 90, 3, 0)


def test_offsets_by_time_respect_deleted_records(folder: Folder) -> None:
    log = folder.log()
    for number in range(5):
        append(log, timestamp_ms=START_MS + number)
    log.delete_records(3)
    assert offset_for_time(log, START_MS) == (START_MS + 3, 3, 0)


def test_a_wrong_index_is_rebuilt_when_it_is_used(folder: Folder) -> None:
    log = folder.log(index_interval_bytes=0)
    for number in range(50):
        append(log, values=[b"%d" % number])
    folder.data_dir.close()
    index = folder.partition_path / f"{0:020d}.index"
    content = bytearray(index.read_bytes())
    for at in range(0, len(content) - 8, 8):
        content[at + 7] ^= 0x13  # every position but the last is wrong
    index.write_bytes(content)
    folder.data_dir = folder._open()
    log = folder.log()
    assert [record.value for record in all_records(log)] == [b"%d" % number for number in range(50)]
    for offset in range(50):
        assert next(iter_headers(log.read(offset, 1 << 20).records))[1].base_offset == offset
