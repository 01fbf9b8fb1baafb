"""The leader epochs of a partition: which epoch wrote from which offset on (`leader-epoch-checkpoint`)."""

from __future__ import annotations

Epochs = list[tuple[int, int]]  # (epoch, first offset), ascending


def end_offset(epochs: Epochs, asked: int, current: int, log_end: int) -> tuple[int, int]:
    """(epoch, end offset) for OffsetForLeaderEpoch; (-1, -1) if the epoch is unknown."""
    if asked == current:
        return asked, log_end
    if asked > current or asked < 0:
        return -1, -1
    known = [*epochs, (current, log_end)]
    epoch = max((epoch for epoch, _ in known if epoch <= asked), default=asked)
    return epoch, next(start for later, start in known if later > asked)


def epoch_at(epochs: Epochs, offset: int) -> int:
    """The epoch that an offset was written in; -1 if it is not known."""
    return next((epoch for epoch, start in reversed(epochs) if start <= offset), -1)


def starting_at(epochs: Epochs, offset: int) -> Epochs:
    """The epochs of a log that lost everything before an offset."""
    below = [entry for entry in epochs if entry[1] <= offset]
    return ([(below[-1][0], offset)] if below else []) + epochs[len(below) :]
