"""Every error that semel raises on purpose, in one place; `from semel import KafkaError` works as well.

Each is loaded from where it lives when it is first used, so that no program pays for Spark's because of the client's.
`Recovery` says what a program can do about an error of the client, `ErrorCode` what the broker returned.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from semel.client.errors import AbortableError as AbortableError
    from semel.client.errors import AuthenticationError as AuthenticationError
    from semel.client.errors import BufferFullError as BufferFullError
    from semel.client.errors import ClosedError as ClosedError
    from semel.client.errors import CommitUncertainError as CommitUncertainError
    from semel.client.errors import ConcurrentUseError as ConcurrentUseError
    from semel.client.errors import ConfigError as ConfigError
    from semel.client.errors import ConnectionFailedError as ConnectionFailedError
    from semel.client.errors import DeliveryTimedOutError as DeliveryTimedOutError
    from semel.client.errors import FatalError as FatalError
    from semel.client.errors import FencedError as FencedError
    from semel.client.errors import IllegalStateError as IllegalStateError
    from semel.client.errors import KafkaError as KafkaError
    from semel.client.errors import RecordTooLargeError as RecordTooLargeError
    from semel.client.errors import RequestTimedOutError as RequestTimedOutError
    from semel.client.errors import RetriableError as RetriableError
    from semel.client.errors import SerializationError as SerializationError
    from semel.client.errors import TableTooLargeError as TableTooLargeError
    from semel.client.errors import TimedOutError as TimedOutError
    from semel.client.errors import UnsupportedByBrokerError as UnsupportedByBrokerError
    from semel.client.types import CommitFailedError as CommitFailedError
    from semel.client.types import CorruptRecordError as CorruptRecordError
    from semel.client.types import DeserializationError as DeserializationError
    from semel.client.types import NoOffsetError as NoOffsetError
    from semel.client.types import OffsetOutOfRangeError as OffsetOutOfRangeError
    from semel.client.types import PartitionError as PartitionError
    from semel.client.types import RebalanceError as RebalanceError
    from semel.client.types import UnknownPartitionError as UnknownPartitionError
    from semel.local.brokers import BrokerFailedError as BrokerFailedError
    from semel.patterns.entity_writer import AppendRefusedError as AppendRefusedError
    from semel.patterns.entity_writer import AppendUncertainError as AppendUncertainError
    from semel.patterns.entity_writer import ConflictError as ConflictError
    from semel.patterns.event_time import LateRecordError as LateRecordError
    from semel.patterns.outbox import OutboxProgressError as OutboxProgressError
    from semel.patterns.process import MissingSourceError as MissingSourceError
    from semel.patterns.process_output import RecordError as RecordError
    from semel.patterns.saga_states import SagaStepError as SagaStepError
    from semel.patterns.sagas import StepFailedError as StepFailedError
    from semel.patterns.state import StateError as StateError
    from semel.protocol.errors import ErrorCode as ErrorCode
    from semel.protocol.errors import Recovery as Recovery
    from semel.sinks.files.errors import FolderError as FolderError
    from semel.sinks.files.errors import FolderTakenError as FolderTakenError
    from semel.sinks.files.errors import OlderFolderError as OlderFolderError
    from semel.sinks.postgres.database import PsycopgMissingError as PsycopgMissingError
    from semel.sinks.postgres.decisions import DecisionLostError as DecisionLostError
    from semel.sinks.postgres.errors import DatabaseCommitUncertainError as DatabaseCommitUncertainError
    from semel.sinks.postgres.errors import DatabaseConflictError as DatabaseConflictError
    from semel.sinks.postgres.errors import DatabaseFatalError as DatabaseFatalError
    from semel.sinks.postgres.errors import DatabaseUnavailableError as DatabaseUnavailableError
    from semel.sinks.postgres.errors import FencedInDatabaseError as FencedInDatabaseError
    from semel.sinks.postgres.errors import PostgresError as PostgresError
    from semel.sinks.postgres.errors import RowRefusedError as RowRefusedError
    from semel.sinks.postgres.moving import BadStagedRowError as BadStagedRowError
    from semel.sinks.postgres.moving import SameKeyError as SameKeyError
    from semel.sinks.postgres.offsets import OlderDatabaseError as OlderDatabaseError
    from semel.sinks.postgres.offsets import PartitionTakenError as PartitionTakenError
    from semel.sinks.postgres.target import TableMismatchError as TableMismatchError
    from semel.spark.base_sink import FencedSinkError as FencedSinkError
    from semel.spark.base_sink import RefusedError as RefusedError
    from semel.spark.base_sink import SinkError as SinkError
    from semel.spark.batch_writer import AlreadyDoneError as AlreadyDoneError
    from semel.spark.batch_writer import QueryIdError as QueryIdError
    from semel.spark.checkpoint import CheckpointError as CheckpointError
    from semel.spark.encoding import BadRowError as BadRowError
    from semel.spark.encoding import TargetError as TargetError
    from semel.spark.ledger import LedgerError as LedgerError
    from semel.spark.ledger import LostLedgerError as LostLedgerError
    from semel.spark.ledger import NoEntryError as NoEntryError
    from semel.spark.options import OptionError as OptionError
    from semel.spark.range_tasks import FunctionError as FunctionError
    from semel.spark.reading import DataLossError as DataLossError
    from semel.spark.sink_options import ColumnError as ColumnError
    from semel.spark.stream_writer import WrongBatchError as WrongBatchError
    from semel.spark.topics import UnknownTopicError as UnknownTopicError
    from semel.spark.transaction import TimedOutTransactionError as TimedOutTransactionError
    from semel.spark.write_job import RerunError as RerunError
    from semel.spark.writing import OwnerStalledError as OwnerStalledError
    from semel.spark.writing import WrongTaskError as WrongTaskError

# Where each is defined.
_HOMES = {
    "semel.client.errors": (
        "AbortableError AuthenticationError BufferFullError ClosedError CommitUncertainError ConcurrentUseError "
        "ConfigError ConnectionFailedError DeliveryTimedOutError FatalError FencedError IllegalStateError KafkaError "
        "RecordTooLargeError RequestTimedOutError RetriableError SerializationError TableTooLargeError TimedOutError "
        "UnsupportedByBrokerError"
    ),
    "semel.client.types": (
        "CommitFailedError CorruptRecordError DeserializationError NoOffsetError OffsetOutOfRangeError PartitionError "
        "RebalanceError UnknownPartitionError"
    ),
    "semel.local.brokers": "BrokerFailedError",
    "semel.patterns.outbox": "OutboxProgressError",
    "semel.patterns.process": "MissingSourceError",
    "semel.patterns.process_output": "RecordError",
    "semel.patterns.event_time": "LateRecordError",
    "semel.patterns.entity_writer": "AppendRefusedError AppendUncertainError ConflictError",
    "semel.patterns.saga_states": "SagaStepError",
    "semel.patterns.sagas": "StepFailedError",
    "semel.patterns.state": "StateError",
    "semel.protocol.errors": "ErrorCode Recovery",
    "semel.sinks.files.errors": "FolderError FolderTakenError OlderFolderError",
    "semel.sinks.postgres.database": "PsycopgMissingError",
    "semel.sinks.postgres.decisions": "DecisionLostError",
    "semel.sinks.postgres.errors": (
        "DatabaseCommitUncertainError DatabaseConflictError DatabaseFatalError DatabaseUnavailableError "
        "FencedInDatabaseError PostgresError RowRefusedError"
    ),
    "semel.sinks.postgres.moving": "BadStagedRowError SameKeyError",
    "semel.sinks.postgres.offsets": "OlderDatabaseError PartitionTakenError",
    "semel.sinks.postgres.target": "TableMismatchError",
    "semel.spark.base_sink": "FencedSinkError RefusedError SinkError",
    "semel.spark.batch_writer": "AlreadyDoneError QueryIdError",
    "semel.spark.checkpoint": "CheckpointError",
    "semel.spark.encoding": "BadRowError TargetError",
    "semel.spark.ledger": "LedgerError LostLedgerError NoEntryError",
    "semel.spark.options": "OptionError",
    "semel.spark.range_tasks": "FunctionError",
    "semel.spark.reading": "DataLossError",
    "semel.spark.write_job": "RerunError",
    "semel.spark.sink_options": "ColumnError",
    "semel.spark.stream_writer": "WrongBatchError",
    "semel.spark.topics": "UnknownTopicError",
    "semel.spark.transaction": "TimedOutTransactionError",
    "semel.spark.writing": "OwnerStalledError WrongTaskError",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
