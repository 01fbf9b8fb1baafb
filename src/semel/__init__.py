"""Exactly-once Kafka pipelines on PySpark, with a Kafka-compatible broker that pip can install."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from semel.aio.admin import AsyncAdmin as AsyncAdmin
    from semel.aio.consumer import AsyncConsumer as AsyncConsumer
    from semel.aio.producer import AsyncProducer as AsyncProducer
    from semel.client.admin import Admin as Admin
    from semel.client.consumer import Consumer as Consumer
    from semel.client.metrics import prometheus as prometheus
    from semel.client.producer import PreparedTransaction as PreparedTransaction
    from semel.client.producer import Producer as Producer
    from semel.client.read_table import read_table as read_table
    from semel.errors import *  # noqa: F403
    from semel.local.brokers import Broker as Broker
    from semel.patterns.entities import Entities as Entities
    from semel.patterns.entities import wait_for_version as wait_for_version
    from semel.patterns.event_time import deduplicate as deduplicate
    from semel.patterns.event_time import join_table as join_table
    from semel.patterns.event_time import join_within as join_within
    from semel.patterns.event_time import windowed as windowed
    from semel.patterns.outbox import Outbox as Outbox
    from semel.patterns.process import Output as Output
    from semel.patterns.process import Processor as Processor
    from semel.patterns.process import process as process
    from semel.patterns.saga_states import SagaStep as SagaStep
    from semel.patterns.sagas import Sagas as Sagas
    from semel.patterns.state import KeyedState as KeyedState
    from semel.sinks.files.reading import committed_files as committed_files
    from semel.sinks.files.reading import read_files as read_files
    from semel.sinks.files.settings import Files as Files
    from semel.sinks.postgres.settings import Postgres as Postgres
    from semel.sinks.postgres.settings import Statement as Statement
    from semel.sinks.postgres.settings import TableRow as TableRow
    from semel.spark.batch_writer import route as route
    from semel.spark.fast_lane import table_pipeline as table_pipeline
    from semel.spark.postgres_options import SinkTopics as SinkTopics
    from semel.spark.postgres_sink import postgres_sink as postgres_sink
    from semel.spark.session import spark_session as spark_session
    from semel.spark.sink import sink as sink

__version__ = "0.1.0"

# Public name -> where it lives. Loaded when first used, so that `import semel` costs nothing.
_LAZY = {
    "Admin": "semel.client.admin",
    "AsyncAdmin": "semel.aio.admin",
    "AsyncConsumer": "semel.aio.consumer",
    "AsyncProducer": "semel.aio.producer",
    "Broker": "semel.local.brokers",
    "Consumer": "semel.client.consumer",
    "Entities": "semel.patterns.entities",
    "Files": "semel.sinks.files.settings",
    "committed_files": "semel.sinks.files.reading",
    "read_files": "semel.sinks.files.reading",
    "Outbox": "semel.patterns.outbox",
    "SagaStep": "semel.patterns.saga_states",
    "Sagas": "semel.patterns.sagas",
    "wait_for_version": "semel.patterns.entities",
    "KeyedState": "semel.patterns.state",
    "deduplicate": "semel.patterns.event_time",
    "join_table": "semel.patterns.event_time",
    "join_within": "semel.patterns.event_time",
    "windowed": "semel.patterns.event_time",
    "Output": "semel.patterns.process",
    "PreparedTransaction": "semel.client.producer",
    "Processor": "semel.patterns.process",
    "Postgres": "semel.sinks.postgres.settings",
    "Producer": "semel.client.producer",
    "postgres_sink": "semel.spark.postgres_sink",
    "prometheus": "semel.client.metrics",
    "process": "semel.patterns.process",
    "read_table": "semel.client.read_table",
    "route": "semel.spark.batch_writer",
    "sink": "semel.spark.sink",
    "SinkTopics": "semel.spark.postgres_options",
    "spark_session": "semel.spark.session",
    "Statement": "semel.sinks.postgres.settings",
    "table_pipeline": "semel.spark.fast_lane",
    "TableRow": "semel.sinks.postgres.settings",
}


_NEED_SPARK = ("postgres_sink", "route", "sink", "spark_session", "table_pipeline")


def __getattr__(name: str) -> Any:
    if name in _NEED_SPARK and find_spec("pyspark") is None:
        raise ModuleNotFoundError(
            f"semel.{name} needs PySpark, which is not installed: pip install 'semel[spark]'", name="pyspark"
        )
    home = "semel.errors" if name.endswith("Error") else _LAZY.get(name)
    value = getattr(import_module(home), name, None) if home is not None else None
    if value is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    errors = import_module("semel.errors").__all__
    return sorted({*globals(), *_LAZY, *(name for name in errors if name.endswith("Error"))})
