"""The options of `semel.sink`, and of `write` and `writeStream.format("semel")`: the same ones in Spark's spelling."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

from semel.client.errors import ConfigError
from semel.client.settings import COMPRESSIONS, ProducerSettings, field_name
from semel.spark.ledger import MicroBatch, refuse_loop, topic_of
from semel.spark.options import OptionError, check_known, client_options, number

EXACTLY_ONCE, AT_LEAST_ONCE, AT_MOST_ONCE = "exactly_once", "at_least_once", "at_most_once"
MURMUR2, HASH, SPREAD = "murmur2", "hash", "none"  # partitioners
STALLED_S = 30.0  # an owner that writes nothing for so long is taken for dead
AUTO, ALWAYS = "auto", "always"
# Settings of a producer that the sink decides for itself, and the option to use instead: here, and of a writer.
DECIDED = {
    "transactional_id": ("application_id", "applicationId"),
    "transaction_timeout_ms": ("transaction_timeout_ms", "transactionTimeoutMs"),
    "compression_type": ("compression", "compression"),
    "max_request_size": ("max_request_size", "maxRequestSize"),
}


class Precautions(NamedTuple):
    """What can be switched off to show that it is needed. Never in production."""

    handshake: bool = True  # one attempt per partition
    count_audit: bool = True  # the log holds what the winners reported
    single_runs: bool = True  # no stage ran twice, where Spark does not compare the runs itself
    wait_s: float = STALLED_S  # how long an attempt that came second waits to be killed


@dataclass(frozen=True)
class SinkOptions:
    """See `semel.sink` for what they mean."""

    bootstrap_servers: str
    application_id: str
    topic: str | None = None
    extra_topics: tuple[str, ...] = ()
    dead_letter_topic: str | None = None
    bad_column: str | None = None
    partitioner: str = MURMUR2
    shuffle: str = AUTO
    guarantee: str = EXACTLY_ONCE
    transaction_timeout_ms: int = 600_000
    max_attempts: int = 3
    adopt_checkpoint: bool = False
    accept_lost_state: bool = False
    compression: str = "none"
    max_request_size: int = 1024 * 1024
    source_cluster_is_other: bool = False
    on_batch: Callable[[Any], None] | None = None
    client: Mapping[str, Any] = field(default_factory=dict)
    precautions: Precautions = field(default_factory=Precautions)

    def __post_init__(self) -> None:
        check_kinds(self)
        check_application_id(self.application_id)
        choice("partitioner", self.partitioner, (MURMUR2, HASH, SPREAD))
        choice("shuffle", self.shuffle, (AUTO, ALWAYS))
        choice("guarantee", self.guarantee, (EXACTLY_ONCE, AT_LEAST_ONCE, AT_MOST_ONCE))
        choice("compression", self.compression, COMPRESSIONS)
        if self.max_attempts < 1:
            raise OptionError(f"max_attempts is {self.max_attempts}; it must be at least 1")
        if self.topic is None and not self.extra_topics:
            raise OptionError("the sink has no topic; give topic=..., or topics=[...] for rows with a topic column")
        self._refuse_decided()
        self._refuse_own_topics()

    def _refuse_decided(self) -> None:
        """What the sink decides would be used, and not what was given."""
        for name in self.client:
            if field_name(name) in DECIDED:
                here, of_writers = DECIDED[field_name(name)]
                raise OptionError(
                    f"client option {name!r} cannot be set; use the option {here} instead ({of_writers} of a writer)"
                )

    def _refuse_own_topics(self) -> None:
        """Rows, dead letters and ledger entries are told apart by their topics."""
        rows = {self.topic, *self.extra_topics}
        if self.dead_letter_topic is not None and self.dead_letter_topic in rows:
            raise OptionError(f"dead_letter_topic is {self.dead_letter_topic!r}, where rows go too; give another one")
        if topic_of(self.application_id) in {*rows, self.dead_letter_topic}:
            raise OptionError(
                f"topic {topic_of(self.application_id)!r} is the ledger of application {self.application_id!r}; rows "
                "cannot go there. Choose another topic or another application_id"
            )

    def topics(self) -> list[str]:
        """Every topic that rows may go to."""
        return [t for t in (self.topic, *self.extra_topics, self.dead_letter_topic) if t is not None]

    @property
    def stores_offsets(self) -> bool:
        """Whether offsets of source topics belong to this cluster's group, if it has the topics."""
        return not self.source_cluster_is_other

    def refuse_loop(self, batch: MicroBatch) -> str | None:
        """Why a batch must not be written: it reads what the application writes about itself."""
        if self.source_cluster_is_other:
            return None
        return refuse_loop(batch, self.application_id, self.dead_letter_topic)

    def _transaction(self) -> dict[str, Any]:
        if self.guarantee != EXACTLY_ONCE:
            return {}
        return {"transactional.id": self.application_id, "transaction.timeout.ms": self.transaction_timeout_ms}

    def producer_settings(self) -> ProducerSettings:
        try:
            return ProducerSettings.of(
                {
                    **self.client,
                    "bootstrap.servers": self.bootstrap_servers,
                    **self._transaction(),
                    "compression.type": self.compression,
                    "max.request.size": self.max_request_size,
                    "allow.auto.create.topics": False,
                }
            )
        except ConfigError as error:
            raise OptionError(str(error)) from error


def _is_whole(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and float(value).is_integer()


# What options hold, and how that is known.
KINDS: dict[str, tuple[Callable[[Any], bool], tuple[str, ...]]] = {
    "True or False": (
        lambda value: isinstance(value, bool),
        ("adopt_checkpoint", "accept_lost_state", "source_cluster_is_other"),
    ),
    "a whole number": (
        _is_whole,
        ("transaction_timeout_ms", "max_attempts", "max_request_size", "max_tasks", "retry_timeout_ms"),
    ),
    "one name": (
        lambda value: isinstance(value, str),
        ("application_id", "topic", "dead_letter_topic", "bad_column", "table", "operation_column"),
    ),
    "a function": (callable, ("on_batch",)),
}


def check_kinds(options: Any) -> None:
    """A text such as "false", out of the environment or a file of settings, would count as true."""
    for expected, (fits, names) in KINDS.items():
        for name in names:
            value = getattr(options, name, None)
            if value is not None and value != math.inf and not fits(value):
                raise OptionError(f"{name} is {value!r}; expected {expected}")


def choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise OptionError(f"{name} is {value!r}; expected {', '.join(allowed)}{hint}")


def check_application_id(application_id: str) -> None:
    """It becomes a topic's name, a group's and a transactional id."""
    ok = application_id and all(c.isalnum() or c in "._-" for c in application_id) and application_id.isascii()
    if not ok or len(application_id) > 200:
        raise OptionError(
            f"application_id is {application_id!r}; it names the ledger topic, so it has letters, digits, '.', '_' "
            "and '-', at most 200"
        )


def _text(text: str, name: str) -> str:
    return text


def _flag(text: str, name: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise OptionError(f"option {name} is {text!r}; expected true or false")
    return text.lower() == "true"


def _list(text: str, name: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def topic_names(given: Iterable[str] | str) -> tuple[str, ...]:
    """Topics in a list, or in one text as a writer has them."""
    return _list(given, "topics") if isinstance(given, str) else tuple(given)


# Spark's spelling -> (name in SinkOptions, how to read it)
OPTIONS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "applicationId": ("application_id", _text),
    "topic": ("topic", _text),
    "topics": ("extra_topics", _list),
    "deadLetterTopic": ("dead_letter_topic", _text),
    "badColumn": ("bad_column", _text),
    "partitioner": ("partitioner", _text),
    "compression": ("compression", _text),
    "transactionTimeoutMs": ("transaction_timeout_ms", number),
    "maxRequestSize": ("max_request_size", number),
    "adoptCheckpoint": ("adopt_checkpoint", _flag),
    "acceptLostState": ("accept_lost_state", _flag),
    "sourceClusterIsOther": ("source_cluster_is_other", _flag),
}
SPARKS = {"path", "checkpointlocation", "queryname"}  # put there by Spark
REFUSED = {
    "guarantee": "a writer is exactly_once; use semel.sink(..., guarantee=...) with foreachBatch",
    "asyncprogresstrackingenabled": "it logs offsets after a batch has run; exactly-once needs them before",
}


def writer_options(raw: Mapping[str, str], also: tuple[str, ...] = ()) -> SinkOptions:
    """Options of a writer; `also` names further ones that it reads itself."""
    given = {str(name).lower(): str(value) for name, value in raw.items()}
    for name, value in given.items():
        if name in REFUSED and value.lower() != "false":
            raise OptionError(f"option {name} cannot be used here: {REFUSED[name]}")
        if name not in SPARKS and name not in REFUSED:
            check_known(name, (*OPTIONS, *also), "writer")
    client = client_options(given, "kafka.bootstrap.servers", "kafka.isolation.level")
    if "applicationid" not in given:
        raise OptionError("option applicationId is missing; give a name")
    chosen = {
        field: read(given[name.lower()], name) for name, (field, read) in OPTIONS.items() if name.lower() in given
    }
    return SinkOptions(bootstrap_servers=given["kafka.bootstrap.servers"], client=client, **chosen)


# --- The columns that a sink writes: checked by name and type before anything runs, and brought into one frame ---


BINARY = {"binary", "string"}
NESTED = ("struct<", "array<", "map<", "variant")
TIMES = {"timestamp", "timestamp_ntz"}  # no number: Spark casts one as seconds, and Kafka counts milliseconds
HASH_OF_KEY = "if(key IS NULL, NULL, xxhash64(cast(key AS BINARY)))"  # Spark's own, computed in the JVM


class ColumnError(OptionError):
    """A column that is missing or has a type that cannot be written."""


# In this order, and as these types (None: as it is). Keys and values that are strings stay so: tasks take their bytes,
# and a cast in the JVM copies every row.
WRITTEN_AS = {
    "key": None,
    "value": None,
    "headers": None,
    "topic": None,
    "partition": None,  # a cast of what is no partition would make one of it, or fail
    "timestamp": "timestamp",
}


def prepared(df: Any, options: SinkOptions) -> Any:
    """Only what is written, in the types that tasks expect. A DataFrame that is like that already stays as it is: each
    step costs every row, and every question to the JVM costs a small batch."""
    types = types_of(df.dtypes, options)
    check_columns(types, options)
    chosen = [cast(name, types) for name in WRITTEN_AS if name in types and (name != "topic" or options.extra_topics)]
    if options.partitioner == HASH and "key" in types:
        chosen.append(f"{HASH_OF_KEY} AS hash")
    if options.bad_column is not None:
        chosen.append(f"{quoted(options.bad_column)} AS bad")
    return df if chosen == df.columns else df.selectExpr(*chosen)


def quoted(name: str) -> str:
    """The name of a column in an expression, whatever it is."""
    return f"`{name.replace('`', '``')}`"


def cast(name: str, types: dict[str, str], kinds: Mapping[str, str | None] = WRITTEN_AS) -> str:
    """The expression for a column in the type that is written."""
    kind = kinds[name]
    return name if kind in (None, types[name]) else f"cast({name} AS {kind}) AS {name}"


def types_of(columns: Iterable[tuple[str, str]], options: SinkOptions) -> dict[str, str]:
    """The type of each column. A join may give several of one name, and Spark then says that an expression is
    ambiguous which no user has written."""
    found: dict[str, str] = {}
    for name, kind in columns:
        if name in found and name in WRITTEN_AS and (name != "topic" or options.extra_topics):
            raise ColumnError(f"the DataFrame has several columns {name!r}; rename or drop all of them but one")
        found[name] = kind
    return found


def check_columns(types: dict[str, str], options: SinkOptions) -> None:
    if "value" not in types:
        raise ColumnError(
            f"the DataFrame has no column 'value' (it has {', '.join(types) or 'none'}); select what to write, "
            'such as df.selectExpr("to_json(struct(*)) AS value")'
        )
    for name in ("key", "headers", "partition", "timestamp", *(("topic",) if options.extra_topics else ())):
        alike = [given for given in types if given.lower() == name and (name != "timestamp" or types[given] in TIMES)]
        if alike and name not in types:
            raise ColumnError(
                f"the DataFrame has a column {alike[0]!r}, but names count as they are written, and what is not called "
                f"{name!r} would be left out; rename it, such as {alike[0]} AS {name}, or drop it"
            )
    for name in ("key", "value"):
        if name in types and types[name] not in BINARY:
            is_nested = types[name].startswith(NESTED)
            way = f"make JSON of it, to_json({name}) AS {name}" if is_nested else "cast it"
            raise ColumnError(f"column {name!r} is {types[name]}, expected binary or string; {way}")
    if "headers" in types and types["headers"] != "array<struct<key:string,value:binary>>":
        raise ColumnError(f"column 'headers' is {types['headers']}, expected array<struct<key:string,value:binary>>")
    if "topic" in types and types["topic"] != "string":
        raise ColumnError(f"column 'topic' is {types['topic']}, expected string")
    if options.topic is None and "topic" not in types:
        raise ColumnError("the sink has no topic and the DataFrame no column 'topic'; give one of them")
    if "partition" in types and types["partition"] not in ("int", "bigint", "smallint", "tinyint"):
        raise ColumnError(f"column 'partition' is {types['partition']}, expected int")
    if "timestamp" in types and types["timestamp"] not in TIMES:
        raise ColumnError(
            f"column 'timestamp' is {types['timestamp']}, expected timestamp: it becomes the time of the record. Make "
            "one, such as timestamp_millis(timestamp) AS timestamp; or leave the column out, then it is the time of "
            "writing"
        )
    if options.bad_column is not None and types.get(options.bad_column) not in ("boolean", "string"):
        found = types.get(options.bad_column, "not there")
        raise ColumnError(f"bad_column {options.bad_column!r} is {found}, expected a boolean or string column")


def one_frame(given: Any, options: SinkOptions) -> Any:
    """What was given to the sink, a DataFrame or a list of them, as one DataFrame."""
    if not isinstance(given, (list, tuple)):
        return given
    if not given:
        raise OptionError("the sink was called with an empty list; give at least one DataFrame, it may have no rows")
    if len(given) == 1:
        return given[0]
    names = {name for frame in given for name in frame.columns}
    first, *others = (_written(frame, options, names) for frame in given)
    for frame in others:
        first = first.unionByName(frame, allowMissingColumns=True)
    return first


def _written(frame: Any, options: SinkOptions, names: set[str]) -> Any:
    """The columns that are written, in one type in all frames. A column that only others have is null, but for the
    timestamp, which every record has."""
    kinds = {**WRITTEN_AS, "key": "binary", "value": "binary"}
    types = types_of(frame.dtypes, options)
    check_columns(types, options)
    chosen = []
    for name in WRITTEN_AS:
        if name in types:
            chosen.append(cast(name, types, kinds))
        elif name == "timestamp" and name in names:
            chosen.append("current_timestamp() AS timestamp")
    if options.bad_column is not None:
        chosen.append(quoted(options.bad_column))
    return frame.selectExpr(*chosen)


def written_columns(batch: Any, options: SinkOptions) -> Any:
    """The columns that are written. A topic column counts where there are several topics."""
    import pyarrow as pa

    columns = {}
    for name in WRITTEN_AS:
        if name in batch.schema.names and (name != "topic" or options.extra_topics):
            columns[name] = batch.column(name)
    if "partition" in columns:
        columns["partition"] = columns["partition"].cast(pa.int64())
    if options.bad_column is not None:
        columns["bad"] = batch.column(options.bad_column)
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def check_schema(schema: Any, options: SinkOptions) -> None:
    """The columns that a writer gets. Spark's hash is computed by Spark, so before the writer."""
    types = types_of([(f.name, f.dataType.simpleString()) for f in schema.fields], options)
    check_columns(types, options)
    if options.partitioner == HASH and "key" in types and "partition" not in types:
        raise ColumnError(
            'partitioner=hash needs a column partition: use semel.route(df, ..., partitioner="hash") before write'
        )
