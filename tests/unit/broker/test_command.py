"""`semel broker` as users start it: one line when it is ready, JSON logs, a clean end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from semel.local.brokers import semel_command
from semel.protocol.messages.cluster import METADATA, MetadataRequest, MetadataRequestTopic
from semel.protocol.messages.records import FETCH, FetchPartition, FetchRequest, FetchTopic
from tests.support.direct import DirectClient, batch_of
from tests.support.waiting import PATIENCE_S, STALL_S


class Running:
    """A broker process whose output the test looks at."""

    def __init__(self, *arguments: str | Path) -> None:
        command = semel_command("broker", *arguments)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()

    @property
    def bootstrap(self) -> str:
        return self.line.split()[4]

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """(exit code, rest of stdout, stderr)"""
        self.process.send_signal(number)
        out, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, errors


def failed(*arguments: str | Path) -> tuple[int, str]:
    done = subprocess.run(
        semel_command("broker", *arguments), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_line_when_ready_json_logs_and_a_clean_end(tmp_path: Path, number: int) -> None:
    broker = Running("--data", tmp_path, "--listen", "127.0.0.1:0")
    host, port = broker.bootstrap.split(":")
    assert broker.line == f"semel broker ready on {host}:{port} (data {tmp_path}, fsync=commit)\n"
    assert (host, int(port) > 0) == ("127.0.0.1", True)
    code, out, errors = broker.stop(number)
    assert (code, out) == (0, "")
    lines = [json.loads(line) for line in errors.splitlines()]
    assert lines[-1]["message"] == "stopping"
    assert {"time", "level", "logger", "message"} <= set(lines[-1])


def test_a_stop_answers_those_who_wait(tmp_path: Path) -> None:
    broker = Running("--data", tmp_path, "--listen", "127.0.0.1:0")
    with DirectClient(broker.bootstrap) as client:
        client.create_topic("t")
        client.produce("t", batch_of([b"x"]))
        ask = FetchPartition(0, fetch_offset=1, partition_max_bytes=1000)
        waiting = FetchRequest(max_wait_ms=60_000, min_bytes=1, topics=[FetchTopic("t", partitions=[ask])])
        client.send(FETCH, waiting, 12)
        started_s = time.monotonic()
        code, _, _ = broker.stop()
        assert client.receive(FETCH, 12).responses[0].partitions[0].high_watermark == 1
    assert code == 0
    assert time.monotonic() - started_s < STALL_S


def test_settings_come_from_the_file_then_set_then_options(tmp_path: Path) -> None:
    config = tmp_path / "server.properties"
    config.write_text("# mine\nnum.partitions=3\nfsync=commit\nbroker.rack=r1\nnode.id=7\n")
    broker = Running(
        "--data", tmp_path / "d", "--listen", "127.0.0.1:0", "--config", config, "--set", "num.partitions=5",
        "--fsync", "os",
    )  # fmt: skip
    assert broker.line.endswith("fsync=os)\n")
    with DirectClient(broker.bootstrap) as client:
        request = MetadataRequest([MetadataRequestTopic(name="auto")])
        client.call(METADATA, request, 12)  # creates it
        answer = client.call(METADATA, request, 12)
    assert [(node.node_id, node.rack) for node in answer.brokers] == [(7, "r1")]
    assert len(answer.topics[0].partitions) == 5
    broker.stop()


def test_advertised_listeners_are_what_clients_are_told(tmp_path: Path) -> None:
    broker = Running(
        "--data", tmp_path, "--listen", "127.0.0.1:0", "--set", "advertised.listeners=PLAINTEXT://example.org:1234"
    )
    with DirectClient(broker.bootstrap) as client:
        (node,) = client.call(METADATA, MetadataRequest([]), 12).brokers
    assert (node.host, node.port) == ("example.org", 1234)
    broker.stop()


def test_a_broker_that_listens_everywhere_tells_clients_the_address_that_they_reached(tmp_path: Path) -> None:
    broker = Running("--data", tmp_path, "--listen", "0.0.0.0:0")
    port = int(broker.bootstrap.rpartition(":")[2])
    with DirectClient(f"127.0.0.1:{port}") as client:
        (node,) = client.call(METADATA, MetadataRequest([]), 12).brokers
    assert (node.host, node.port) == ("127.0.0.1", port)
    broker.stop()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("zookeeper.connect=x", "setting zookeeper.connect means nothing to this broker: there is no ZooKeeper"),
        ("num.partition=3", "unknown setting num.partition; did you mean num.partitions?"),
        ("listeners=SSL://127.0.0.1:0", "expected PLAINTEXT://HOST:PORT (there is no security layer)"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(tmp_path: Path, setting: str, message: str) -> None:
    code, errors = failed("--data", tmp_path, "--set", setting)
    assert code == 1
    assert message in errors
    assert errors.count("\n") == 1


def test_wrong_usage_has_exit_code_2(tmp_path: Path) -> None:
    assert failed("--data", tmp_path, "--set", "nonsense") == (2, "semel: --set is 'nonsense'; expected NAME=VALUE\n")
    assert failed() == (2, "semel: say where the data goes: --data DIR\n")
    assert failed("--data", tmp_path, "--listen", "9092")[0] == 2
    for option in ("--listen", "--metrics"):  # the system would take a port modulo 65536
        assert failed("--data", tmp_path, option, "127.0.0.1:65536")[0] == 2
    (tmp_path / "settings").write_bytes(b"broker.rack=\xff\n")
    code, errors = failed("--data", tmp_path, "--config", tmp_path / "settings")
    assert (code, errors) == (2, f"semel: --config {tmp_path}/settings is no text in UTF-8\n")


def test_a_second_broker_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    broker = Running("--data", tmp_path, "--listen", "127.0.0.1:0")
    code, errors = failed("--data", tmp_path, "--listen", "127.0.0.1:0")
    assert code == 1
    assert str(tmp_path) in errors
    broker.stop()


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, errors = failed("--data", tmp_path, "--listen", f"127.0.0.1:{port}")
    assert code == 1
    assert "address already in use" in errors.lower()


def test_a_data_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    code, errors = failed("--data", tmp_path / "notes.txt", "--listen", "127.0.0.1:0")
    assert code == 1
    assert errors.startswith(f"semel: {tmp_path}/notes.txt cannot be the data folder: it is a file; choose")


def test_a_page_that_cannot_be_served_keeps_the_broker_from_starting(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, errors = failed("--data", tmp_path / "data", "--listen", "127.0.0.1:0", "--ui", str(port))
    assert code == 1
    assert errors == (
        f"semel: cannot serve the page on 127.0.0.1:{port}: Address already in use; choose another with --ui\n"
    )
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "two..dots"])
def test_a_host_that_is_not_there_is_named(tmp_path: Path, host: str) -> None:
    code, errors = failed("--data", tmp_path, "--listen", f"{host}:0")
    assert code == 1
    assert f"cannot listen on {host}:0" in errors
    code, errors = failed("--data", tmp_path, "--listen", "127.0.0.1:0", "--metrics", f"{host}:0")
    assert code == 1
    assert f"cannot serve metrics on {host}:0" in errors


def test_metrics_are_served_if_asked_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    broker = Running("--data", tmp_path, "--listen", "127.0.0.1:0", "--metrics", f"127.0.0.1:{port}")
    with DirectClient(broker.bootstrap) as client:
        client.create_topic("measured")
        client.produce("measured", batch_of([b"x", b"y"]))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    assert 'semel_request_total_time_seconds_count{api="Produce"} 1' in text
    assert 'semel_log_end_offset{partition="0",topic="measured"} 2' in text
    assert "process_resident_memory_bytes" in text
    assert broker.stop()[0] == 0
