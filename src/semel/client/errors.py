"""What can go wrong in the client, sorted once by what the caller can do about it.

Every error has a `recovery` (`semel.protocol.errors.Recovery`) and, where a broker said so, its `code`:

    RetriableError    transient; the client has retried within its timeout, the same call may work later
    AbortableError    this transaction (or this batch) is lost; abort it and go on with the same producer
    FencedError       a newer owner has this identity; stop, never write under it again
    FatalError        settings, rights or data must change first

Messages say what happened, what was expected and what to do.
"""

from __future__ import annotations

from typing import Any

from semel.protocol.errors import ErrorCode, Recovery


class KafkaError(Exception):
    """Base of everything that the client raises on purpose."""

    recovery: Recovery = Recovery.FATAL

    def __init__(self, message: str, code: ErrorCode | None = None) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:  # OSError has ideas of its own
        return type(self), (str(self), self.code), self.__dict__


class RetriableError(KafkaError):
    """Transient: the same call may succeed later."""

    recovery = Recovery.RETRY


class AbortableError(KafkaError):
    """The current transaction or batch is lost; abort, then go on."""

    recovery = Recovery.ABORT


class FencedError(KafkaError):
    """A newer owner took over this transactional id or group instance; this one must stop."""

    recovery = Recovery.FENCED


class FatalError(KafkaError):
    """Neither retrying nor aborting helps."""


class ConnectionFailedError(RetriableError):
    """A broker cannot be reached, or closed the connection; `maybe_sent` says whether it may have got the request."""

    retry_after_s = 0.0  # above 0: no attempt was made, and the next one will be after this time (reconnect.backoff.ms)

    def __init__(self, message: str, code: ErrorCode | None = None, maybe_sent: bool = False) -> None:
        super().__init__(message, code)
        self.maybe_sent = maybe_sent


class RequestTimedOutError(ConnectionFailedError, TimeoutError):
    """A broker did not respond in time; the connection was closed, and the broker may have done the work."""


class TimedOutError(RetriableError, TimeoutError):
    """The call's timeout passed; the message says what it was still waiting for."""


class DeliveryTimedOutError(TimedOutError):
    """A record could not be delivered within delivery.timeout.ms; whether it was stored is unknown."""


class BufferFullError(TimedOutError):
    """buffer.memory stayed full for max.block.ms: the broker is slower than the program."""


class ConfigError(FatalError, ValueError):
    """An option that does not exist, has an impossible value, or does not go with another."""


class UnsupportedByBrokerError(FatalError):
    """The broker does not have this API, version or feature."""


class AuthenticationError(FatalError):
    """TLS or SASL refused: wrong credentials, mechanism or certificate."""


class RecordTooLargeError(FatalError, ValueError):
    """A record is larger than max.request.size (checked here) or max.message.bytes (checked by the broker)."""


class SerializationError(FatalError, ValueError):
    """A record's key or value that its serializer could not take; nothing of the record was sent."""

    def __init__(self, message: str, code: ErrorCode | None = None, topic: str = "", key: object = None) -> None:
        super().__init__(message, code)
        self.topic = topic
        self.key = key  # as it was given to send()


class TableTooLargeError(FatalError, ValueError):
    """A topic has more to read than the table may hold."""


class IllegalStateError(FatalError, RuntimeError):
    """A call in the wrong order, such as a send outside of a transaction."""


class ConcurrentUseError(IllegalStateError):
    """A second thread called an object that belongs to one thread at a time."""


class ClosedError(IllegalStateError):
    """Use after close."""


class CommitUncertainError(KafkaError):
    """A commit was sent, and its outcome cannot be found out. See docs/decisions/0031."""


_CLASS_OF: dict[Recovery, type[KafkaError]] = {
    Recovery.RETRY: RetriableError,
    Recovery.ABORT: AbortableError,
    Recovery.FENCED: FencedError,
    Recovery.FATAL: FatalError,
    Recovery.NOTHING: FatalError,
}

_CLASS_OF_CODE: dict[ErrorCode, type[KafkaError]] = {
    ErrorCode.SASL_AUTHENTICATION_FAILED: AuthenticationError,
    ErrorCode.UNSUPPORTED_SASL_MECHANISM: AuthenticationError,
    ErrorCode.ILLEGAL_SASL_STATE: AuthenticationError,
    ErrorCode.UNSUPPORTED_VERSION: UnsupportedByBrokerError,
    ErrorCode.MESSAGE_TOO_LARGE: RecordTooLargeError,
    ErrorCode.RECORD_LIST_TOO_LARGE: RecordTooLargeError,
}

_REMEDY: dict[ErrorCode, str] = {
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: "create the topic or check its name and the partition number",
    ErrorCode.LEADER_NOT_AVAILABLE: "an election may be under way; try again",
    ErrorCode.NOT_LEADER_OR_FOLLOWER: "leadership moved; try again",
    ErrorCode.MESSAGE_TOO_LARGE: "raise max.message.bytes of the topic or write smaller records",
    ErrorCode.RECORD_LIST_TOO_LARGE: "raise segment.bytes of the topic or lower batch.size",
    ErrorCode.NOT_ENOUGH_REPLICAS: "bring replicas back in sync or lower min.insync.replicas",
    ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND: "bring replicas back in sync or lower min.insync.replicas",
    ErrorCode.TOPIC_AUTHORIZATION_FAILED: "give this user the rights on the topic (ACL)",
    ErrorCode.GROUP_AUTHORIZATION_FAILED: "give this user the rights on the group (ACL)",
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED: "give this user the rights on the cluster (ACL)",
    ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "give this user the rights on the transactional id (ACL)",
    ErrorCode.INVALID_PRODUCER_EPOCH: "another producer with the same transactional.id took over, or the transaction "
    "timed out; stop this one, or start anew with init_transactions()",
    ErrorCode.PRODUCER_FENCED: "another producer with the same transactional.id took over, or the transaction timed "
    "out; stop this one, or start anew with init_transactions()",
    ErrorCode.INVALID_PRODUCER_ID_MAPPING: "the transactional.id expired or belongs to another producer; start anew",
    ErrorCode.INVALID_TXN_STATE: "the broker's view of the transaction differs from this producer's; start anew",
    ErrorCode.INVALID_TRANSACTION_TIMEOUT: "lower transaction.timeout.ms to at most the broker's "
    "transaction.max.timeout.ms",
    ErrorCode.CONCURRENT_TRANSACTIONS: "the previous transaction is still being finished; try again",
    ErrorCode.TRANSACTION_ABORTABLE: "abort the transaction and run it again",
    ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER: "an earlier batch was lost; abort the transaction and run it again",
    ErrorCode.UNKNOWN_PRODUCER_ID: "the broker forgot this producer; abort the transaction and run it again",
    ErrorCode.ILLEGAL_GENERATION: "the group was rebalanced; abort the transaction and go on with the new assignment",
    ErrorCode.UNKNOWN_MEMBER_ID: "the group no longer has this member; abort the transaction and join again",
    ErrorCode.FENCED_INSTANCE_ID: "another consumer with the same group.instance.id took over; stop this one",
    ErrorCode.STALE_MEMBER_EPOCH: "the group was rebalanced; abort the transaction and go on with the new assignment",
    ErrorCode.FENCED_MEMBER_EPOCH: "the group went on without this member; it joins again",
    ErrorCode.UNRELEASED_INSTANCE_ID: "another consumer with the same group.instance.id is in the group: close it, or "
    "wait until its session ends (the broker's group.consumer.session.timeout.ms)",
    ErrorCode.UNSUPPORTED_ASSIGNOR: "group.remote.assignor must be one of the broker's group.consumer.assignors",
    ErrorCode.GROUP_MAX_SIZE_REACHED: "run fewer members, or raise the broker's group.consumer.max.size "
    "(group.max.size of classic groups)",
    ErrorCode.INVALID_REGULAR_EXPRESSION: "the broker reads expressions of RE2; correct it, or subscribe to names",
    ErrorCode.REBALANCE_IN_PROGRESS: "abort the transaction and go on with the new assignment",
    ErrorCode.COORDINATOR_NOT_AVAILABLE: "the coordinator is starting or moving; try again",
    ErrorCode.NOT_COORDINATOR: "the coordinator moved; try again",
    ErrorCode.UNSUPPORTED_VERSION: "upgrade the broker, or do without this feature",
    ErrorCode.SASL_AUTHENTICATION_FAILED: "check sasl.username and sasl.password",
    ErrorCode.TOPIC_ALREADY_EXISTS: "use the topic that is there, or another name",
    ErrorCode.INVALID_REPLICATION_FACTOR: "use at most as many replicas as there are brokers",
    ErrorCode.INVALID_TOPIC_EXCEPTION: "a topic name has 1-249 of the characters a-z A-Z 0-9 . _ -",
}


def error_of(code: int, what: str, detail: str | None = None) -> KafkaError:
    """The exception for a broker's error code; `what` says what was being done, `detail` is the broker's own text."""
    known = ErrorCode.of(code)
    kind = _CLASS_OF_CODE.get(known) or _CLASS_OF[known.recovery]
    name = known.name if known == code else f"error {code}, which this client does not know"
    said = f" ({detail})" if detail else ""
    remedy = _REMEDY.get(known)
    return kind(f"{what}: the broker returned {name}{said}" + (f"; {remedy}" if remedy else ""), known)


def is_network(error: BaseException) -> bool:
    """Whether an error came from the network rather than from a broker's decision."""
    return isinstance(error, ConnectionFailedError)
