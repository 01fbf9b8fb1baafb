"""Which options of a processing loop go together, and what they make of its consumer's options."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from semel.client.errors import ConfigError
from semel.patterns.process_modes import MODES
from semel.patterns.process_output import OnError
from semel.sinks.files.settings import Files
from semel.sinks.postgres.settings import Postgres


def check_guarantee(guarantee: str, application_id: str) -> None:
    if guarantee not in MODES:
        raise ConfigError(f"guarantee is {guarantee!r}; it must be one of {', '.join(MODES)}")
    if not application_id:
        raise ConfigError("application_id is empty; it names the consumer group that all instances share")


def check_limits(guarantee: str, commit_interval_ms: int, max_records: int, transaction_timeout_ms: int) -> None:
    if commit_interval_ms < 0 or max_records < 1:
        raise ConfigError("commit_interval_ms must not be negative, and max_records must be at least 1")
    if guarantee == "exactly_once" and transaction_timeout_ms <= commit_interval_ms:
        raise ConfigError(
            f"transaction_timeout_ms ({transaction_timeout_ms}) must exceed commit_interval_ms "
            f"({commit_interval_ms}), or every transaction runs into it"
        )


def check_bad_records(topics: list[str], dead_letter_topic: str | None, on_error: OnError | None) -> None:
    if dead_letter_topic in topics:
        raise ConfigError(f"dead_letter_topic {dead_letter_topic!r} is a source too: they would be read for ever")
    if on_error is not None and not callable(on_error):
        raise ConfigError(f"on_error is {on_error!r}; expected a function of (record, error)")


def check_external(
    sink: Postgres | Files, guarantee: str, tables: bool, dead_letter_topic: str | None, state: object
) -> None:
    name = type(sink).__name__
    if guarantee != "exactly_once":
        raise ConfigError(f"a {name} sink is exactly_once; guarantee={guarantee!r} would be less for the same work")
    if dead_letter_topic is not None:
        raise ConfigError(f"a {name} sink keeps dead letters in the same transaction: use {name}(dead_letters=True)")
    if state is not None:
        raise ConfigError("state goes with a topic as the sink; with a Postgres sink, keep it in the database")
    if isinstance(sink, Postgres) and tables and (sink.with_topics or sink.event_id is not None):
        raise ConfigError("with_topics and event_id of a Postgres sink take rows: leave tables=True out")
    if isinstance(sink, Files) and sink.format == "parquet" and sink.schema is None and not tables:
        raise ConfigError(
            "Parquet columns have types: give Files a schema, such as schema={'id': 'int64', 'name': 'string'}; or let "
            "the function return Arrow tables (tables=True), or write format='jsonl'"
        )


def check_function(function: object, has_state: bool) -> None:
    """Every record would fail, and become a dead letter where there is a topic for these."""
    if not callable(function):
        raise ConfigError(f"the function is {function!r}; expected a function of a record")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some functions in C nothing is known
        return
    wanted = "a record and the state" if has_state else "a record"
    if _takes(signature, 1 + has_state):
        return
    if not has_state and _takes(signature, 2):
        raise ConfigError("the function takes a record and the state, and there is no state; give process() state=...")
    raise ConfigError(f"the function must take {wanted}; it is {getattr(function, '__name__', '')}{signature}")


def _takes(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def check_state(guarantee: str, topics: list[str], options: dict[str, Any]) -> None:
    """With state the consumer has to read what is committed, and to keep partitions of one number together."""
    if guarantee != "exactly_once":
        raise ConfigError(
            f"state needs guarantee='exactly_once', not {guarantee!r}: nothing else keeps it and offsets equal"
        )
    if options.setdefault("isolation_level", "read_committed") != "read_committed":
        raise ConfigError("state needs isolation.level=read_committed, or it would be made of aborted records")
    if len(topics) > 1:
        is_classic = options.get("group_protocol", "classic") == "classic"
        name = "partition_assignment_strategy" if is_classic else "group_remote_assignor"
        if options.setdefault(name, "range") not in ("range", ["range"], ("range",)):
            raise ConfigError(f"state of several sources needs {name.replace('_', '.')}=range, not {options[name]!r}")


def consumer_options(application_id: str, instance: str | None, given: Mapping[str, Any] | None) -> dict[str, Any]:
    options = underscored(given)
    if instance is not None and options.get("group_protocol", "classic") == "classic":
        # A static member: one that was killed gets its partitions back at once. With the other protocol, its name is
        # taken until its session has ended.
        options.setdefault("group_instance_id", instance)
    return {
        "group_id": application_id,
        "auto_offset_reset": "earliest",
        "allow_auto_create_topics": False,  # a source that is created by reading it is always empty
        **options,
        "enable_auto_commit": False,
    }


def underscored(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Options by the names that Python's keywords can have: linger.ms and linger_ms are the same."""
    return {name.replace(".", "_"): value for name, value in (options or {}).items()}
