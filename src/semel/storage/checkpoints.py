"""Kafka's small text files: offset checkpoints, the leader epochs of a partition, its topic id, meta.properties.

All are replaced whole (written aside, synced, renamed). A file that is missing or torn reads as empty: what it holds
can be found again from the log, it is only slower.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from uuid import UUID

from semel.storage.files import DiskFiles

RECOVERY_POINTS = "recovery-point-offset-checkpoint"
START_OFFSETS = "log-start-offset-checkpoint"
HIGH_WATERMARKS = "replication-offset-checkpoint"
CLEANER_OFFSETS = "cleaner-offset-checkpoint"
LEADER_EPOCHS = "leader-epoch-checkpoint"
PARTITION_METADATA = "partition.metadata"
META_PROPERTIES = "meta.properties"
CLEAN_SHUTDOWN = ".kafka_cleanshutdown"

TopicPartition = tuple[str, int]
Epochs = list[tuple[int, int]]  # (leader epoch, first offset), ascending


def read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def write_offsets(files: DiskFiles, path: str, offsets: Mapping[TopicPartition, int]) -> None:
    """`topic partition offset` per line, after the version and the count."""
    rows = "".join(f"{topic} {partition} {offset}\n" for (topic, partition), offset in offsets.items())
    files.write_whole(path, f"0\n{len(offsets)}\n{rows}".encode())


def read_offsets(path: str) -> dict[TopicPartition, int]:
    offsets = {}
    for fields in _rows(path):
        if len(fields) == 3:
            offsets[fields[0], int(fields[1])] = int(fields[2])
    return offsets


def write_epochs(files: DiskFiles, path: str, epochs: Epochs, *, sync: bool = True) -> None:
    """`epoch start-offset` per line, after the version and the count."""
    rows = [f"{epoch} {start_offset}\n" for epoch, start_offset in epochs]
    files.write_whole(path, f"0\n{len(rows)}\n{''.join(rows)}".encode(), sync=sync)


def read_epochs(path: str) -> Epochs:
    return [(int(fields[0]), int(fields[1])) for fields in _rows(path) if len(fields) == 2]


def epoch_end_offset(epochs: Epochs, requested: int, current: int, log_end: int) -> tuple[int, int]:
    """(epoch, end offset) for OffsetForLeaderEpoch; (-1, -1) if the epoch is unknown."""
    if requested == current:
        return requested, log_end
    if requested > current or requested < 0:
        return -1, -1
    known = [*epochs, (current, log_end)]
    epoch = max((epoch for epoch, _ in known if epoch <= requested), default=requested)
    return epoch, next(start for later, start in known if later > requested)


def epoch_at(epochs: Epochs, offset: int) -> int:
    """The epoch that an offset was written in; -1 if it is not known."""
    return next((epoch for epoch, start in reversed(epochs) if start <= offset), -1)


def epochs_from(epochs: Epochs, offset: int) -> Epochs:
    """The epochs of a log that lost everything before an offset."""
    below = [entry for entry in epochs if entry[1] <= offset]
    return ([(below[-1][0], offset)] if below else []) + epochs[len(below) :]


def _rows(path: str) -> list[list[str]]:
    """The rows of a checkpoint; none if its version, its count or a number is not as expected."""
    lines = read_text(path).splitlines()
    if len(lines) < 2 or lines[0] != "0" or lines[1] != str(len(lines) - 2):
        return []
    rows = [line.split(" ") for line in lines[2:]]
    whole = all(len(row) > 1 and all(_is_number(field) for field in row[-2:]) for row in rows)
    return rows if whole else []


def _is_number(text: str) -> bool:
    return text.isascii() and text.removeprefix("-").isdigit()


def topic_id_text(topic_id: UUID) -> str:
    """Kafka's way to write a UUID: 22 characters of URL-safe base64."""
    return base64.urlsafe_b64encode(topic_id.bytes).decode().rstrip("=")


def write_topic_id(files: DiskFiles, path: str, topic_id: UUID) -> None:
    files.write_whole(path, f"version: 0\ntopic_id: {topic_id_text(topic_id)}".encode(), sync=False)


def read_topic_id(path: str) -> UUID | None:
    for line in read_text(path).splitlines():
        name, _, value = line.partition(": ")
        if name == "topic_id":
            try:
                return UUID(bytes=base64.urlsafe_b64decode(value.strip() + "=="))
            except ValueError:
                return None
    return None


def write_properties(files: DiskFiles, path: str, properties: Mapping[str, str]) -> None:
    lines = "".join(f"{name}={value}\n" for name, value in sorted(properties.items()))
    files.write_whole(path, f"#\n{lines}".encode())


def read_properties(path: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in read_text(path).splitlines() if not line.startswith("#"))
    return {name: value for name, equals, value in pairs if equals}


def write_clean_shutdown(files: DiskFiles, path: str) -> None:
    files.write_whole(path, json.dumps({"version": 0, "brokerEpoch": -1}, separators=(",", ":")).encode())


def take_clean_shutdown(files: DiskFiles, path: str) -> bool:
    """Whether the last run ended cleanly. The mark is removed, and the removal synced, before anything is written."""
    if not os.path.exists(path):
        return False
    files.remove(path)
    files.sync_dir(os.path.dirname(path))
    return True
