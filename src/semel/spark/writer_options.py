"""The options of `write` and `writeStream.format("semel")`: those of `semel.sink`, in Spark's spelling."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from semel.spark.options import OptionError
from semel.spark.sink_options import SinkOptions


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("true or false")
    return text.lower() == "true"


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number") from None


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


# Spark's spelling -> (name in SinkOptions, how to read it)
OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "applicationId": ("application_id", str),
    "topic": ("topic", str),
    "topics": ("extra_topics", _list),
    "deadLetterTopic": ("dead_letter_topic", str),
    "badColumn": ("bad_column", str),
    "partitioner": ("partitioner", str),
    "compression": ("compression", str),
    "transactionTimeoutMs": ("transaction_timeout_ms", _number),
    "maxRequestSize": ("max_request_size", _number),
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
    for name in given:
        _check_known(name, given, also)
    for name, what in (("kafka.bootstrap.servers", "brokers as host:port,host:port"), ("applicationId", "a name")):
        if name.lower() not in given:
            raise OptionError(f"option {name} is missing; give {what}")
    chosen = {
        field: _read(name, read, given[name.lower()])
        for name, (field, read) in OPTIONS.items()
        if name.lower() in given
    }
    skipped = {"kafka.bootstrap.servers", "kafka.isolation.level"}
    client = {k.removeprefix("kafka."): v for k, v in given.items() if k.startswith("kafka.") and k not in skipped}
    return SinkOptions(bootstrap_servers=given["kafka.bootstrap.servers"], client=client, **chosen)


def _check_known(name: str, given: Mapping[str, str], also: tuple[str, ...]) -> None:
    if name in REFUSED and given[name].lower() != "false":
        raise OptionError(f"option {name} cannot be used here: {REFUSED[name]}")
    known = {option.lower(): option for option in (*OPTIONS, *also)}
    if name not in known and name not in SPARKS and name not in REFUSED and not name.startswith("kafka."):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {known[near[0]]}?" if near else f"known are {', '.join(known.values())} and kafka.*"
        raise OptionError(f"the writer has no option {name!r}; {hint}")


def _read(name: str, read: Callable[[str], Any], text: str) -> Any:
    try:
        return read(text)
    except ValueError as error:
        raise OptionError(f"option {name} is {text!r}; expected {error}") from None
