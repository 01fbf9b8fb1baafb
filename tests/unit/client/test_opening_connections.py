"""One thread at a time opens a connection to a broker, to the first of its addresses that responds."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any

import pytest

from semel.aio.connection import AsyncConnection
from semel.client import handshake
from semel.client.cluster import BlockingCalls
from semel.client.connection import BrokerConnection
from semel.client.errors import ConnectionFailedError
from semel.client.settings import ClientSettings
from semel.client.timing import Deadline
from tests.support.fake_broker import as_kafka, server
from tests.support.waiting import PATIENCE_S

SIGNALS = 200
PAUSE_S = 0.02
KEY = ("main", "localhost", 9092)


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_does_not_keep_other_threads_from_connecting() -> None:
    calls = BlockingCalls(ClientSettings.of({"bootstrap_servers": "localhost:9092"}))
    came = 0
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(SIGNALS):
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.001))
                until_s = time.monotonic() + PAUSE_S
                while time.monotonic() < until_s:
                    with calls._opening(KEY, Deadline(1.0)):
                        pass
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                came += 1
    finally:
        signal.signal(signal.SIGALRM, before)
    assert came > SIGNALS / 2, "the others came where Python drops them, as in a callback of the garbage collector"
    opened: list[bool] = []

    def open_in_another_thread() -> None:
        with calls._opening(KEY, Deadline(1.0)):
            opened.append(True)

    thread = threading.Thread(target=open_in_another_thread)
    thread.start()
    thread.join(PATIENCE_S)
    assert opened


@contextmanager
def silent_address(port: int) -> Iterator[str]:
    """One that no attempt to connect gets an answer from: the queue of its listener is full."""
    host = "127.0.0.9"
    with ExitStack() as stack:
        stack.enter_context(socket.create_server((host, port), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            with suppress(BlockingIOError):
                waiting.connect((host, port))
        yield host


def test_a_silent_address_of_a_host_leaves_time_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name in DNS that stands for several brokers, the first of which is cut off."""
    with server(as_kafka(lambda sock: None)) as address, ExitStack() as stack:
        port = int(address.split(":")[1])
        first = stack.enter_context(silent_address(port))
        addresses = [first, "127.0.0.1"]
        real, asked = socket.getaddrinfo, []

        def resolve(host: Any, *args: Any, **keywords: Any) -> Any:
            if host != "brokers.example":
                return real(host, *args, **keywords)
            asked.append(host)
            return [found for each in addresses for found in real(each, *args, **keywords)]

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        monkeypatch.setattr(handshake, "NEXT_ADDRESS_S", 0.05)
        settings = ClientSettings.of(bootstrap_servers=f"brokers.example:{port}")
        BrokerConnection.open("brokers.example", port, settings).close()

        async def open_and_close() -> None:
            (await AsyncConnection.open("brokers.example", port, settings)).close()

        asyncio.run(open_and_close())
        assert len(asked) == 2
        addresses.pop()
        for attempt in (BrokerConnection.open, lambda *args: asyncio.run(AsyncConnection.open(*args))):
            with pytest.raises(ConnectionFailedError, match=r"cannot connect to brokers.example:\d+ within 0.2 s"):
                attempt("brokers.example", port, settings, 0.2)


def test_a_link_local_address_keeps_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, int]] = []
    monkeypatch.setattr(socket, "create_connection", lambda place, timeout: called.append(place))
    with pytest.raises(AttributeError):  # of None, which is no socket
        BrokerConnection.open("fe80::1%lo", 9092, ClientSettings.of(bootstrap_servers="[fe80::1%lo]:9092"))
    assert called == [(f"fe80::1%{socket.if_nametoindex('lo')}", 9092)]
