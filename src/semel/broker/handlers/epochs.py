"""Leader epochs: a client that knows an older or a newer leader than this one is told so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.protocol.errors import ErrorCode

if TYPE_CHECKING:
    from semel.storage import PartitionLog


def epoch_error(log: PartitionLog, current_leader_epoch: int) -> ErrorCode:
    """-1 stands for a client that does not know the epoch."""
    if current_leader_epoch < 0 or current_leader_epoch == log.leader_epoch:
        return ErrorCode.NONE
    if current_leader_epoch < log.leader_epoch:
        return ErrorCode.FENCED_LEADER_EPOCH
    return ErrorCode.UNKNOWN_LEADER_EPOCH
