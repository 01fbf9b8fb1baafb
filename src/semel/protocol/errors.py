"""Kafka's error codes, each with its recovery. The one place where errors are sorted."""

from __future__ import annotations

from enum import Enum, IntEnum


class Recovery(Enum):
    """What the receiver of an error should do next."""

    NOTHING = "nothing"  # not an error
    RETRY = "retry"  # the same request may succeed later (often after a metadata refresh)
    ABORT = "abort"  # the current transaction (or request) is lost; abort it, then go on with the same producer
    FENCED = "fenced"  # somebody newer owns this identity; stop and never write again under it
    FATAL = "fatal"  # neither retrying nor aborting helps; configuration, rights or data must change


class ErrorCode(IntEnum):
    """An error code of the wire protocol."""

    recovery: Recovery

    def __new__(cls, code: int, recovery: Recovery = Recovery.FATAL) -> ErrorCode:
        member = int.__new__(cls, code)
        member._value_ = code
        member.recovery = recovery
        return member

    @property
    def retriable(self) -> bool:
        return self.recovery is Recovery.RETRY

    @property
    def fenced(self) -> bool:
        return self.recovery is Recovery.FENCED

    @property
    def fatal(self) -> bool:
        return self.recovery is Recovery.FATAL

    @classmethod
    def of(cls, code: int) -> ErrorCode:
        """The code as a member; a code of a newer broker that is not in the table counts as UNKNOWN_SERVER_ERROR."""
        try:
            return cls(code)
        except ValueError:
            return cls.UNKNOWN_SERVER_ERROR

    UNKNOWN_SERVER_ERROR = -1, Recovery.FATAL
    NONE = 0, Recovery.NOTHING
    OFFSET_OUT_OF_RANGE = 1, Recovery.FATAL
    CORRUPT_MESSAGE = 2, Recovery.RETRY
    UNKNOWN_TOPIC_OR_PARTITION = 3, Recovery.RETRY
    INVALID_FETCH_SIZE = 4, Recovery.FATAL
    LEADER_NOT_AVAILABLE = 5, Recovery.RETRY
    NOT_LEADER_OR_FOLLOWER = 6, Recovery.RETRY
    REQUEST_TIMED_OUT = 7, Recovery.RETRY
    BROKER_NOT_AVAILABLE = 8, Recovery.FATAL
    REPLICA_NOT_AVAILABLE = 9, Recovery.RETRY
    MESSAGE_TOO_LARGE = 10, Recovery.ABORT
    STALE_CONTROLLER_EPOCH = 11, Recovery.FATAL
    OFFSET_METADATA_TOO_LARGE = 12, Recovery.ABORT
    NETWORK_EXCEPTION = 13, Recovery.RETRY
    COORDINATOR_LOAD_IN_PROGRESS = 14, Recovery.RETRY
    COORDINATOR_NOT_AVAILABLE = 15, Recovery.RETRY
    NOT_COORDINATOR = 16, Recovery.RETRY
    INVALID_TOPIC_EXCEPTION = 17, Recovery.ABORT
    RECORD_LIST_TOO_LARGE = 18, Recovery.ABORT
    NOT_ENOUGH_REPLICAS = 19, Recovery.RETRY
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20, Recovery.RETRY
    INVALID_REQUIRED_ACKS = 21, Recovery.FATAL
    ILLEGAL_GENERATION = 22, Recovery.ABORT
    INCONSISTENT_GROUP_PROTOCOL = 23, Recovery.FATAL
    INVALID_GROUP_ID = 24, Recovery.FATAL
    UNKNOWN_MEMBER_ID = 25, Recovery.ABORT
    INVALID_SESSION_TIMEOUT = 26, Recovery.FATAL
    REBALANCE_IN_PROGRESS = 27, Recovery.ABORT
    INVALID_COMMIT_OFFSET_SIZE = 28, Recovery.ABORT
    TOPIC_AUTHORIZATION_FAILED = 29, Recovery.ABORT
    GROUP_AUTHORIZATION_FAILED = 30, Recovery.ABORT
    CLUSTER_AUTHORIZATION_FAILED = 31, Recovery.FATAL
    INVALID_TIMESTAMP = 32, Recovery.ABORT
    UNSUPPORTED_SASL_MECHANISM = 33, Recovery.FATAL
    ILLEGAL_SASL_STATE = 34, Recovery.FATAL
    UNSUPPORTED_VERSION = 35, Recovery.FATAL
    TOPIC_ALREADY_EXISTS = 36, Recovery.FATAL
    INVALID_PARTITIONS = 37, Recovery.FATAL
    INVALID_REPLICATION_FACTOR = 38, Recovery.FATAL
    INVALID_REPLICA_ASSIGNMENT = 39, Recovery.FATAL
    INVALID_CONFIG = 40, Recovery.FATAL
    NOT_CONTROLLER = 41, Recovery.RETRY
    INVALID_REQUEST = 42, Recovery.FATAL
    UNSUPPORTED_FOR_MESSAGE_FORMAT = 43, Recovery.FATAL
    POLICY_VIOLATION = 44, Recovery.FATAL
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45, Recovery.ABORT
    DUPLICATE_SEQUENCE_NUMBER = 46, Recovery.FATAL
    INVALID_PRODUCER_EPOCH = 47, Recovery.FENCED
    INVALID_TXN_STATE = 48, Recovery.FATAL
    INVALID_PRODUCER_ID_MAPPING = 49, Recovery.FENCED
    INVALID_TRANSACTION_TIMEOUT = 50, Recovery.FATAL
    CONCURRENT_TRANSACTIONS = 51, Recovery.RETRY
    TRANSACTION_COORDINATOR_FENCED = 52, Recovery.FENCED
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53, Recovery.FATAL
    SECURITY_DISABLED = 54, Recovery.FATAL
    OPERATION_NOT_ATTEMPTED = 55, Recovery.ABORT
    KAFKA_STORAGE_ERROR = 56, Recovery.RETRY
    LOG_DIR_NOT_FOUND = 57, Recovery.FATAL
    SASL_AUTHENTICATION_FAILED = 58, Recovery.FATAL
    UNKNOWN_PRODUCER_ID = 59, Recovery.ABORT
    REASSIGNMENT_IN_PROGRESS = 60, Recovery.FATAL
    DELEGATION_TOKEN_AUTH_DISABLED = 61, Recovery.FATAL
    DELEGATION_TOKEN_NOT_FOUND = 62, Recovery.FATAL
    DELEGATION_TOKEN_OWNER_MISMATCH = 63, Recovery.FATAL
    DELEGATION_TOKEN_REQUEST_NOT_ALLOWED = 64, Recovery.FATAL
    DELEGATION_TOKEN_AUTHORIZATION_FAILED = 65, Recovery.FATAL
    DELEGATION_TOKEN_EXPIRED = 66, Recovery.FATAL
    INVALID_PRINCIPAL_TYPE = 67, Recovery.FATAL
    NON_EMPTY_GROUP = 68, Recovery.FATAL
    GROUP_ID_NOT_FOUND = 69, Recovery.FATAL
    FETCH_SESSION_ID_NOT_FOUND = 70, Recovery.RETRY
    INVALID_FETCH_SESSION_EPOCH = 71, Recovery.RETRY
    LISTENER_NOT_FOUND = 72, Recovery.RETRY
    TOPIC_DELETION_DISABLED = 73, Recovery.FATAL
    FENCED_LEADER_EPOCH = 74, Recovery.RETRY
    UNKNOWN_LEADER_EPOCH = 75, Recovery.RETRY
    UNSUPPORTED_COMPRESSION_TYPE = 76, Recovery.ABORT
    STALE_BROKER_EPOCH = 77, Recovery.FATAL
    OFFSET_NOT_AVAILABLE = 78, Recovery.RETRY
    MEMBER_ID_REQUIRED = 79, Recovery.FATAL
    PREFERRED_LEADER_NOT_AVAILABLE = 80, Recovery.RETRY
    GROUP_MAX_SIZE_REACHED = 81, Recovery.FATAL
    FENCED_INSTANCE_ID = 82, Recovery.FENCED
    ELIGIBLE_LEADERS_NOT_AVAILABLE = 83, Recovery.RETRY
    ELECTION_NOT_NEEDED = 84, Recovery.RETRY
    NO_REASSIGNMENT_IN_PROGRESS = 85, Recovery.FATAL
    GROUP_SUBSCRIBED_TO_TOPIC = 86, Recovery.FATAL
    INVALID_RECORD = 87, Recovery.ABORT
    UNSTABLE_OFFSET_COMMIT = 88, Recovery.RETRY
    THROTTLING_QUOTA_EXCEEDED = 89, Recovery.RETRY
    PRODUCER_FENCED = 90, Recovery.FENCED
    RESOURCE_NOT_FOUND = 91, Recovery.FATAL
    DUPLICATE_RESOURCE = 92, Recovery.FATAL
    UNACCEPTABLE_CREDENTIAL = 93, Recovery.FATAL
    INCONSISTENT_VOTER_SET = 94, Recovery.FATAL
    INVALID_UPDATE_VERSION = 95, Recovery.FATAL
    FEATURE_UPDATE_FAILED = 96, Recovery.FATAL
    PRINCIPAL_DESERIALIZATION_FAILURE = 97, Recovery.FATAL
    SNAPSHOT_NOT_FOUND = 98, Recovery.FATAL
    POSITION_OUT_OF_RANGE = 99, Recovery.FATAL
    UNKNOWN_TOPIC_ID = 100, Recovery.RETRY
    DUPLICATE_BROKER_REGISTRATION = 101, Recovery.FATAL
    BROKER_ID_NOT_REGISTERED = 102, Recovery.FATAL
    INCONSISTENT_TOPIC_ID = 103, Recovery.RETRY
    INCONSISTENT_CLUSTER_ID = 104, Recovery.FATAL
    TRANSACTIONAL_ID_NOT_FOUND = 105, Recovery.FATAL
    FETCH_SESSION_TOPIC_ID_ERROR = 106, Recovery.RETRY
    INELIGIBLE_REPLICA = 107, Recovery.FATAL
    NEW_LEADER_ELECTED = 108, Recovery.FATAL
    OFFSET_MOVED_TO_TIERED_STORAGE = 109, Recovery.FATAL
    FENCED_MEMBER_EPOCH = 110, Recovery.FENCED
    UNRELEASED_INSTANCE_ID = 111, Recovery.FATAL
    UNSUPPORTED_ASSIGNOR = 112, Recovery.FATAL
    STALE_MEMBER_EPOCH = 113, Recovery.ABORT
    MISMATCHED_ENDPOINT_TYPE = 114, Recovery.FATAL
    UNSUPPORTED_ENDPOINT_TYPE = 115, Recovery.FATAL
    UNKNOWN_CONTROLLER_ID = 116, Recovery.FATAL
    UNKNOWN_SUBSCRIPTION_ID = 117, Recovery.FATAL
    TELEMETRY_TOO_LARGE = 118, Recovery.FATAL
    INVALID_REGISTRATION = 119, Recovery.FATAL
    TRANSACTION_ABORTABLE = 120, Recovery.ABORT
    INVALID_RECORD_STATE = 121, Recovery.FATAL
    SHARE_SESSION_NOT_FOUND = 122, Recovery.RETRY
    INVALID_SHARE_SESSION_EPOCH = 123, Recovery.RETRY
    FENCED_STATE_EPOCH = 124, Recovery.FATAL
    INVALID_VOTER_KEY = 125, Recovery.FATAL
    DUPLICATE_VOTER = 126, Recovery.FATAL
    VOTER_NOT_FOUND = 127, Recovery.FATAL
    INVALID_REGULAR_EXPRESSION = 128, Recovery.FATAL
    REBOOTSTRAP_REQUIRED = 129, Recovery.FATAL
    STREAMS_INVALID_TOPOLOGY = 130, Recovery.FATAL
    STREAMS_INVALID_TOPOLOGY_EPOCH = 131, Recovery.FATAL
    STREAMS_TOPOLOGY_FENCED = 132, Recovery.FATAL
    SHARE_SESSION_LIMIT_REACHED = 133, Recovery.RETRY


class ProtocolError(Exception):
    """Base of everything that the protocol package raises."""


class DecodeError(ProtocolError):
    """Bytes that are not what the protocol says they should be."""


class EncodeError(ProtocolError):
    """A value that cannot be written in the requested version of a message."""


class CorruptBatchError(DecodeError):
    """A record batch whose checksum, lengths or counts do not hold. The error code for it is CORRUPT_MESSAGE."""

    code = ErrorCode.CORRUPT_MESSAGE


class UnsupportedVersionError(ProtocolError):
    """An API key or version that this side does not speak. The error code for it is UNSUPPORTED_VERSION."""

    code = ErrorCode.UNSUPPORTED_VERSION


class UnsupportedCompressionError(DecodeError):
    """A compression type that nobody defined. The error code for it is UNSUPPORTED_COMPRESSION_TYPE."""

    code = ErrorCode.UNSUPPORTED_COMPRESSION_TYPE


class TooLargeError(DecodeError):
    """Data that would need more memory than the stated limit, such as a decompression bomb."""

    code = ErrorCode.MESSAGE_TOO_LARGE
