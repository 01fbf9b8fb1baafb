"""After kill -9 at any byte: whole batches survive, torn tails go, indexes and producers are as before."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from semel.protocol.batch import HEADER_SIZE
from semel.protocol.errors import ErrorCode
from semel.storage import PartitionLog, StorageError
from semel.storage.segment import OFFSET_INDEX, TIME_INDEX, TXN_INDEX, file_name
from tests.unit.storage.helpers import (
    START_MS,
    Folder,
    all_headers,
    all_records,
    append,
    append_in_transaction,
    committed_values,
    newest_record,
    offset_for_time,
    producers,
)


def fill(log: PartitionLog, batches: int = 6) -> None:
    for number in range(batches):
        append(log, values=[b"%d" % number] * 3, producer_id=9, epoch=0, sequence=number * 3)


def copy_of(folder: Folder, target: Path) -> Folder:
    """The folder as a killed process leaves it: copied while it is open."""
    shutil.copytree(folder.path, target)
    (target / ".lock").unlink()
    copied = Folder.__new__(Folder)
    copied.__dict__.update(folder.__dict__)
    copied.path = target
    return copied


def opened(folder: Folder) -> PartitionLog:
    folder.data_dir = folder._open()
    return folder.log()


def test_cut_at_every_byte_of_the_last_batches_keeps_all_whole_ones(folder: Folder, tmp_path: Path) -> None:
    log = folder.log(index_interval_bytes=100)
    fill(log)
    headers = all_headers(log)
    ends = [sum(header.size for header in headers[: count + 1]) for count in range(len(headers))]
    log_name = file_name(0, ".log")
    whole = (folder.partition_path / log_name).read_bytes()
    assert len(whole) == ends[-1]
    for length in range(ends[3], ends[-1] + 1):
        target = tmp_path / "copy"
        copied = copy_of(folder, target)
        (copied.partition_path / log_name).write_bytes(whole[:length])
        recovered = opened(copied)
        survivors = sum(1 for end in ends if end <= length)
        assert [header.base_offset for header in all_headers(recovered)] == [n * 3 for n in range(survivors)]
        assert (copied.partition_path / log_name).stat().st_size == ends[survivors - 1]
        again = append(recovered, values=[b"z"] * 3, producer_id=9, epoch=0, sequence=(survivors - 1) * 3)
        assert again.duplicate
        assert again.base_offset == (survivors - 1) * 3
        assert not append(recovered, values=[b"z"], producer_id=9, epoch=0, sequence=survivors * 3).duplicate
        copied.data_dir.crash()
        shutil.rmtree(target)


@pytest.mark.parametrize("seed", range(12))
def test_garbage_after_the_last_batch_is_cut(folder: Folder, seed: int) -> None:
    luck = random.Random(seed)
    fill(folder.log())
    path = folder.partition_path / file_name(0, ".log")
    whole = path.read_bytes()
    folder.data_dir.crash()
    tails = [
        luck.randbytes(luck.randint(1, 3000)),
        bytes(luck.randint(1, 5000)),
        whole[: luck.randint(1, len(whole))],  # batches of old offsets, whole and sound
        whole[-80:],
    ]
    path.write_bytes(whole + tails[seed % len(tails)])
    log = opened(folder)
    assert path.read_bytes() == whole
    assert log.end_offset == 18
    assert append(log).base_offset == 18


@pytest.mark.parametrize("seed", range(8))
def test_a_flipped_bit_ends_the_log_before_its_batch(folder: Folder, seed: int) -> None:
    luck = random.Random(seed)
    log = folder.log()
    fill(log)
    first = all_headers(log)[0].size
    path = folder.partition_path / file_name(0, ".log")
    folder.data_dir.crash()
    content = bytearray(path.read_bytes())
    at = luck.choice([position for position in range(first, len(content)) if position % first >= HEADER_SIZE - 40])
    content[at] ^= 1 << luck.randint(0, 7)
    path.write_bytes(content)
    log = opened(folder)
    assert log.end_offset == at // first * 3


def snapshot_of(folder: Folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.partition_path.iterdir() if path.is_file()}


def busy_log(folder: Folder) -> PartitionLog:
    """Several segments, aborts among them, open transactions at the end."""
    log = folder.log(segment_bytes=1500, index_interval_bytes=200)
    for number in range(30):
        append(log, values=[b"p%d" % number], producer_id=9, epoch=0, sequence=number, timestamp_ms=START_MS + number)
        append_in_transaction(log, 1 + number % 3, number // 3, [b"t%d" % number])
        if number % 3 == 2:
            for producer_id in (1, 2, 3):
                log.append_marker(producer_id, 0, 0, commit=producer_id != 2, now_ms=START_MS + number)
    append_in_transaction(log, 4, 0, [b"open"])
    return log


def facts(log: PartitionLog) -> tuple[object, ...]:
    return (
        log.end_offset,
        log.last_stable_offset,
        committed_values(log),
        all_headers(log),
        producers(log),
        offset_for_time(log, START_MS + 17),
        newest_record(log),
    )


def test_unclean_recovery_rebuilds_the_same_indexes_as_appending(folder: Folder, tmp_path: Path) -> None:
    log = busy_log(folder)
    log.flush()
    before, known = snapshot_of(folder), facts(log)
    copied = copy_of(folder, tmp_path / "copy")
    for suffix in (OFFSET_INDEX, TIME_INDEX, TXN_INDEX):
        for path in copied.partition_path.glob("*" + suffix):
            path.unlink()
    recovered = opened(copied)
    assert facts(recovered) == known
    recovered.flush()
    copied.data_dir.crash()
    after = snapshot_of(copied)
    for name, content in before.items():
        last_segment = name.startswith(f"{log.segments[-1].base_offset:020d}")
        if name.endswith((OFFSET_INDEX, TXN_INDEX)) or (name.endswith(TIME_INDEX) and not last_segment):
            assert after.get(name, b"") == content, name


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_any_damage_to_indexes_and_snapshots_is_repaired(folder: Folder, seed: int, clean: bool) -> None:
    """They are derived: cut, overwritten or gone, what the log says comes out the same."""
    luck = random.Random(seed)
    known = facts(busy_log(folder))
    if clean:
        folder.data_dir.close()
    else:
        folder.data_dir.crash()
    paths = [p for p in folder.partition_path.iterdir() if p.suffix in (".index", ".timeindex", ".snapshot")]
    damaged = luck.sample(sorted(paths), k=luck.randint(1, len(paths)))
    for path in damaged:
        content = path.read_bytes()
        match luck.randrange(3):
            case 0:
                path.unlink()
            case 1:
                path.write_bytes(content[: luck.randint(0, max(0, len(content) - 1))])
            case 2 if path.suffix == ".snapshot":
                path.write_bytes(luck.randbytes(luck.randint(0, 100)))
            case _:
                path.write_bytes(content + luck.randbytes(luck.randint(1, 7)))
    log = opened(folder)
    found = facts(log)
    if clean and any(path.suffix == ".timeindex" for path in damaged):
        found, known = found[:-2], known[:-2]  # a time index cut between entries only makes searches longer
    assert found == known


def test_producers_come_back_from_snapshot_and_tail(folder: Folder) -> None:
    log = folder.log(segment_bytes=700)
    for number in range(20):
        append(log, values=[b"x" * 60], producer_id=1, epoch=2, sequence=number)
    assert len(log.segments) > 2
    log = folder.restart(clean=False)
    for number in range(15, 20):
        again = append(log, values=[b"x" * 60], producer_id=1, epoch=2, sequence=number)
        assert again.duplicate, number
        assert again.base_offset == number
    with pytest.raises(StorageError) as refused:
        append(log, producer_id=1, epoch=1, sequence=0)
    assert refused.value.code is ErrorCode.INVALID_PRODUCER_EPOCH


def test_all_five_batches_in_flight_are_recognised_after_a_clean_restart(folder: Folder) -> None:
    """A snapshot keeps one batch per producer; the others are found in the log before a retry is refused."""
    log = folder.log(segment_bytes=700)
    for number in range(20):
        append(log, values=[b"x" * 60], producer_id=1, epoch=2, sequence=number)
    log = folder.restart(clean=True)
    for number in range(15, 20):
        again = append(log, values=[b"x" * 60], producer_id=1, epoch=2, sequence=number)
        assert again.duplicate, number
        assert again.base_offset == number
    with pytest.raises(StorageError) as refused:
        append(log, values=[b"x" * 60], producer_id=1, epoch=2, sequence=14)
    assert refused.value.code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert append(log, producer_id=1, epoch=2, sequence=20).base_offset == 20


@pytest.mark.parametrize("clean", [True, False])
def test_open_transaction_survives_a_restart_and_can_be_ended(folder: Folder, clean: bool) -> None:
    log = folder.log()
    append(log)
    append_in_transaction(log, 3, 0, [b"a"])
    log = folder.restart(clean=clean)
    assert log.last_stable_offset == 1
    assert log.has_open_transaction(3, 0)
    append(log, values=[b"b"], producer_id=-1)
    result = log.append_marker(3, 0, 1, commit=False, now_ms=START_MS)
    assert log.last_stable_offset == result.base_offset + 1
    assert log.opened.segments.aborted_in(0, log.end_offset) == [(3, 1)]


def test_segments_after_a_cut_are_dropped(folder: Folder) -> None:
    log = folder.log(segment_bytes=500)
    for _ in range(20):
        append(log, values=[b"x" * 50])
    bases = [segment.base_offset for segment in log.segments]
    folder.data_dir.crash()
    broken = folder.partition_path / file_name(bases[1], ".log")
    broken.write_bytes(broken.read_bytes()[:-3])
    log = opened(folder)
    assert log.end_offset == bases[2] - 1
    assert [segment.base_offset for segment in log.segments] == bases[:2]
    assert not (folder.partition_path / file_name(bases[2], ".snapshot")).exists()
    assert append(log).base_offset == bases[2] - 1


def test_recovery_reads_only_from_the_recovery_point_on(folder: Folder) -> None:
    """Segments below it are on the disk: damage there is not looked for, however large the log is."""
    log = folder.log(segment_bytes=500)
    for _ in range(20):
        append(log, values=[b"x" * 50])
    log.flush()
    folder.data_dir.checkpoint()
    folder.data_dir.crash()
    old = folder.partition_path / file_name(0, ".log")
    content = bytearray(old.read_bytes())
    content[-1] ^= 1
    old.write_bytes(content)
    assert opened(folder).end_offset == 20


def test_an_empty_rolled_segment_remembers_the_end_of_the_log(folder: Folder) -> None:
    log = folder.log()
    append(log)
    append(log)
    log.opened.roll(START_MS)
    log.opened.drop_segments(log.segments[:1], START_MS)
    for clean in (True, False):
        log = folder.restart(clean=clean)
        assert (log.start_offset, log.end_offset) == (2, 2)
    assert append(log).base_offset == 2


def test_leader_epochs_are_found_again(folder: Folder) -> None:
    log = folder.log()
    append(log)
    log.leader_epoch = 4
    append(log)
    folder.data_dir.crash()
    (folder.partition_path / "leader-epoch-checkpoint").write_bytes(b"garbage")
    log = opened(folder)
    log.leader_epoch = 4
    assert log.epoch_end_offset(0) == (0, 1)
    assert log.epoch_at(1) == 4


def test_repeated_crashes_at_random_bytes_never_lose_or_double_a_batch(folder: Folder) -> None:
    """The producer sends again what it does not know to be there, as clients do."""
    luck = random.Random(20)
    log = folder.log(segment_bytes=900, index_interval_bytes=100)
    sent = 0
    for _ in range(40):
        for _ in range(luck.randint(1, 6)):
            append(log, values=[b"%d" % sent], producer_id=1, epoch=0, sequence=sent)
            sent += 1
        folder.data_dir.crash()
        last = sorted(folder.partition_path.glob("*.log"))[-1]
        size = last.stat().st_size
        with open(last, "r+b") as file:
            file.truncate(max(0, size - luck.choice([0, 0, 1, 30, 90, 130])))
        log = opened(folder)
        sent = log.end_offset
        for back in range(1, 6):
            if sent - back >= 0 and luck.random() < 0.5:
                again = append(log, values=[b"%d" % (sent - back)], producer_id=1, epoch=0, sequence=sent - back)
                assert again.duplicate
                assert again.base_offset == sent - back
    assert [record.value for record in all_records(log)] == [b"%d" % number for number in range(sent)]


def strays(folder: Folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.partition_path.glob("*.stray*")}


@pytest.mark.parametrize("byte", [3, 10, 16, 17, 65], ids=["offset", "length", "magic", "crc", "records"])
def test_whole_batches_behind_a_damage_are_cut_off_but_kept(
    folder: Folder, byte: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A log cannot go on behind a damage. What was acknowledged there must not be lost for good."""
    log = folder.log(segment_bytes=500)
    for number in range(30):
        append(log, values=[b"%d" % number])
    first, *later = [Path(segment.log.path) for segment in log.segments]
    assert len(later) > 2
    contents = {path.name: path.read_bytes() for path in (first, *later)}
    size = len(contents[first.name]) // log.segments[1].base_offset
    data = bytearray(contents[first.name])
    data[size + byte] ^= 0xFF
    folder.data_dir.crash()
    first.write_bytes(data)
    for number in range(2):  # and neither a second start nor a second damage takes them
        folder.data_dir = folder._open()
        assert [record.value for record in all_records(folder.log())] == [b"0"]
        kept = strays(folder)
        assert kept.pop(f"{first.name}.{size}.stray") == bytes(data[size:])
        assert kept == {f"{path.name}.stray": contents[path.name] for path in later if contents[path.name]}, number
        folder.data_dir.crash()
    assert "damaged" in caplog.text


def test_what_is_kept_of_a_damage_is_never_written_over(folder: Folder) -> None:
    path = folder.partition_path / "00000000000000000000.log"
    append(folder.log())
    size = path.stat().st_size
    for number in range(3):
        for value in (b"damaged%d" % number, b"behind%d" % number):
            append(folder.log(), values=[value])
        folder.data_dir.crash()
        data = bytearray(path.read_bytes())
        data[size + 17] ^= 0xFF
        path.write_bytes(data)
        folder.data_dir = folder._open()
        assert folder.log().end_offset == 1
    kept = b"".join(strays(folder).values())
    assert all(b"behind%d" % number in kept for number in range(3))


@pytest.mark.parametrize("tail", [b"\0" * 5000, b"\0" * 10, b"torn"])
def test_a_torn_tail_is_cut_off_and_not_kept(folder: Folder, tail: bytes) -> None:
    append(folder.log())
    path = folder.partition_path / "00000000000000000000.log"
    folder.data_dir.crash()
    whole = path.read_bytes()
    for torn in (tail, (b"\0" * 7 + b"\1" + whole[8:])[:-3]):
        path.write_bytes(whole + torn)
        folder.data_dir = folder._open()
        assert folder.log().end_offset == 1
        folder.data_dir.crash()
        assert path.read_bytes() == whole
        assert strays(folder) == {}


def test_a_damaged_swap_does_not_replace_what_it_was_made_from(folder: Folder) -> None:
    for number in range(3):
        append(folder.log(), values=[b"%d" % number])
    folder.data_dir.crash()
    log = folder.partition_path / "00000000000000000000.log"
    swap = folder.partition_path / "00000000000000000000.log.swap"
    swap.write_bytes(b"\xff" * 100)
    folder.data_dir = folder._open()
    assert [record.value for record in all_records(folder.log())] == [b"0", b"1", b"2"]
    assert log.exists()
    assert not swap.exists()
    assert list(strays(folder).values()) == [b"\xff" * 100]


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "copy.index",
        "copy.timeindex",
        "copy.log",
        "copy.log.swap",
        "copy.index.swap",
        "notes.tmp",
        "old.deleted",
        "00000000000000000000.copy.log",
        "00000000000000000000.log.bak",
        "99999999999999999999.log",
        "\u0663" * 20 + ".log",
    ],
)
def test_a_stray_file_in_a_partition_folder_is_left_alone(folder: Folder, name: str, clean: bool) -> None:
    for number in range(3):
        append(folder.log(), values=[b"%d" % number])
    stray = folder.partition_path / name
    stray.write_bytes(b"somebody's own file")
    log = folder.restart(clean=clean)
    assert [record.value for record in all_records(log)] == [b"0", b"1", b"2"]
    assert stray.read_bytes() == b"somebody's own file"
