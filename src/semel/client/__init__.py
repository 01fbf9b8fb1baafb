"""A Kafka client for Python: rows for people, Arrow columns for machines, transactions of both generations.

    from semel.client import Consumer, Producer

Names are loaded when they are first used, so that a program pays only for what it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from semel.client.admin import Admin as Admin
    from semel.client.cluster import Cluster as Cluster
    from semel.client.consumer import Consumer as Consumer
    from semel.client.consumer.core import RebalanceListener as RebalanceListener
    from semel.client.errors import AbortableError as AbortableError
    from semel.client.errors import CommitUncertainError as CommitUncertainError
    from semel.client.errors import FatalError as FatalError
    from semel.client.errors import FencedError as FencedError
    from semel.client.errors import KafkaError as KafkaError
    from semel.client.errors import RetriableError as RetriableError
    from semel.client.errors import TimedOutError as TimedOutError
    from semel.client.producer import Producer as Producer
    from semel.client.producer.batches import RecordMetadata as RecordMetadata
    from semel.client.producer.deliveries import Delivery as Delivery
    from semel.client.producer.deliveries import TableDelivery as TableDelivery
    from semel.client.producer.handle import TransactionHandle as TransactionHandle
    from semel.client.producer.handle import TransactionOwner as TransactionOwner
    from semel.client.settings import ClientSettings as ClientSettings
    from semel.client.settings import ConsumerSettings as ConsumerSettings
    from semel.client.settings import ProducerSettings as ProducerSettings
    from semel.client.types import CommitFailedError as CommitFailedError
    from semel.client.types import ConsumerRecord as ConsumerRecord
    from semel.client.types import CorruptRecordError as CorruptRecordError
    from semel.client.types import GroupMetadata as GroupMetadata
    from semel.client.types import OffsetAndMetadata as OffsetAndMetadata
    from semel.client.types import OffsetOutOfRangeError as OffsetOutOfRangeError
    from semel.client.types import RebalanceError as RebalanceError
    from semel.client.types import TopicPartition as TopicPartition

_HOMES = {
    "admin": ("Admin",),
    "producer.batches": ("RecordMetadata",),
    "producer.deliveries": ("Delivery", "TableDelivery"),
    "cluster": ("Cluster",),
    "consumer": ("Consumer",),
    "consumer.core": ("RebalanceListener",),
    "types": (
        "CommitFailedError",
        "ConsumerRecord",
        "CorruptRecordError",
        "GroupMetadata",
        "OffsetAndMetadata",
        "OffsetOutOfRangeError",
        "RebalanceError",
        "TopicPartition",
    ),
    "errors": (
        "AbortableError",
        "CommitUncertainError",
        "FatalError",
        "FencedError",
        "KafkaError",
        "RetriableError",
        "TimedOutError",
    ),
    "producer.handle": ("TransactionHandle", "TransactionOwner"),
    "producer": ("Producer",),
    "settings": ("ClientSettings", "ConsumerSettings", "ProducerSettings"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'semel.client' has no attribute {name!r}")
    value = getattr(import_module(f"semel.client.{home}"), name)
    globals()[name] = value
    return value
