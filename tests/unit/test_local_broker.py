"""`semel.Broker`: a real broker inside a program, gone when the program is gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import confluent_kafka
import confluent_kafka.admin
import pytest

import semel
from semel.local.brokers import READY, BrokerFailedError, semel_command
from semel.local.processes import Process
from tests.support.waiting import PATIENCE_S, until


def write(bootstrap: str, value: str) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap})
    errors: list[object] = []
    producer.produce("t", value, on_delivery=lambda error, _: errors.append(error) if error else None)
    assert producer.flush(PATIENCE_S) == 0
    assert not errors


def read(bootstrap: str, count: int) -> list[bytes | None]:
    consumer = confluent_kafka.Consumer({"bootstrap.servers": bootstrap, "group.id": "g"})
    consumer.assign([confluent_kafka.TopicPartition("t", 0, 0)])
    found = [message.value() for message in consumer.consume(count, PATIENCE_S)]
    consumer.close()
    return found


def test_a_broker_in_a_with_block_keeps_records_over_kill_and_restart_and_cleans_up() -> None:
    with semel.Broker() as broker:
        folder = broker.data
        assert folder is not None
        write(broker.bootstrap, "one")
        broker.kill()
        broker.start()
        write(broker.bootstrap, "two")
        broker.restart()
        assert read(broker.bootstrap, 2) == [b"one", b"two"]
    assert not folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port that is bound cannot be listened on")
def test_the_port_of_a_killed_broker_is_given_to_no_other_program() -> None:
    with semel.Broker() as broker:
        broker.kill()
        with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
            other.bind((broker.host, broker.port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((broker.host, broker.port))
        broker.start()
        socket.create_connection((broker.host, broker.port)).close()


def test_a_given_folder_is_kept(tmp_path: Path) -> None:
    with semel.Broker(tmp_path / "data", fsync="os") as broker:
        write(broker.bootstrap, "one")
    with semel.Broker(tmp_path / "data") as broker:
        assert read(broker.bootstrap, 1) == [b"one"]


def test_settings_reach_the_broker() -> None:
    with semel.Broker(settings={"auto.create.topics.enable": False}) as broker:
        admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": broker.bootstrap})
        assert admin.list_topics("nope", PATIENCE_S).topics["nope"].error is not None


def test_a_wrong_setting_is_named() -> None:
    with pytest.raises(BrokerFailedError, match=r"unknown setting num\.partition; did you mean num\.partitions\?"):
        semel.Broker(settings={"num.partition": 3}).start()


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with semel.Broker(tmp_path), pytest.raises(BrokerFailedError, match=r"in use|locked|another"):
        semel.Broker(tmp_path).start()


def test_the_broker_dies_with_a_program_that_is_killed() -> None:
    program = (
        "import semel, time\nbroker = semel.Broker().start()\n"
        "print(broker.process_id, broker.data, flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process_id, folder = parent.stdout.readline().split()
        assert is_running(int(process_id))
        parent.send_signal(signal.SIGKILL)
    until(lambda: not is_running(int(process_id)), "the broker outlived its program")
    subprocess.run(["rm", "-rf", folder], check=True)


def test_a_broker_may_end_with_its_stdin(tmp_path: Path) -> None:
    command = semel_command("broker", "--data", tmp_path, "--listen", "127.0.0.1:0", "--end-with-stdin")
    with Process(command, stdin=True) as process:
        process.wait_for_line(READY, PATIENCE_S)
        process.close_stdin()
        assert process.wait(PATIENCE_S) == 0


def is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
        return "Z" not in Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2]
    except (ProcessLookupError, FileNotFoundError):
        return False
