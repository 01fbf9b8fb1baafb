"""The data folder: its lock, its partitions, and the checkpoints that they share."""

from __future__ import annotations

import fcntl
import functools
import itertools
import logging
import os
import re
import resource
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from uuid import UUID, uuid4

from semel.protocol.errors import ErrorCode
from semel.storage import checkpoints
from semel.storage.config import INT64_MAX, LogConfig
from semel.storage.files import DiskFiles, FileCache, files_for
from semel.storage.log import PartitionLog
from semel.storage.open_log import LogShared
from semel.storage.results import DataDirLockedError, StorageError
from semel.storage.sync import SyncGroup

_log = logging.getLogger("semel.storage")
_DELETE_SUFFIX = "-delete"
_STRAY_SUFFIX = "-stray"  # Kafka's word for a partition that belongs to no topic: kept, and never opened
_DELETED_HERE = re.compile(r".+-\d+\.[0-9a-f]{32}-delete\Z", re.ASCII)  # other names were not made here
_FILES_OF_A_CREATION = frozenset({checkpoints.PARTITION_METADATA, checkpoints.PARTITION_METADATA + ".tmp"})
_LOCK = ".lock"
_CHECKPOINTS = (checkpoints.RECOVERY_POINTS, checkpoints.START_OFFSETS, checkpoints.CLEANER_OFFSETS)
_SYNC_ONE_BY_ONE_MAX = 8  # logs; more are synced together

TopicPartition = tuple[str, int]


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class DataDir:
    """A locked data folder and its partition logs, keyed by (topic, partition). Logs open their files on first use."""

    def __init__(self, path: Path, lock: list[int], files: DiskFiles, shared: LogShared, sync: SyncGroup) -> None:
        self.path = path
        self.files = files
        self.logs: dict[TopicPartition, PartitionLog] = {}
        self.unidentified: set[TopicPartition] = set()  # folders whose topic id cannot be read: see `identify`
        self.was_clean = False  # the last run ended with close(); otherwise the logs were recovered
        self._lock = lock
        self._shared = shared
        shared.on_start_raised = self._checkpoint_starts
        self._sync = sync
        self._new_logs: dict[PartitionLog, None] = {}  # created, their folders not yet synced
        self._names_unsynced = True  # folders were created, renamed or removed, by the last run perhaps
        self._checkpointed: dict[str, dict[TopicPartition, int]] = {}  # by file name: what the file has
        self._taken: dict[str, dict[TopicPartition, int]] = {}  # by the last `take_checkpoint`; may not be written yet
        self._checkpointed_by: dict[str, int] = {}  # by file name: the number of the checkpoint that wrote it
        self._checkpoint_numbers = itertools.count(1)
        self._checkpointing = threading.Lock()
        self._checkpoints_stale = False  # a file has offsets of a partition that was deleted

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        sync: SyncGroup,
        config_of: Callable[[str], LogConfig] | None = None,
        now_ms: Callable[[], int] | None = None,
        files: DiskFiles | None = None,
        open_files_max: int | None = None,
    ) -> DataDir:
        """Locks the folder (DataDirLockedError if it is in use) and finds its partitions.

        `config_of(topic)` gives the configuration of a topic found on disk. After an unclean stop every log is
        recovered here; after a clean one they are read on first use.
        """
        root = Path(path).absolute()
        lock, cache = _take(root), None
        try:
            files = files or files_for(root)
            cache = FileCache(files, open_files_max or _open_files_max())
            shared = LogShared(cache, now_ms or wall_clock_ms, sync.waits_for_disk, sync.mark_unsynced)
            data_dir = cls(root, lock, files, shared, sync)
            data_dir._discover(config_of or (lambda _: LogConfig()))
        except BaseException:
            if cache is not None:
                cache.close_all()
            _release_lock(lock)
            raise
        return data_dir

    def _discover(self, config_of: Callable[[str], LogConfig]) -> None:
        self.was_clean = checkpoints.take_clean_shutdown(self.files, self._file(checkpoints.CLEAN_SHUTDOWN))
        self._checkpointed = {name: checkpoints.read_offsets(self._file(name)) for name in _CHECKPOINTS}
        for name in sorted(entry.name for entry in os.scandir(self.path) if entry.is_dir()):
            key = parse_folder_name(name)
            if key is not None:
                self._find_partition(key, config_of(key[0]))
            elif _DELETED_HERE.match(name):
                self._remove_later(self._file(name), 0)
            elif name.endswith(_STRAY_SUFFIX):
                _log.warning(
                    "%s was moved aside earlier; it is not used. Remove it if its records are not needed", name
                )
            else:
                _log.warning("%s is not a partition folder, left alone", name)
        if not self.was_clean:
            for log in self.logs.values():
                self._recover_log(log)

    def _find_partition(self, key: TopicPartition, config: LogConfig) -> None:
        metadata = os.path.join(self._folder(key), checkpoints.PARTITION_METADATA)
        try:
            topic_id = checkpoints.read_topic_id(metadata)
        except OSError as error:
            _log.error("%s cannot be read: %s", metadata, error)
            topic_id = None
        if topic_id is not None:
            self._open_folder(key, topic_id, config)
        elif not self._is_unfinished_creation(key):
            self.unidentified.add(key)

    def _is_unfinished_creation(self, key: TopicPartition) -> bool:
        """Whether a folder never held anything: it can be made again."""
        try:
            return _FILES_OF_A_CREATION.issuperset(os.listdir(self._folder(key)))
        except OSError:
            return False

    def _open_folder(self, key: TopicPartition, topic_id: UUID, config: LogConfig) -> PartitionLog:
        log = self.logs[key] = PartitionLog(
            self._folder(key),
            *key,
            topic_id,
            config,
            self._shared,
            clean=self.was_clean,
            recovery_point=self._checkpointed[checkpoints.RECOVERY_POINTS].get(key, 0),
            start_offset=self._checkpointed[checkpoints.START_OFFSETS].get(key, 0),
            cleaned_offset=self._checkpointed[checkpoints.CLEANER_OFFSETS].get(key, 0),
        )
        return log

    def _recover_log(self, log: PartitionLog) -> None:
        """One broken partition must not keep the others from starting; it is tried again when it is used."""
        try:
            _ = log.opened
        except StorageError as error:
            _log.error("%s could not be recovered yet: %s", log, error)

    def _file(self, name: str) -> str:
        return os.path.join(self.path, name)

    def _folder(self, key: TopicPartition) -> str:
        return self._file(f"{key[0]}-{key[1]}")

    # Partitions

    def get(self, topic: str, partition: int) -> PartitionLog | None:
        return self.logs.get((topic, partition))

    def last_known_end(self, topic: str, partition: int) -> int:
        """The end offset of a partition in the checkpoint, whether its folder exists or not."""
        return self._checkpointed[checkpoints.RECOVERY_POINTS].get((topic, partition), 0)

    def create(self, topic: str, partition: int, topic_id: UUID, config: LogConfig) -> PartitionLog:
        """A new, empty partition. Its folder exists afterwards; its segment files come with the first append."""
        key = (topic, partition)
        if key in self.logs:
            raise StorageError(ErrorCode.TOPIC_ALREADY_EXISTS, f"partition {topic}-{partition} exists already")
        folder = self._folder(key)
        try:
            if os.path.isdir(folder):
                self._free_name_of(key)
            self.files.make_dir(folder)
            checkpoints.write_topic_id(self.files, os.path.join(folder, checkpoints.PARTITION_METADATA), topic_id)
        except OSError as error:
            message = f"cannot create the folder of {topic}-{partition}: {error}"
            raise StorageError(ErrorCode.KAFKA_STORAGE_ERROR, message) from error
        log = self.logs[key] = PartitionLog(
            folder, topic, partition, topic_id, config, self._shared, clean=True, new_in=str(self.path)
        )
        self._new_logs[log] = None
        self._names_unsynced = True
        in_files = [*self._checkpointed.values(), *self._taken.values()]
        self._checkpoints_stale |= any(offsets.get(key) for offsets in in_files)
        return log

    def _free_name_of(self, key: TopicPartition) -> None:
        """A folder without a log has the name of a new partition: it is moved aside unless it never held anything."""
        if self._is_unfinished_creation(key):
            self.files.remove_tree(self._folder(key))
        else:
            self._rename_aside(key, "a new partition of that name is created")

    def identify(self, topic: str, partition: int, topic_id: UUID, config: LogConfig) -> PartitionLog:
        """Opens a folder whose topic id cannot be read, with the id that its topic is known to have."""
        key = (topic, partition)
        self.unidentified.remove(key)
        metadata = os.path.join(self._folder(key), checkpoints.PARTITION_METADATA)
        _log.error("%s cannot be read; it is written again with the id of topic %s, %s", metadata, topic, topic_id)
        try:
            checkpoints.write_topic_id(self.files, metadata, topic_id)
        except OSError as error:  # the next start tries it again
            _log.error("%s cannot be written: %s", metadata, error)
        log = self._open_folder(key, topic_id, config)
        if not self.was_clean:
            self._recover_log(log)
        return log

    def set_aside(self, topic: str, partition: int, why: str) -> None:
        """Takes a partition that belongs to no topic out of use. Its folder is renamed and stays."""
        self._take_out(topic, partition)
        self._rename_aside((topic, partition), why)

    def _rename_aside(self, key: TopicPartition, why: str) -> None:
        self.unidentified.discard(key)
        aside = self._name_aside(key, _STRAY_SUFFIX)
        self.files.rename(self._folder(key), aside)
        self._names_unsynced = True
        _log.error("%s-%d was moved aside to %s: %s. No record was deleted", *key, aside, why)

    def _name_aside(self, key: TopicPartition, suffix: str) -> str:
        return self._file(f"{key[0][:200]}-{key[1]}.{uuid4().hex}{suffix}")

    def delete(self, topic: str, partition: int) -> None:
        """Takes a partition away at once; its files go later (`garbage_removal`)."""
        log = self._take_out(topic, partition)
        renamed = self._name_aside((topic, partition), _DELETE_SUFFIX)
        try:
            self.files.rename(log.folder, renamed)
        except OSError as error:  # the store has the deletion: the next start finishes it
            _log.error("the folder of the deleted partition %s-%d cannot be renamed: %s", topic, partition, error)
            return
        self._remove_later(renamed, self._shared.now_ms() + log.config.file_delete_delay_ms)
        self._names_unsynced = True

    def _remove_later(self, folder: str, due_ms: int) -> None:
        self._shared.garbage.setdefault(str(self.path), []).append((due_ms, folder))

    def _take_out(self, topic: str, partition: int) -> PartitionLog:
        log = self.logs.pop((topic, partition), None)
        if log is None:
            raise StorageError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no partition {topic}-{partition}")
        self._sync.remove(log)
        log.mark_deleted()
        self._new_logs.pop(log, None)
        self._shared.garbage.pop(log.folder, None)  # it goes with the folder, whose name may get a new partition
        return log

    def sync_namespace(self) -> None:
        """Makes created, deleted and renamed partition folders durable. It may take long: not while clients wait.

        No acknowledged record needs it: the first sync of a log includes its folder.
        """
        if self._names_unsynced and self._sync.waits_for_disk:
            if len(self._new_logs) > _SYNC_ONE_BY_ONE_MAX:
                self.files.sync_all(str(self.path))
            else:
                for log in self._new_logs:
                    self._sync_metadata(log)
                self.files.sync_dir(str(self.path))
        self._new_logs = {}
        self._names_unsynced = False

    def drop_stale_checkpoints(self) -> None:
        """After `create`, before records come: a crash must not give a partition the offsets of a deleted one."""
        if self._checkpoints_stale:
            self.checkpoint()
            self._checkpoints_stale = False

    def _sync_metadata(self, log: PartitionLog) -> None:
        path = os.path.join(log.folder, checkpoints.PARTITION_METADATA)
        fd = self.files.open(path)
        try:
            self.files.sync_file(fd, path)
        finally:
            os.close(fd)
        self.files.sync_dir(log.folder)

    # Upkeep

    def maintain_log(self, log: PartitionLog, now_ms: int) -> None:
        """Retention and expiry of producers of one log, and the sync that flush.ms demands."""
        try:
            log.apply_retention(now_ms)
            log.expire_producers(now_ms)
            if log.config.flush_ms != INT64_MAX:
                log.sync_soon()
        except (OSError, StorageError) as error:
            _log.warning("upkeep of %s failed: %s", log, error)

    def garbage_removal(self, now_ms: int) -> Generator[None, None, None]:
        """Removes what was deleted long ago. Yields after each file: there may be many, and each may be large."""
        for path in self._take_garbage(now_ms):
            try:
                if os.path.isdir(path):
                    for name in os.listdir(path):
                        self.files.remove(os.path.join(path, name))
                        yield
                    self.files.remove_dir(path)
                else:
                    self.files.remove(path)
            except FileNotFoundError:
                pass
            except OSError as error:  # as with a folder inside that is not ours; the next start tries again
                _log.warning("%s cannot be removed: %s", path, error)
            yield

    def _take_garbage(self, now_ms: int) -> Iterator[str]:
        """What is due, one after the other. Meanwhile a partition may be deleted, and its garbage goes with its folder:
        the name may belong to a new partition then."""
        garbage = self._shared.garbage
        for folder in list(garbage):
            entries = garbage.get(folder, [])
            garbage[folder] = later = [entry for entry in entries if entry[0] > now_ms]
            for due_ms, path in entries:
                if due_ms <= now_ms and garbage.get(folder) is later:
                    yield path
            if not later and garbage.get(folder) is later:
                del garbage[folder]

    def checkpoint(self) -> None:
        """Writes the checkpoints that changed: recovery points, start offsets, high watermarks, cleaned offsets."""
        self.take_checkpoint()()

    def take_checkpoint(self) -> Callable[[], None]:
        """Takes the offsets as they are; what it returns writes them, on any thread, as it waits for the disk."""
        logs = self.logs.items()
        self._taken = taken = {
            checkpoints.RECOVERY_POINTS: {key: log.recovery_point for key, log in logs},
            checkpoints.START_OFFSETS: self._start_offsets(),
            checkpoints.HIGH_WATERMARKS: {
                key: log.high_watermark if log.is_open else log.recovery_point for key, log in logs
            },
            checkpoints.CLEANER_OFFSETS: {key: log.cleaned_offset for key, log in logs if log.cleaned_offset},
        }
        return functools.partial(self._write_checkpoints, taken, next(self._checkpoint_numbers))

    def _checkpoint_starts(self) -> None:
        self._write_checkpoints({checkpoints.START_OFFSETS: self._start_offsets()}, next(self._checkpoint_numbers))

    def _start_offsets(self) -> dict[TopicPartition, int]:
        return {key: log.known_start_offset for key, log in self.logs.items() if log.known_start_offset}

    def _write_checkpoints(self, taken: Mapping[str, dict[TopicPartition, int]], number: int) -> None:
        with self._checkpointing:
            for name, offsets in taken.items():
                if number < self._checkpointed_by.get(name, 0):
                    continue  # taken before what the file has: deleted records would come back
                if self._checkpointed.get(name) != offsets:
                    checkpoints.write_offsets(self.files, self._file(name), offsets)
                    self._checkpointed[name] = offsets
                self._checkpointed_by[name] = number

    # Identity

    def properties(self) -> dict[str, str]:
        """meta.properties (cluster.id, node.id, ...); empty in a new folder."""
        return checkpoints.read_properties(self._file(checkpoints.META_PROPERTIES))

    def init_properties(self, properties: Mapping[str, str]) -> None:
        checkpoints.write_properties(self.files, self._file(checkpoints.META_PROPERTIES), properties)

    # Ending

    def close(self) -> None:
        """Clean shutdown: flushes and snapshots every log, writes the checkpoints and the clean-shutdown marker."""
        at_once = sum(log.is_unsaved for log in self.logs.values()) > _SYNC_ONE_BY_ONE_MAX
        unclean = [log for log in self.logs.values() if not self._close_log(log, sync=not at_once)]
        try:
            if at_once:
                self.files.sync_all(str(self.path))
            self.sync_namespace()
            self.checkpoint()
            if not unclean:
                checkpoints.write_clean_shutdown(self.files, self._file(checkpoints.CLEAN_SHUTDOWN))
        finally:
            _release_lock(self._lock)
            self._lock = []

    def _close_log(self, log: PartitionLog, *, sync: bool) -> bool:
        try:
            log.close(sync=sync)
        except (OSError, StorageError) as error:
            _log.error("%s could not be closed cleanly and will be recovered: %s", log, error)
            return False
        return True

    def crash(self) -> None:
        """Drops everything without writing a byte, as kill -9 would: for tests in one process."""
        for log in self.logs.values():
            log.mark_deleted()
        _release_lock(self._lock)
        self._lock = []


def _open_files_max() -> int:
    """Half of what the system allows; the rest is for connections."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(64, min(4096, allowed // 2))


def parse_folder_name(name: str) -> TopicPartition | None:
    """`orders-12` is partition 12 of orders; None for other folders."""
    topic, dash, number = name.rpartition("-")
    if not topic or not dash or not number.isascii() or not number.isdigit():
        return None
    return topic, int(number)


def _take(root: Path) -> list[int]:
    """Makes the folder and locks it. An OSError says which folder it is, and why it cannot be used."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        return _take_lock(root)
    except OSError as error:
        is_file = isinstance(error, FileExistsError | NotADirectoryError)
        why = "it is a file" if is_file else error.strerror
        remedy = "choose a folder that this user may write to"
        raise OSError(error.errno, f"{root} cannot be the data folder: {why}; {remedy}") from error


def _take_lock(root: Path) -> list[int]:
    """Two kinds of lock: one that Java's Kafka respects, one that also holds between two brokers of one process."""
    fd = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise DataDirLockedError(
            f"the data folder {root} is in use by another broker; stop it, or give this one another folder"
        ) from None
    return [fd]


def _release_lock(lock: Iterable[int]) -> None:
    for fd in lock:
        os.close(fd)
