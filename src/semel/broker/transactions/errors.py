"""Which error a client of which version gets. The coordinator decides in Kafka's newest words; this translates."""

from __future__ import annotations

from semel.protocol.errors import ErrorCode


def for_version(error: ErrorCode, version: int, *, knows_fenced_from: int) -> ErrorCode:
    """PRODUCER_FENCED came late; older clients know its predecessor."""
    if error is ErrorCode.PRODUCER_FENCED and version < knows_fenced_from:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    return error


def append_error(error: ErrorCode, *, is_v2: bool, knows_abortable: bool) -> ErrorCode:
    """What a write into a transaction is told (Produce), from what adding or verifying its partition said."""
    if error is ErrorCode.PRODUCER_FENCED:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    if error is ErrorCode.TRANSACTION_ABORTABLE and not knows_abortable:
        return ErrorCode.INVALID_TXN_STATE
    if error is ErrorCode.CONCURRENT_TRANSACTIONS and not is_v2:
        return ErrorCode.NOT_ENOUGH_REPLICAS  # the retriable error that every producer knows
    return error


def offsets_error(error: ErrorCode, *, knows_abortable: bool) -> ErrorCode:
    """The same for TxnOffsetCommit."""
    if error is ErrorCode.PRODUCER_FENCED:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    if error is ErrorCode.TRANSACTION_ABORTABLE and not knows_abortable:
        return ErrorCode.INVALID_TXN_STATE
    return error
