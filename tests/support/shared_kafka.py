"""One Apache Kafka node for all processes of a test run: it is started when the first of them needs it.

A node takes four seconds of processor time to start and, idle, a thirtieth of a core: one for each process of pytest
would cost more than the tests on it. pytest's main process owns it, as it outlives all others.
"""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from pathlib import Path

from semel.local.apache_kafka import ApacheKafka, quick_jvm
from tests.support.direct import await_coordinators

START_TIMEOUT_S = 240

# Tests write records that are years old, and read them back: retention must not come in between.
RETENTION = {"log.retention.check.interval.ms": "86400000"}
FIRST_RETENTION = {"log.initial.task.delay.ms": "86400000"}  # Apache Kafka looks once soon after its start


def start_kafka(folder: Path) -> ApacheKafka:
    kafka = ApacheKafka(folder, jvm=quick_jvm(), properties=RETENTION | FIRST_RETENTION).start()
    try:
        await_coordinators(kafka.bootstrap)
    except BaseException:
        kafka.close()
        raise
    return kafka


class KafkaOwner:
    """In the main process. A process that connects to `port` gets the port of the node, or why there is none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._answer = ""
        self._lock = threading.Lock()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, name="owner of Apache Kafka", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            with connection:
                connection.sendall(self._started().encode())

    def _started(self) -> str:
        with self._lock:
            if not self._answer:
                try:
                    self._answer = str(self._stack.enter_context(start_kafka(self._folder)).port)
                except Exception as error:
                    self._answer = f"{type(error).__name__}: {error}"
            return self._answer

    def close(self) -> None:
        self._socket.close()
        with self._lock:
            self._stack.close()


def shared_kafka(owner_port: int, folder: Path) -> ApacheKafka:
    """The owner's node as other processes see it: its address and its tools. It must be left alive."""
    with socket.create_connection(("127.0.0.1", owner_port), START_TIMEOUT_S) as connection:
        answer = b"".join(iter(lambda: connection.recv(4096), b"")).decode()
    assert answer.isdecimal(), f"Apache Kafka did not start: {answer}"
    node = ApacheKafka(folder)
    node.port = int(answer)
    return node
