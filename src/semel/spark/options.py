"""The options of `format("semel")`: the names of Spark's own Kafka source and a few more; others are refused.

Spark does not say to a Python source which columns a query uses, and makes rows of all that it gets. Columns that
nobody reads cost a third of the source's time; the option `columns` leaves them out.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from semel.spark.offsets import Offsets, Range, from_json

TYPES = {
    "key": "BINARY",
    "value": "BINARY",
    "topic": "STRING",
    "partition": "INT",
    "offset": "BIGINT",
    "timestamp": "TIMESTAMP",
    "timestampType": "INT",
    "headers": "ARRAY<STRUCT<key: STRING, value: BINARY>>",
}
HEADERS = "headers"
JSON = "json"  # see `json_column`


def schema_of(columns: Sequence[str], json_schema: str | None = None) -> str:
    types = TYPES if json_schema is None else {**TYPES, JSON: f"STRUCT<{json_schema}>"}
    return ", ".join(f"{name} {types[name]}" for name in columns)


def spark_columns(
    table: Any, wanted: Range, columns: Sequence[str], parse_json: Callable[[Any], Any] | None = None
) -> Any:
    """A decoded table as Spark's source would give it."""
    import pyarrow as pa

    return pa.table({name: _column(table, wanted, name, parse_json) for name in columns})


def _column(table: Any, wanted: Range, name: str, parse_json: Callable[[Any], Any] | None) -> Any:
    import numpy as np
    import pyarrow as pa

    from semel.protocol.arrow_numbers import texts, to_arrow

    rows = table.num_rows
    match name:
        case "topic":
            first = to_arrow(np.zeros(rows, np.int8))
            return pa.DictionaryArray.from_arrays(first, texts([wanted.topic])).cast(pa.string())
        case "partition":
            return to_arrow(np.full(rows, wanted.partition, np.int32))
        case "timestamp":
            return _timestamps(table.column("timestamp"), wanted)
        case "timestampType":
            return table.column("timestamp_type").cast(pa.int32())
        case "json" if parse_json is not None:
            return parse_json(table.column("value"))
        case _:
            return table.column(name)


def _timestamps(milliseconds: Any, wanted: Range) -> Any:
    import pyarrow as pa

    try:
        return milliseconds.cast(pa.timestamp("ms")).cast(pa.timestamp("us", "UTC"))
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"{wanted.topic}-{wanted.partition}, a record between offsets {wanted.start} and {wanted.end}: its "
            f"timestamp is no number of milliseconds that Spark can hold, perhaps one of nanoseconds ({error}). Leave "
            "the column out with the option columns, such as columns=key,value"
        ) from error


EARLIEST, LATEST, COMMITTED = "earliest", "latest", "committed"
EARLIEST_OFFSET, LATEST_OFFSET = -2, -1  # as Spark writes them inside JSON offsets

# name -> what it is for
SOURCE_OPTIONS = {
    "kafka.bootstrap.servers": "brokers, host:port,host:port",
    "subscribe": "topics, separated by commas",
    "subscribePattern": "a regular expression of topics",
    "assign": 'partitions, {"topic": [0, 1]}',
    "startingOffsets": 'earliest, latest, committed, or {"topic": {"0": 23}}; -2 is earliest, -1 latest',
    "endingOffsets": "the same for batch queries; default latest",
    "startingTimestamp": "milliseconds; the first record at or after it, in every partition",
    "endingTimestamp": "the same for the end of batch queries",
    "startingOffsetsByTimestamp": '{"topic": {"0": 1700000000000}}',
    "endingOffsetsByTimestamp": "the same for the end of batch queries",
    "startingOffsetsByTimestampStrategy": "error (default) or latest: what to do where no record is as late",
    "maxOffsetsPerTrigger": "records per micro-batch, about",
    "minOffsetsPerTrigger": "wait until so many records are there (or maxTriggerDelay has passed)",
    "maxTriggerDelay": "the longest wait for minOffsetsPerTrigger, such as 15m",
    "minPartitions": "at least so many tasks",
    "maxRecordsPerPartition": "records per task, at most",
    "failOnDataLoss": "true (default): fail when records are gone before they were read",
    "includeHeaders": "true: a column headers",
    "columns": "only these columns, such as key,value: those that nobody reads cost time too",
    "jsonSchema": "a column json: values read as JSON with these fields, such as id long, name string",
    "emit": "rows (default), or ranges: one row per range of offsets, as table_pipeline needs it",
    "committedOffsets": "what startingOffsets=committed means for a sink for PostgreSQL: its committed_offsets()",
    "applicationId": "the sink's: startingOffsets=committed reads its ledger, a pattern leaves out its dead letters",
}
# Options that Spark puts there, or that belong to the sink: not the source's business.
OTHERS = {"path", "checkpointlocation", "kafka.isolation.level", "isolationlevel"}
# Options of Spark's Kafka source without meaning here: a query may keep them when it changes the format.
IGNORED = {
    "groupidprefix",
    "kafkaconsumer.polltimeoutms",
    "fetchoffset.numretries",
    "fetchoffset.retryintervalms",
}
# The same for settings of clients that decide nothing about security or delivery, and have nothing to decide here.
IGNORED_CLIENT = (
    "kafka.client.dns.lookup",
    "kafka.client.rack",
    "kafka.connections.max.idle.ms",
    "kafka.socket.connection.setup.timeout.max.ms",
    "kafka.metadata.recovery.strategy",
    "kafka.metadata.recovery.rebootstrap.trigger.ms",
    "kafka.enable.metrics.push",
    "kafka.auto.include.jmx.reporter",
    "kafka.metric.reporters",
    "kafka.metrics.num.samples",
    "kafka.metrics.recording.level",
    "kafka.metrics.sample.window.ms",
)
# The same for settings of consumers: the source has no group, and sizes its fetches by the ranges that it reads.
IGNORED_CONSUMER = (
    "kafka.isolation.level",  # read elsewhere
    "kafka.group.id",
    "kafka.group.instance.id",
    "kafka.group.protocol",
    "kafka.group.remote.assignor",
    "kafka.auto.commit.interval.ms",
    "kafka.exclude.internal.topics",
    "kafka.partition.assignment.strategy",
    "kafka.session.timeout.ms",
    "kafka.heartbeat.interval.ms",
    "kafka.max.poll.interval.ms",
    "kafka.max.poll.records",
    "kafka.fetch.min.bytes",
    "kafka.fetch.max.wait.ms",
    "kafka.fetch.max.bytes",
    "kafka.max.partition.fetch.bytes",
    "kafka.check.crcs",
)
# Consumer settings that the source decides for itself, and the option to use instead.
DECIDED = {
    "kafka.auto.offset.reset": "startingOffsets",
    "kafka.enable.auto.commit": "the sink's application_id (its group gets the offsets)",
    "kafka.key.deserializer": "a cast in the query (keys come as bytes)",
    "kafka.value.deserializer": "a cast in the query (values come as bytes)",
    "kafka.interceptor.classes": "nothing (there are no interceptors)",
}


class OptionError(ValueError):
    """An option that is missing, unknown or has a value that cannot be."""


@dataclass(frozen=True)
class Bound:
    """One end of what is read: a word, offsets, or times."""

    word: str | None = None
    offsets: Offsets = field(default_factory=dict)
    timestamp_ms: int | None = None
    timestamps_ms: Offsets = field(default_factory=dict)


@dataclass(frozen=True)
class SourceOptions:
    client: dict[str, str]
    topics: tuple[str, ...] = ()
    pattern: str | None = None
    assigned: dict[str, list[int]] = field(default_factory=dict)
    starting: Bound = Bound(word=LATEST)
    ending: Bound = Bound(word=LATEST)
    late_is_latest: bool = False
    max_offsets: int | None = None
    min_offsets: int | None = None
    max_delay_ms: int = 15 * 60_000
    min_partitions: int | None = None
    max_records: int | None = None
    fail_on_data_loss: bool = True
    columns: tuple[str, ...] = ()
    read_committed: bool = True
    application_id: str | None = None
    committed: str | None = None  # offsets with the ids of their topics, as the checkpoint has them
    emit_ranges: bool = False

    def selects(self, topic: str, partition: int) -> bool:
        """Whether the query reads a partition, if the cluster has it."""
        if self.pattern is not None:
            return re.fullmatch(self.pattern, topic) is not None
        return topic in self.topics or partition in self.assigned.get(topic, [])

    @classmethod
    def parse(cls, raw: Mapping[str, str], streaming: bool) -> SourceOptions:
        given = {str(name).lower(): str(value) for name, value in raw.items()}
        _refuse_unknown(given)
        starting, ending = _bound(given, "starting", LATEST if streaming else EARLIEST), _bound(given, "ending", LATEST)
        if streaming:
            _refuse_ends(given)
        else:
            _refuse_empty_reads(starting, ending)
        emit_ranges = _choice(given, "emit", ("rows", "ranges"), "rows") == "ranges"
        if emit_ranges and json_schema(given) is not None:
            raise OptionError("option jsonSchema needs records, but with emit=ranges there are none; leave it out")
        return cls(
            client=client_options(given, *IGNORED_CONSUMER),
            **_selection(given),
            starting=starting,
            ending=ending,
            late_is_latest=_choice(given, "startingOffsetsByTimestampStrategy", ("error", "latest"), "error")
            == "latest",
            max_offsets=_positive(given, "maxOffsetsPerTrigger"),
            min_offsets=_positive(given, "minOffsetsPerTrigger"),
            max_delay_ms=_duration_ms(given.get("maxtriggerdelay", "15m")),
            min_partitions=_positive(given, "minPartitions"),
            max_records=_positive(given, "maxRecordsPerPartition"),
            fail_on_data_loss=_boolean(given, "failOnDataLoss", True),
            columns=checked_columns(given),
            read_committed=_isolation(given) == "read_committed",
            application_id=given.get("applicationid"),
            committed=_committed(given, starting),
            emit_ranges=emit_ranges,
        )


def _committed(given: Mapping[str, str], starting: Bound) -> str | None:
    text = given.get("committedoffsets")
    if text is None:
        return None
    if starting.word != COMMITTED:
        raise OptionError("option committedOffsets belongs to startingOffsets=committed; set that, or leave it out")
    _places(text, "committedOffsets")
    return text


def checked_columns(raw: Mapping[str, Any]) -> tuple[str, ...]:
    given = {str(name).lower(): str(value) for name, value in raw.items()}
    wants_headers = _boolean(given, "includeHeaders", False)
    known = [*TYPES, *([] if json_schema(given) is None else [JSON])]
    if "columns" not in given:
        return tuple(name for name in known if name != HEADERS or wants_headers)
    names = {name.lower(): name for name in known}
    words = [word.strip().lower() for word in given["columns"].split(",") if word.strip()]
    if not words or any(word not in names for word in words):
        raise OptionError(f"option columns is {given['columns']!r}; expected names out of {', '.join(known)}")
    return tuple(dict.fromkeys(names[word] for word in words))


def json_schema(raw: Mapping[str, Any]) -> str | None:
    found = next((str(text).strip() for name, text in raw.items() if str(name).lower() == "jsonschema"), None)
    if found == "":
        raise OptionError("option jsonSchema is empty; expected fields, such as id long, name string")
    return found


def _refuse_unknown(given: Mapping[str, str]) -> None:
    for name in given:
        if name in DECIDED:
            raise OptionError(f"option {name} cannot be set; use {DECIDED[name]} instead")
        if name not in OTHERS | IGNORED:
            check_known(name, SOURCE_OPTIONS, "source")


def check_known(name: str, options: Iterable[str], owner: str) -> None:
    """Refuses an option that is neither one of these nor one of the client."""
    known = {option.lower(): option for option in options}
    if name not in known and not name.startswith("kafka."):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {known[near[0]]}?" if near else f"known are {', '.join(known.values())} and kafka.*"
        raise OptionError(f"the {owner} has no option {name!r}; {hint}")


def client_options(given: Mapping[str, str], *also_ignored: str) -> dict[str, str]:
    """Everything after `kafka.`, for the client, which knows the names and refuses others."""
    if "kafka.bootstrap.servers" not in given:
        raise OptionError("option kafka.bootstrap.servers is missing; give brokers as host:port,host:port")
    skipped = {*IGNORED_CLIENT, *also_ignored}
    names = [name for name in given if name.startswith("kafka.") and name not in skipped]
    return {name.removeprefix("kafka."): given[name] for name in names}


def _selection(given: Mapping[str, str]) -> dict[str, Any]:
    chosen = [name for name in ("subscribe", "subscribePattern", "assign") if name.lower() in given]
    if len(chosen) != 1:
        raise OptionError(
            f"exactly one of subscribe, subscribePattern and assign is needed; given: {', '.join(chosen) or 'none'}"
        )
    value = given[chosen[0].lower()].strip()
    topics = tuple(dict.fromkeys(t.strip() for t in value.split(",") if t.strip()))
    if not topics:
        raise OptionError(f"option {chosen[0]} is {value!r}; it must name at least one topic")
    if chosen[0] == "subscribe":
        return {"topics": topics}
    if chosen[0] == "subscribePattern":
        return {"pattern": _pattern(value)}
    assigned = _json(value, "assign")
    if not all(isinstance(parts, list) and all(type(p) is int for p in parts) for parts in assigned.values()):
        raise OptionError(f'option assign is {value!r}; expected JSON like {{"topic": [0, 1]}}')
    if not any(assigned.values()):
        raise OptionError(f"option assign is {value!r}; it must name at least one partition")
    return {"assigned": assigned}


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise OptionError(f"option subscribePattern is {text!r}, which is no regular expression: {error}") from error
    return text


def _bound(given: Mapping[str, str], side: str, default: str) -> Bound:
    """Spark's order of precedence: one timestamp, timestamps by partition, offsets."""
    if f"{side}timestamp" in given:
        name = f"{side}Timestamp"
        at = number(given[name.lower()], name)
        _refuse_below(0, {at}, name, A_TIME)
        return Bound(timestamp_ms=at)
    if f"{side}offsetsbytimestamp" in given:
        name = f"{side}OffsetsByTimestamp"
        times = _places(given[name.lower()], name)
        _refuse_below(0, _values(times), name, A_TIME)
        return Bound(timestamps_ms=times)
    value = given.get(f"{side}offsets", default).strip()
    words = {EARLIEST, LATEST, COMMITTED} if side == "starting" else {LATEST}
    if value.lower() in words:
        return Bound(word=value.lower())
    if not value.startswith("{"):
        expected = ", ".join(sorted(words))
        raise OptionError(
            f'option {side}Offsets is {value!r}; expected {expected} or JSON like {{"topic": {{"0": 23}}}}'
        )
    offsets = _places(value, f"{side}Offsets")
    _refuse_below(EARLIEST_OFFSET, _values(offsets), f"{side}Offsets", "an offset, -2 (earliest) or -1 (latest)")
    return Bound(offsets=offsets)


A_TIME = "milliseconds since 1970"


def _refuse_below(least: int, found: set[int], name: str, expected: str) -> None:
    """Negative numbers have other meanings for a broker: -1 as a time is the end of a partition."""
    if found and min(found) < least:
        raise OptionError(f"option {name} has {min(found)}; expected {expected}")


def _places(text: str, name: str) -> Offsets:
    try:
        return from_json(_json(text, name))
    except (AttributeError, TypeError, ValueError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f'option {name} is {text!r}; expected JSON like {{"topic": {{"0": 23}}}}') from error


def _refuse_empty_reads(starting: Bound, ending: Bound) -> None:
    """As Spark's own source: a batch query from the end, or up to the beginning, is a mistake."""
    if starting.word == LATEST or LATEST_OFFSET in _values(starting.offsets):
        raise OptionError("startingOffsets is latest, but a batch query reads what is there; use earliest or offsets")
    if EARLIEST_OFFSET in _values(ending.offsets):
        raise OptionError("endingOffsets has -2 (earliest) for a partition; use -1 (latest) or an offset")


def _refuse_ends(given: Mapping[str, str]) -> None:
    """As Spark's own source: a stream would read on behind them."""
    for name in ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"):
        if name.lower() in given:
            raise OptionError(
                f"option {name} is for batch queries, and this is a stream; leave it out (trigger(availableNow=True) "
                "reads what is there and ends), or use spark.read"
            )


def _values(places: Offsets) -> set[int]:
    return {value for parts in places.values() for value in parts.values()}


def _json(text: str, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise OptionError(f"option {name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise OptionError(f"option {name} is {text!r}; expected a JSON object with topics as keys")
    return value


def number(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise OptionError(f"option {name} is {text!r}; expected a whole number") from None


def _positive(given: Mapping[str, str], name: str) -> int | None:
    if name.lower() not in given:
        return None
    value = number(given[name.lower()], name)
    if value <= 0:
        raise OptionError(f"option {name} is {value}; it must be above 0")
    return value


def _boolean(given: Mapping[str, str], name: str, default: bool) -> bool:
    return _choice(given, name, ("true", "false"), str(default).lower()) == "true"


def _choice(given: Mapping[str, str], name: str, allowed: tuple[str, ...], default: str) -> str:
    value = given.get(name.lower(), default).lower()
    if value not in allowed:
        raise OptionError(f"option {name} is {value!r}; expected {' or '.join(allowed)}")
    return value


def _isolation(given: Mapping[str, str]) -> str:
    value = given.get("kafka.isolation.level", given.get("isolationlevel", "read_committed"))
    if value not in ("read_committed", "read_uncommitted"):
        raise OptionError(f"option kafka.isolation.level is {value!r}; expected read_committed or read_uncommitted")
    return value


# As Spark reads durations, but for microseconds.
_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


def _duration_ms(text: str) -> int:
    found = text.strip().lower()
    digits = found.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = found[len(digits) :].strip() or "ms"
    if not digits.isdecimal() or unit not in _UNITS_MS:
        raise OptionError(f"option maxTriggerDelay is {text!r}; expected a number and {', '.join(_UNITS_MS)}")
    return int(digits) * _UNITS_MS[unit]
