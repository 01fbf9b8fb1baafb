"""The life cycle of a log: every state with every event, and what each state means for the next use."""

from __future__ import annotations

from pathlib import Path

import pytest

from semel.protocol.errors import ErrorCode
from semel.storage import StorageError
from semel.storage.log import LogEvent, LogState, next_state
from tests.unit.storage.helpers import Folder, append

CLEAN, UNCLEAN, OPEN, FAILED = LogState.CLEAN, LogState.UNCLEAN, LogState.OPEN, LogState.FAILED
CLOSED, DELETED = LogState.CLOSED, LogState.DELETED
NEVER = None

#            opened  failed   closed  deleted
TABLE = {
    CLEAN: (OPEN, CLEAN, CLOSED, DELETED),
    UNCLEAN: (OPEN, UNCLEAN, CLOSED, DELETED),
    OPEN: (NEVER, FAILED, CLOSED, DELETED),
    FAILED: (OPEN, FAILED, CLOSED, DELETED),
    CLOSED: (NEVER, CLOSED, CLOSED, DELETED),
    DELETED: (NEVER, DELETED, DELETED, DELETED),
}


@pytest.mark.parametrize("event", LogEvent)
@pytest.mark.parametrize("state", LogState)
def test_every_event_in_every_state_has_one_outcome(state: LogState, event: LogEvent) -> None:
    expected = TABLE[state][list(LogEvent).index(event)]
    if expected is NEVER:
        with pytest.raises(RuntimeError, match=f"cannot be {event.name} when it is {state.name}"):
            next_state(state, event)
    else:
        assert next_state(state, event) is expected


@pytest.mark.parametrize("clean", [True, False])
def test_a_log_is_read_on_first_use_or_recovered_at_the_start(folder: Folder, clean: bool) -> None:
    append(folder.log())
    log = folder.restart(clean=clean)
    assert log.state is (CLEAN if clean else OPEN)
    assert log.end_offset == 1
    assert (log.state, log.error) == (OPEN, None)


def test_a_failed_sync_keeps_what_is_below_the_high_watermark_and_no_more(tmp_path: Path) -> None:
    folder = Folder(tmp_path, fsync="commit")
    log = folder.log()
    append(log)
    log.flush()
    append(log)
    job = log.begin_sync()
    failure = log.end_sync(job, OSError("lost"))
    assert (log.state, log.error) == (FAILED, failure)
    assert not log.is_open
    assert log.end_offset == 1
    assert (log.state, log.error) == (OPEN, None)


def test_a_sync_that_ends_after_its_log_was_opened_anew_makes_nothing_durable(tmp_path: Path) -> None:
    folder = Folder(tmp_path, fsync="commit")
    log = folder.log()
    append(log)
    late, failed = log.begin_sync(), log.begin_sync()
    log.end_sync(failed, OSError("lost"))
    assert log.end_offset == 0
    append(log)
    append(log)
    assert log.end_sync(late, None) is None
    assert (log.high_watermark, log.recovery_point) == (0, 0)


@pytest.mark.parametrize("error", [None, OSError("lost")])
def test_a_sync_that_ends_after_its_log_was_deleted_leaves_it_deleted(folder: Folder, error: OSError | None) -> None:
    log = folder.log()
    append(log)
    job = log.begin_sync()
    log.mark_deleted()
    failure = log.end_sync(job, error)
    assert failure is not None
    assert (log.state, failure.code) == (DELETED, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    with pytest.raises(StorageError, match="was deleted"):
        _ = log.end_offset


def test_the_folder_of_a_new_log_is_synced_again_after_a_failed_sync(tmp_path: Path) -> None:
    folder = Folder(tmp_path, fsync="commit")
    log = folder.log()
    append(log)
    first = log.begin_sync()
    assert str(tmp_path) in first.folders
    log.end_sync(first, OSError("lost"))
    append(log)
    second = log.begin_sync()
    assert str(tmp_path) in second.folders
    assert log.end_sync(second, None) is None
    append(log)
    third = log.begin_sync()
    assert third.folders == []
    assert log.end_sync(third, None) is None


@pytest.mark.parametrize("mended", [True, False])
def test_a_clean_stop_recovers_a_failed_log_or_is_not_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mended: bool
) -> None:
    """The next start would trust what the disk may not have."""
    folder = Folder(tmp_path, fsync="commit")
    log = folder.log()
    append(log)
    log.flush()
    append(log)
    log.end_sync(log.begin_sync(), OSError("lost"))
    assert log.state is FAILED
    fired = []
    if not mended:
        truncate = folder.data_dir.files.truncate

        def broken(fd: int, path: str, size: int) -> None:
            if path.endswith(".log"):
                fired.append(1)
                raise OSError("still broken")
            truncate(fd, path, size)

        monkeypatch.setattr(folder.data_dir.files, "truncate", broken)
    folder.data_dir.close()
    assert bool(fired) is not mended
    monkeypatch.undo()
    folder.data_dir = folder._open()
    assert folder.data_dir.was_clean is mended
    assert folder.log().end_offset == (1 if mended else 2)  # the second was written, and never acknowledged
