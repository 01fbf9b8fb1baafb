"""`semel produce` and `semel consume` on a real broker: kcat's habits, nulls, JSON, offsets, exit codes."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest

from semel.cli import main
from semel.client.admin import Admin
from semel.client.consumer import Consumer
from semel.client.producer import Producer
from semel.local.brokers import SemelBroker, semel_command
from semel.local.processes import Process
from tests.support.reading import read_topic
from tests.support.waiting import PATIENCE_S, STALL_S

_numbers = count()


class Done(NamedTuple):
    code: int
    out: bytes
    err: str

    @property
    def lines(self) -> list[bytes]:
        return self.out.splitlines()


Run = Callable[..., Done]


@pytest.fixture
def run(shared_semel_broker: SemelBroker, capsysbinary, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line against the broker, with text on stdin."""
    monkeypatch.setenv("SEMEL_BROKERS", shared_semel_broker.bootstrap)

    def run_command(*arguments: str, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main(list(arguments))
        captured = capsysbinary.readouterr()
        return Done(code, captured.out, captured.err.decode())

    return run_command


@pytest.fixture
def topic(shared_semel_broker: SemelBroker) -> str:
    name = f"cli-{next(_numbers)}"
    with Admin(bootstrap_servers=shared_semel_broker.bootstrap) as admin:
        admin.create_topic(name, partitions=1)
    return name


# --- writing ---


def test_each_line_is_a_record(run: Run, topic: str, shared_semel_broker: SemelBroker) -> None:
    assert run("produce", topic, stdin=b"one\ntwo\n\nlast") == Done(0, b"", "")
    assert [row.value for row in read_topic(shared_semel_broker.bootstrap, topic)] == [b"one", b"two", b"", b"last"]


def test_keys_headers_and_nulls(run: Run, topic: str, shared_semel_broker: SemelBroker) -> None:
    run("produce", topic, "-K", ":", "-Z", "-H", "a=1", "-H", "b=x=y", stdin=b"k:v\nk:\n:v\nplain\n")
    rows = read_topic(shared_semel_broker.bootstrap, topic)
    assert [(row.key, row.value) for row in rows] == [(b"k", b"v"), (b"k", None), (None, b"v"), (None, b"plain")]
    assert rows[0].headers == [("a", b"1"), ("b", b"x=y")]


def test_headers_of_one_name_are_all_written(run: Run, topic: str, shared_semel_broker: SemelBroker) -> None:
    assert run("produce", topic, "-H", "a=1", "-H", "a=2", stdin=b"x\n").code == 0
    (record,) = read_topic(shared_semel_broker.bootstrap, topic)
    assert record.headers == [("a", b"1"), ("a", b"2")]


def test_arguments_are_written_byte_by_byte(run: Run, topic: str, shared_semel_broker: SemelBroker) -> None:
    """As a shell hands them over, UTF-8 or not."""
    any_bytes = os.fsdecode(b"\xc3\xbc\xff")
    done = run("produce", topic, "-k", any_bytes, "-H", f"h={any_bytes}", "-D", any_bytes, stdin=b"x\xc3\xbc\xffy")
    assert done.code == 0, done
    rows = read_topic(shared_semel_broker.bootstrap, topic)
    assert [(row.key, row.value) for row in rows] == [(b"\xc3\xbc\xff", b"x"), (b"\xc3\xbc\xff", b"y")]
    assert rows[0].headers == [("h", b"\xc3\xbc\xff")]


def test_files_delimiters_and_counts(run: Run, topic: str, tmp_path: Path, shared_semel_broker: SemelBroker) -> None:
    (tmp_path / "a").write_bytes(b"1;2;3")
    (tmp_path / "b").write_bytes(b"4;5")
    run("produce", topic, str(tmp_path / "a"), "-", str(tmp_path / "b"), "-D", ";", "-c", "6", stdin=b"x")
    run("produce", topic, "--whole", str(tmp_path / "a"), "-z", "lz4", "-k", "whole")
    rows = read_topic(shared_semel_broker.bootstrap, topic)
    assert [row.value for row in rows] == [b"1", b"2", b"3", b"x", b"4", b"5", b"1;2;3"]
    assert rows[-1].key == b"whole"


def test_json_goes_out_and_in_without_loss(run: Run, topic: str, shared_semel_broker: SemelBroker) -> None:
    with Producer(bootstrap_servers=shared_semel_broker.bootstrap) as producer:
        now_ms = int(time.time() * 1000)
        producer.send(topic, b"\xff\x00", key="ключ", headers=[("h", None), ("h", b"\xfe")], timestamp=now_ms)
        producer.send(topic, None, key=b"tombstone", timestamp=now_ms + 1)
        producer.send(topic, b'{"a": 1}', timestamp=now_ms + 2)
    copied = run("consume", topic, "-J", "-e")
    copy = f"{topic}-copy"
    run("topic", "create", copy, "-p", "1")
    assert run("produce", copy, "-J", stdin=copied.out).code == 0
    bootstrap = shared_semel_broker.bootstrap
    assert read_topic(bootstrap, copy) == read_topic(bootstrap, topic)


def test_json_of_other_tools_is_taken(run: Run, topic: str, shared_semel_broker: SemelBroker) -> None:
    lines = [{"payload": "kcat", "key": "k"}, {"value": {"nested": [1]}, "headers": {"a": "b"}}, {"value": 5}]
    run("produce", topic, "-J", stdin="\n".join(map(json.dumps, lines)).encode())
    rows = read_topic(shared_semel_broker.bootstrap, topic)
    assert [row.value for row in rows] == [b"kcat", b'{"nested":[1]}', b"5"]
    assert rows[1].headers == [("a", b"b")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"value": [1e999]}', "not JSON compliant"),
        (b"{", "no JSON"),
        (b"[1]", "expected a JSON object"),
        (b"[" * 100_000, "no JSON"),
    ],
)
def test_broken_json_is_named_by_its_place(run: Run, topic: str, line: bytes, reason: str) -> None:
    done = run("produce", topic, "-J", stdin=b'{"value": "ok"}\n' + line)
    assert done.code == 1
    assert "record 2: " in done.err
    assert reason in done.err


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"order_id": 1}', "unknown field 'order_id'"),
        (b'{"key": "k", "valeu": "x"}', "did you mean 'value'?"),
        (b'{"value": "x", "Key": "k"}', "did you mean 'key'?"),
        (b'{"key": "k"}', '"value": null'),
        (b"{}", '"value": null'),
        (b'{"value": "x", "payload": "y"}', "value and payload"),
        (b'{"value": "x", "value_base64": "eA=="}', "value and value_base64"),
        (b'{"value": "x", "headers": ["ab"]}', "headers"),
        (b'{"value": "x", "partition": "0"}', "partition"),
        (b'{"value": "x", "timestamp": "now"}', "timestamp"),
    ],
)
def test_json_that_does_not_say_what_to_write_writes_nothing(
    run: Run, topic: str, shared_semel_broker: SemelBroker, line: bytes, reason: str
) -> None:
    """A misspelt or missing value would be stored as null, which deletes the key of a compacted topic."""
    done = run("produce", topic, "-J", stdin=line)
    assert (done.code, done.out) == (1, b"")
    assert "stdin, record 1" in done.err
    assert reason in done.err
    assert read_topic(shared_semel_broker.bootstrap, topic) == []


def test_null_is_written_only_where_it_is_written_as_null(
    run: Run, topic: str, shared_semel_broker: SemelBroker
) -> None:
    assert run("produce", topic, "-J", stdin=b'{"key": "k", "value": null}').code == 0
    (record,) = read_topic(shared_semel_broker.bootstrap, topic)
    assert (record.key, record.value) == (b"k", None)


def test_json_of_kcat_is_taken_with_its_headers_and_time(
    run: Run, topic: str, shared_semel_broker: SemelBroker
) -> None:
    line = {"topic": "a", "partition": 3, "offset": 7, "tstype": "create", "ts": 1_700_000_000_000, "broker": 1}
    line |= {"headers": ["h", "1", "empty", None], "key": "k", "payload": "v"}
    assert run("produce", topic, "-J", stdin=json.dumps(line).encode()).code == 0
    (record,) = read_topic(shared_semel_broker.bootstrap, topic)
    assert (record.key, record.value, record.timestamp) == (b"k", b"v", 1_700_000_000_000)
    assert record.headers == [("h", b"1"), ("empty", None)]


def test_one_transaction_for_all_lines(run: Run, topic: str, shared_semel_broker: SemelBroker) -> None:
    assert run("produce", topic, "--transactional-id", topic, "--summary", stdin=b"a\nb\n").lines == [
        json.dumps({"topic": topic, "records": 2}, separators=(",", ":")).encode()
    ]
    failed = run("produce", topic, "-J", "--transactional-id", topic, stdin=b'{"value": "c"}\nnonsense\n')
    assert failed.code == 1
    assert [row.value for row in read_topic(shared_semel_broker.bootstrap, topic)] == [b"a", b"b"]


# --- reading ---


@pytest.fixture
def ten(run: Run, topic: str) -> str:
    run("produce", topic, "-K", "=", stdin=b"".join(b"k%d=v%d\n" % (number, number) for number in range(10)))
    return topic


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ([], range(10)),
        (["-o", "beginning"], range(10)),
        (["-o", "end"], []),
        (["-o", "7"], [7, 8, 9]),
        (["-o", "-2"], [8, 9]),
        (["-o", "-99"], range(10)),
        (["-o", "s@0"], range(10)),
        (["-o", "s@2100-01-01"], []),
        (["-o", "e@0"], []),
        (["-o", "3", "-c", "2"], [3, 4]),
        (["-p", "0", "-o", "9"], [9]),
    ],
)
def test_reading_starts_and_ends_where_it_says(run: Run, ten: str, where: list[str], expected) -> None:
    done = run("consume", ten, "-e", *where)
    assert done.code == 0
    assert done.lines == [b"v%d" % number for number in expected]


def test_nothing_before_the_named_offset_is_printed(
    run: Run, ten: str, shared_semel_broker: SemelBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if that offset is still to come: a consumer that is out of range would begin anew."""
    poll = Consumer.poll
    with Producer(bootstrap_servers=shared_semel_broker.bootstrap) as producer:

        def poll_after_one_more(*arguments, **options):
            producer.send(ten, b"more").result()
            return poll(*arguments, **options)

        monkeypatch.setattr(Consumer, "poll", poll_after_one_more)
        assert run("consume", ten, "-o", "20", "-c", "1", "-f", r"%o\n").lines == [b"20"]


def test_ways_to_print(run: Run, ten: str) -> None:
    run("produce", ten, "-Z", "-k", "last", stdin=b"\n")
    last = ["consume", ten, "-e", "-o", "-1"]
    assert run(*last).out == b"\n"
    assert run(*last, "-K", r"\t", "-Z", "-D", "|").out == b"last\tNULL|"
    assert run(*last, "-f", r"%t/%p/%o %k=%s %K:%S%%\n", "-Z").out == f"{ten}/0/10 last=NULL 4:-1%\n".encode()
    line = json.loads(run(*last, "-J").out)
    assert (line["topic"], line["offset"], line["key"], line["value"]) == (ten, 10, "last", None)


def test_group_goes_on_where_it_stopped(run: Run, ten: str) -> None:
    assert run("consume", ten, "-G", f"{ten}-g", "-c", "4").lines == [b"v0", b"v1", b"v2", b"v3"]
    assert run("consume", ten, "-G", f"{ten}-g", "-c", "2").lines == [b"v4", b"v5"]
    assert run("consume", ten, "-G", f"{ten}-g", "-c", "1", "-o", "beginning").lines == [b"v0"]


def test_open_transactions_are_shown_only_on_request(run: Run, ten: str, shared_semel_broker: SemelBroker) -> None:
    with Producer(bootstrap_servers=shared_semel_broker.bootstrap, transactional_id=ten) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(ten, b"open").result()
        assert run("consume", ten, "-e", "-o", "9").lines == [b"v9"]
        assert run("consume", ten, "-e", "-o", "9", "--uncommitted").lines == [b"v9", b"open"]


def test_reader_that_goes_away_ends_the_command_quietly(ten: str, shared_semel_broker: SemelBroker) -> None:
    command = " ".join([*semel_command(), "consume", ten, "-b", shared_semel_broker.bootstrap, "-c", "10", "|", "true"])
    with Process(["bash", "-c", command]) as process:
        process.wait(PATIENCE_S)
        assert "Traceback" not in process.output


# --- options ---


def test_options_of_a_consumer_are_taken(run: Run, ten: str) -> None:
    """Also where an admin client looks the topic up first."""
    options = ["-X", "fetch.min.bytes=2", "-X", "auto.offset.reset=latest"]
    assert run("consume", ten, "-e", "-c", "1", *options).lines == [b"v0"]


# --- wrong usage ---


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["consume", "no-such-topic", "-e"], 1, "there is no topic"),
        (["consume", "{topic}", "-p", "7", "-e"], 1, "no partition 7"),
        (["consume", "{topic}", "-o", "middle", "-e"], 2, "-o is beginning"),
        (["consume", "{topic}", "-o", "s@noon", "-e"], 2, "invalid time"),
        (["consume", "{topic}", "-f", "%x", "-e"], 2, "does not know"),
        (["consume", "{topic}", "-J", "-K", ":"], 2, "choose one"),
        (["consume", "{topic}", "-G", "g", "-e"], 2, "does not go with"),
        (["consume", "{topic}", "-c", "0"], 2, "at least 1"),
        (["consume", "{topic}", "-e", "-f", "\\"], 2, "invalid escape"),
        (["consume", "{topic}", "-o", "s@99999999999999999999"], 2, "invalid time"),
        (["consume", "{topic}", "-o", "s@²"], 2, "invalid time"),
        (["consume", "{topic}", "-o", "s@1969-12-31T12:00+00:00"], 2, "expected one after 1970"),
        (["consume", "{topic}", "-o", "s@0001-01-01"], 2, "expected one after 1970"),
        (["group", "reset", "g", "--topic", "{topic}", "--to-time", "1960-01-01"], 2, "expected one after 1970"),
        (["group", "list", "-b", "here"], 2, "expected host:port"),
        (["topic", "list", "-X", "security.protocol=HTTP"], 2, "security.protocol is 'HTTP'"),
        (["doctor", "--long-transaction", "nan"], 2, "above 0"),
        (["files", "compact", "/tmp", "--target-mb", "0"], 2, "at least 1"),
        (["consume", "{topic}", "-X", "nonsense"], 2, "NAME=VALUE"),
        (["consume", "{topic}", "-X", "grup.id=x"], 2, "did you mean"),
        (["consume", "{topic}", "-X", "fetch.max.bytes=0", "-e"], 2, "must be above 0"),
        (["produce", "{topic}", "-X", "linger.ms=soon"], 2, "linger.ms is 'soon'"),
        (["produce", "{topic}", "--transactional-id", ""], 2, "transactional.id is empty"),
        (["produce", "{topic}", "-k", "a", "-K", ":"], 2, "choose one"),
        (["produce", "{topic}", "-J", "--whole"], 2, "does not go with"),
        (["produce", "{topic}", "-p", "9"], 1, "no partition 9"),
        (["produce", "{topic}", "no-such-file"], 1, "No such file"),
        (["produce", "{topic}", "-", "no-such-file"], 1, "no-such-file: No such file or directory; nothing"),
        (["produce", "{topic}", "-", "/"], 1, "/: Is a directory; nothing was written"),
        (["produce", "{topic}", "-H", "novalue"], 2, "NAME=VALUE"),
        (["produce", "{topic}", "--timeout", "0"], 2, "above 0"),
        (["produce", "{topic}", "--timeout", "nan"], 2, "above 0"),
        (["produce", "{topic}", "--timeout", "inf"], 2, "above 0"),
        (["produce", "{topic}", "-c", "0"], 2, "at least 1"),
        (["produce", "{topic}", "-D", "\\u20ac"], 2, "invalid escape"),
        (["produce", "{topic}", "-K", ""], 2, "-K must not be empty"),
    ],
)
def test_wrong_usage_is_one_line_and_an_exit_code(
    run: Run, topic: str, shared_semel_broker: SemelBroker, arguments: list[str], code: int, message: str
) -> None:
    done = run(*(argument.format(topic=topic) for argument in arguments), stdin=b"x\n")
    assert done.code == code, done
    assert message in done.err
    assert len(done.err.splitlines()) == 1
    assert read_topic(shared_semel_broker.bootstrap, topic) == []


def test_files_may_be_pipes(run: Run, topic: str, tmp_path: Path, shared_semel_broker: SemelBroker) -> None:
    """As of `<(...)`: what is opened twice would lose what was in it."""
    os.mkfifo(tmp_path / "pipe")
    with Process([sys.executable, "-c", f"open('{tmp_path}/pipe', 'w').write('a\\nb\\n')"]):
        assert run("produce", topic, str(tmp_path / "pipe")).code == 0
    assert [record.value for record in read_topic(shared_semel_broker.bootstrap, topic)] == [b"a", b"b"]


@pytest.mark.parametrize("command", [["consume", "t", "-e"], ["produce", "t"], ["topic", "list"], ["group", "list"]])
def test_unreachable_brokers_are_named_within_the_timeout(run: Run, command: list[str]) -> None:
    started_s = time.monotonic()
    done = run(*command, "-b", "127.0.0.1:1", "--timeout", "0.5", stdin=b"x\n")
    assert time.monotonic() - started_s < STALL_S
    assert done.code == 1
    assert "127.0.0.1:1" in done.err
