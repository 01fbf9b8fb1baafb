"""Records that the function cannot take: named in the error, skipped, replaced, or dead letters of the same
transaction."""

from __future__ import annotations

import inspect
import pickle
import re
import threading
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import semel
from semel.client.admin import Admin
from semel.client.errors import ConfigError, KafkaError, RetriableError
from semel.client.producer import Producer
from semel.local.brokers import SemelBroker
from semel.patterns.process import Processor
from semel.patterns.process_output import Emitter, Output, RecordError
from semel.protocol.messages.transactions import END_TXN
from semel.prove.proxy import Effect, Proxy, Rule
from tests.support.reading import Seen, read_topic
from tests.unit.patterns.test_process_end import COUNT, Pipe
from tests.unit.patterns.test_process_output import RECORD

BAD = {b"7", b"8", b"31"}
GOOD = Counter(value for value in (b"%d" % number for number in range(COUNT)) if value not in BAD)


@pytest.fixture
def pipe(shared_semel_broker: SemelBroker) -> Pipe:
    made = Pipe(shared_semel_broker)
    with Admin(bootstrap_servers=made.bootstrap) as admin:
        admin.create_topic(f"{made.source}.dead", partitions=1)
    return made


def picky(record: Any) -> Any:
    if record.value in BAD:
        raise ValueError(f"cannot read {record.value!r}")
    return record


def picky_table(table: pa.Table) -> pa.Table:
    if set(table.column("value").to_pylist()) & BAD:
        raise ValueError("cannot read some of it")
    return table


def dead(pipe: Pipe) -> list[Seen]:
    return read_topic(pipe.bootstrap, f"{pipe.source}.dead")


# --- the error names the record ---


@pytest.mark.parametrize(
    "function", [picky, lambda record: (picky(record) for _ in range(1))], ids=["row", "generator"]
)
def test_error_names_topic_partition_and_offset(function: Any) -> None:
    emitter = Emitter(function, "out", tables=False)
    with pytest.raises(
        RecordError, match=r"in-1 at offset 5.*ValueError: cannot read b'7'.*dead_letter_topic"
    ) as raised:
        emitter.outputs([RECORD._replace(offset=4), RECORD._replace(value=b"7")])
    error = raised.value
    assert (error.topic, error.partition, error.offset) == ("in", 1, 5)
    assert isinstance(error.__cause__, ValueError)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.topic, again.partition, again.offset) == (str(error), "in", 1, 5)


def test_error_on_a_table_names_the_offsets_of_the_table() -> None:
    table = pa.table({"topic": ["in"] * 3, "partition": [1, 1, 2], "offset": [5, 9, 4], "value": [b"1", b"7", b"2"]})
    with pytest.raises(RecordError, match=r"in-1 offsets 5 to 9, in-2 offset 4") as raised:
        Emitter(picky_table, "out", tables=True).outputs(table)
    assert (raised.value.topic, raised.value.partition, raised.value.offset) == ("in", 1, 5)


@pytest.mark.parametrize("tables", [False, True])
def test_errors_of_the_cluster_and_of_the_program_are_not_the_records_fault(tables: bool) -> None:
    def fail(_: Any) -> Any:
        raise RetriableError("another cluster is busy")

    emitter = Emitter(fail, "out", tables, dead_letter_topic="dead", on_error=lambda given, error: None)
    batch = pa.table({"value": [b"x"]}) if tables else [RECORD]
    with pytest.raises(RetriableError):
        emitter.outputs(batch)
    if not tables:
        with pytest.raises(ConfigError, match="the function returned int"):
            Emitter(lambda record: 5, "out", tables, dead_letter_topic="dead").outputs([RECORD])


# --- dead letters ---


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once", "at_most_once"])
@pytest.mark.parametrize("tables", [False, True], ids=["rows", "tables"])
def test_bad_records_go_to_the_dead_letter_topic_as_they_were(pipe: Pipe, guarantee: str, tables: bool) -> None:
    with Producer(bootstrap_servers=pipe.bootstrap) as producer:
        producer.send(pipe.source, b"7", b"key", 0, 1_700_000_000_000, [("h", b"1")])
    options = pipe.options(
        stop_at_end=True, dead_letter_topic=f"{pipe.source}.dead", guarantee=guarantee, tables=tables
    )
    stats = semel.process(pipe.source, pipe.sink, picky_table if tables else picky, **options)
    assert (stats.records_in, stats.records_out, stats.dead_letters) == (COUNT + 1, COUNT - 3, 4)
    assert pipe.written() == GOOD
    letters = dead(pipe)
    assert Counter(letter.value for letter in letters) == Counter([*BAD, b"7"])
    (letter,) = (letter for letter in letters if letter.key == b"key")
    assert letter.timestamp == 1_700_000_000_000
    reason = b"ValueError: cannot read some of it" if tables else b"ValueError: cannot read b'7'"
    assert letter.headers == [
        ("h", b"1"),
        ("semel.dead-letter.reason", reason),
        ("semel.dead-letter.topic", pipe.sink.encode()),
        ("semel.dead-letter.source", f"{pipe.source}-0@{COUNT // 3}".encode()),
    ]


def test_dead_letters_and_output_of_a_lost_transaction_are_written_once(pipe: Pipe) -> None:
    with Proxy(pipe.bootstrap) as proxy:
        lost = proxy.add(Rule(END_TXN, Effect.DROP_REQUEST, times=2))
        options = pipe.options(bootstrap_servers=proxy.bootstrap, stop_at_end=True, max_records=20)
        semel.process(pipe.source, pipe.sink, picky, **options, dead_letter_topic=f"{pipe.source}.dead")
        lost.assert_fired(2)
    assert pipe.written() == GOOD
    assert Counter(letter.value for letter in dead(pipe)) == Counter(BAD)


def test_dead_letters_are_invisible_until_the_transaction_commits(pipe: Pipe) -> None:
    """An error after a dead letter, in the same transaction, takes the dead letter with it."""
    seen = threading.Event()

    def fail_later(record: Any) -> Any:
        if record.value == b"59":
            seen.set()
            raise KeyboardInterrupt
        return picky(record)

    options = pipe.options(stop_at_end=True, dead_letter_topic=f"{pipe.source}.dead", max_records=1_000)
    with pytest.raises(KeyboardInterrupt):
        semel.process(pipe.source, pipe.sink, fail_later, **options)
    assert seen.is_set()
    assert dead(pipe) == []
    assert pipe.written() == Counter()


@pytest.mark.parametrize("tables", [False, True], ids=["rows", "tables"])
def test_output_that_is_too_large_makes_its_record_a_dead_letter(pipe: Pipe, tables: bool) -> None:
    """As on Spark. Nothing of the record is written, not even an output that is small enough."""

    def blow_up(record: Any) -> Any:
        return [record, Output(b"x" * 30_000)] if record.value in BAD else record

    def blow_up_table(table: pa.Table) -> pa.Table:
        values = [b"x" * 30_000 if value in BAD else value for value in table.column("value").to_pylist()]
        return pa.table({"value": pa.array(values, pa.binary())})

    options = pipe.options(stop_at_end=True, dead_letter_topic=f"{pipe.source}.dead", tables=tables)
    options["producer"] = {"max.request.size": 20_000}
    stats = semel.process(pipe.source, pipe.sink, blow_up_table if tables else blow_up, **options)
    assert stats.dead_letters == 3
    assert pipe.written() == GOOD
    letters = dead(pipe)
    assert Counter(letter.value for letter in letters) == Counter(BAD)
    assert b"max.request.size" in dict(letters[0].headers)["semel.dead-letter.reason"]  # type: ignore[operator]


def test_headers_of_any_kind_are_written_where_there_is_a_dead_letter_topic(pipe: Pipe) -> None:
    """An iterator can be read once: its headers were gone after the check of the size."""
    kinds: dict[bytes, Any] = {b"0": iter([("a", b"1")]), b"1": {"a": "1"}, b"2": [("a", b"1")]}

    def name(record: Any) -> Any:
        return Output(record.value, headers=kinds[record.value]) if record.value in kinds else None

    stats = semel.process(
        pipe.source, pipe.sink, name, **pipe.options(stop_at_end=True, dead_letter_topic=f"{pipe.source}.dead")
    )
    assert stats.dead_letters == 0
    assert {seen.value: seen.headers for seen in read_topic(pipe.bootstrap, pipe.sink)} == {
        value: [("a", b"1")] for value in kinds
    }


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (Output(b"v", headers=[("\ud800", b"")]), "a header's name"),
        (Output(b"v", headers=[("name", 5)]), "header 'name' is bytes, text or None"),  # type: ignore[list-item]
        (Output(5), "value is bytes, text or None"),  # type: ignore[arg-type]
        (Output("\ud800"), "surrogates not allowed"),
        (Output(b"v", timestamp=-1), "a timestamp is"),
        (Output(b"v", timestamp=1.5), "a timestamp is"),  # type: ignore[arg-type]
        (Output(b"v", topic="no topic"), "cannot name a topic"),
        (Output(b"v", topic=".."), "cannot name a topic"),
        (Output(b"v", partition=-1), "partition is -1"),
        (Output(b"v", partition="1"), "partition is '1'"),  # type: ignore[arg-type]
    ],
)
def test_output_that_no_producer_takes_makes_its_record_a_dead_letter(output: Output, reason: str) -> None:
    emitter = Emitter(lambda record: output, "out", False, dead_letter_topic="dead", max_record_bytes=1_000)
    made = emitter.outputs([RECORD])
    assert made.outputs == []
    (letter,) = made.dead_letters
    assert (letter.value, letter.key) == (RECORD.value, RECORD.key)
    assert reason in dict(letter.headers)["semel.dead-letter.reason"].decode()  # type: ignore[union-attr]


def test_partition_may_be_a_number_of_numpy() -> None:
    """The producer takes it, so with a dead-letter topic it must not make every record a dead letter."""
    output: Any = Output(b"v", partition=np.int64(3))  # type: ignore[arg-type]
    emitter = Emitter(lambda record: output, "out", False, dead_letter_topic="dead", max_record_bytes=1_000)
    made = emitter.outputs([RECORD])
    assert made == ([Output(b"v", partition=3)], [])
    assert type(made.outputs[0].partition) is int, "what packs a copy of it takes no other"


@pytest.mark.parametrize("tables", [False, True], ids=["rows", "tables"])
def test_record_whose_dead_letter_would_be_too_large_is_cut(pipe: Pipe, tables: bool) -> None:
    """The headers that say why make it larger than the record was. As on Spark, its beginning is kept, and its size."""
    with Producer(bootstrap_servers=pipe.bootstrap) as producer:
        producer.send(pipe.source, b"v" * 19_000, b"k" * 500, headers=[("h", b"1")])

    def fail(given: Any) -> Any:
        raise ValueError("never")

    options = pipe.options(stop_at_end=True, dead_letter_topic=f"{pipe.source}.dead", tables=tables)
    options["producer"] = {"max.request.size": 19_600}
    stats = semel.process(pipe.source, pipe.sink, fail, **options)
    assert stats.dead_letters == COUNT + 1
    (letter,) = (letter for letter in dead(pipe) if letter.key is not None)
    assert (letter.value, letter.key) == (b"v" * 9_800, b"k" * 500)
    headers = dict(letter.headers)
    assert headers["semel.dead-letter.reason"] == b"ValueError: never"
    assert headers["semel.dead-letter.bytes"] == b"19500"
    assert "h" not in headers


# --- what the broker refuses ---


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once", "at_most_once"])
@pytest.mark.parametrize(
    ("output", "name"),
    [
        (Output(b"v" * 2_000), "MESSAGE_TOO_LARGE"),
        (Output(b"v", timestamp=10**15), "INVALID_TIMESTAMP"),
        (Output(b"v", topic="no topic"), "INVALID_TOPIC_EXCEPTION"),
    ],
    ids=["too large", "in the future", "no topic"],
)
def test_record_that_the_broker_never_takes_ends_the_loop(
    shared_semel_broker: SemelBroker, guarantee: str, output: Output, name: str
) -> None:
    """It was read, processed and refused again for ever, with nothing but a warning."""
    pipe = Pipe(shared_semel_broker)
    limited = {"max.message.bytes": "1000"}
    with Admin(bootstrap_servers=pipe.bootstrap) as admin:
        admin.create_topic(f"{pipe.source}.small", partitions=1, configs=limited)
    loop = Processor(
        pipe.source,
        f"{pipe.source}.small",
        lambda record: output,
        guarantee=guarantee,
        **pipe.options(stop_at_end=True, on_settled=lambda stats: loop.stop() if stats.aborts > 3 else None),
    )
    with pytest.raises(KafkaError, match=name):
        loop.run()


# --- on_error ---


@pytest.mark.parametrize("tables", [False, True], ids=["rows", "tables"])
def test_on_error_skips_replaces_or_hands_on(pipe: Pipe, tables: bool) -> None:
    def value_of(given: Any) -> bytes:
        found = given.column("value")[0].as_py() if tables else given.value
        assert isinstance(found, bytes)
        return found

    def decide(given: Any, error: Exception) -> Any:
        assert isinstance(error, ValueError)
        if value_of(given) == b"7":
            return None
        if value_of(given) == b"8":
            return pa.table({"value": [b"eight"]}) if tables else Output(b"eight")
        raise error

    options = pipe.options(stop_at_end=True, dead_letter_topic=f"{pipe.source}.dead", on_error=decide, tables=tables)
    stats = semel.process(pipe.source, pipe.sink, picky_table if tables else picky, **options)
    assert pipe.written() == GOOD + Counter([b"eight"])
    assert [letter.value for letter in dead(pipe)] == [b"31"]
    assert stats.dead_letters == 1


def test_error_of_on_error_is_named_where_there_is_no_dead_letter_topic() -> None:
    def hand_on(record: Any, error: Exception) -> Any:
        raise RuntimeError("on_error is broken, too") from error

    with pytest.raises(RecordError, match="RuntimeError: on_error is broken"):
        Emitter(picky, "out", tables=False, on_error=hand_on).outputs([RECORD._replace(value=b"7")])


def test_table_is_halved_only_as_far_as_it_is_bad() -> None:
    sizes: list[int] = []

    def count(table: pa.Table) -> pa.Table:
        sizes.append(table.num_rows)
        return picky_table(table)

    values = [b"x"] * 1_000
    values[700] = b"7"
    numbers = pa.array(range(1_000))
    table = pa.table({"topic": ["in"] * 1_000, "partition": [0] * 1_000, "offset": numbers, "value": values})
    made = Emitter(count, "out", tables=True, dead_letter_topic="dead").outputs(table)
    assert [letter.value for letter in made.dead_letters] == [b"7"]
    assert sum(part.num_rows for part in made.outputs) == 999
    assert len(sizes) <= 21
    offsets = pa.concat_tables(made.outputs).column("offset")
    assert offsets.to_pylist() == [number for number in range(1_000) if number != 700], "in their order"


# --- options ---


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("dead_letters_topic", "did you mean 'dead_letter_topic'?"),
        ("bootstrap.servers", "did you mean 'bootstrap_servers'?"),
        ("idle_stop", "did you mean 'idle_stop_ms'?"),
        ("xyzzy", "the options are "),
    ],
)
def test_wrong_option_gets_the_nearest_name(option: str, hint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        semel.process("in", "out", picky, application_id="app", **{option: 1})
    assert repr(option) in str(raised.value)
    assert hint in str(raised.value)


def test_help_lists_every_option() -> None:
    signature = inspect.signature(semel.process)
    options = [name for name in inspect.signature(Processor).parameters if name != "unknown"]
    assert list(signature.parameters) == options
    documented = inspect.getdoc(semel.process) or ""
    assert [name for name in options if f"\n{name} " not in documented] == []


def test_dead_letters_cannot_go_back_to_the_source() -> None:
    with pytest.raises(ConfigError, match="source"):
        Processor(["a", "b"], "out", picky, application_id="app", dead_letter_topic="b")
    with pytest.raises(ConfigError, match="on_error"):
        Processor("a", "out", picky, application_id="app", on_error="skip")  # type: ignore[arg-type]


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
@pytest.mark.parametrize("returned", [[1], b"x", {"out": 3}])
def test_a_table_function_that_returns_no_table_makes_no_dead_letters(
    pipe: Pipe, guarantee: str, returned: object
) -> None:
    options = pipe.options(stop_at_end=True, dead_letter_topic=f"{pipe.source}.dead", guarantee=guarantee, tables=True)
    with pytest.raises(
        semel.ConfigError, match=r"the function returned \w+; with tables=True expected None, a pyarrow"
    ):
        semel.process(pipe.source, pipe.sink, lambda table: returned, **options)
    assert dead(pipe) == []


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("upper", {}, "the function is 'upper'; expected a function of a record"),
        (lambda: None, {}, "the function must take a record; it is <lambda>()"),
        (lambda record: None, {"state": "s"}, "the function must take a record and the state; it is <lambda>(record)"),
        (lambda record, state: None, {}, "there is no state; give process() state=..."),
        (semel.deduplicate(by=bytes, within_ms=1), {}, "there is no state; give process() state=..."),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_at_the_start(function: Any, options: Any, message: str) -> None:
    with pytest.raises(semel.ConfigError, match=re.escape(message)):
        semel.Processor("a", "b", function, application_id="c", dead_letter_topic="d", **options)


@pytest.mark.parametrize("function", [bytes.upper, lambda record, more=1: None, lambda *given: None, {}.get, max])
def test_functions_of_any_kind_are_taken(function: Any) -> None:
    semel.Processor("a", "b", function, application_id="c")
