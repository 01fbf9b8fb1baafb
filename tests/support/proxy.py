"""A TCP proxy in front of a broker that knows which API a frame belongs to, so that a test can ask for "the answer to
EndTxn is lost" and prove that it happened.

    with Proxy(cluster.bootstrap) as proxy:
        fault = proxy.add(cut_after_answer(END_TXN))
        ...                                       # a client with bootstrap.servers = proxy.bootstrap
        fault.assert_fired()

Clients stay behind the proxy: the addresses in Metadata and FindCoordinator answers are rewritten to its own.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any

from semel.protocol.api import Api
from semel.protocol.messages.cluster import FIND_COORDINATOR, METADATA
from tests.support.waiting import PATIENCE_S

_START = struct.Struct(">hhi")  # api key, version, correlation id
_SIZE = struct.Struct(">i")


class Kind(Enum):
    CUT_BEFORE = "the connection is cut before the request reaches the broker"
    CUT_AFTER = "the broker gets the request, its answer is dropped and the connection cut"
    HALF_REQUEST = "half of the request reaches the broker, then the connection is cut"
    HALF_ANSWER = "half of the answer reaches the client, then the connection is cut"
    LATE = "the request reaches the broker late, and so does what follows it on its connection"
    DELAY = "the answer is held back for a while"
    SILENCE = "the broker gets the request, its answer never comes, the connection stays"


class Fault:
    """Something that goes wrong with the next `times` requests of an API, after the first `skip`."""

    def __init__(
        self,
        kind: Kind,
        api: Api[Any, Any],
        times: int = 1,
        skip: int = 0,
        delay_s: float = 0.0,
        then: Callable[[], None] | None = None,
    ) -> None:
        self.kind = kind
        self.api_key = api.key
        self.times = times
        self.skip = skip
        self.delay_s = delay_s
        self.then = then  # called when it fires, before the client can notice
        self.fired = 0
        self.happened = threading.Event()

    def takes(self, api_key: int) -> bool:
        """Whether this request is to fail; counts it. The proxy's lock is held."""
        if api_key != self.api_key or self.fired >= self.times:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.fired += 1
        return True

    def fire(self) -> None:
        if self.then is not None:
            self.then()
        self.happened.set()

    def assert_fired(self, times: int = 1) -> None:
        assert self.fired >= times, f"the fault was not exercised: {self.kind.value} (fired {self.fired} of {times})"


def cut_before(api: Api[Any, Any], **options: Any) -> Fault:
    return Fault(Kind.CUT_BEFORE, api, **options)


def cut_after_answer(api: Api[Any, Any], **options: Any) -> Fault:
    return Fault(Kind.CUT_AFTER, api, **options)


def half_request(api: Api[Any, Any], **options: Any) -> Fault:
    return Fault(Kind.HALF_REQUEST, api, **options)


def half_answer(api: Api[Any, Any], **options: Any) -> Fault:
    return Fault(Kind.HALF_ANSWER, api, **options)


def delay(api: Api[Any, Any], delay_s: float, **options: Any) -> Fault:
    return Fault(Kind.DELAY, api, delay_s=delay_s, **options)


def late(api: Api[Any, Any], delay_s: float, **options: Any) -> Fault:
    return Fault(Kind.LATE, api, delay_s=delay_s, **options)


def silence(api: Api[Any, Any], **options: Any) -> Fault:
    return Fault(Kind.SILENCE, api, **options)


class Proxy:
    """Listens on a port of its own and passes everything on to one broker."""

    def __init__(self, broker: str) -> None:
        host, port = broker.rsplit(":", 1)
        self._broker = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host, self.port = self._listener.getsockname()
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._links: set[_Link] = set()
        self._closed = False
        self._refuses = False
        self.seen: dict[int, int] = {}  # requests per API key
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    @property
    def bootstrap(self) -> str:
        return f"{self.host}:{self.port}"

    def add(self, fault: Fault) -> Fault:
        with self._lock:
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        with self._lock:
            self._faults.clear()

    def cut_all(self) -> int:
        """Cuts every connection; how many there were."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.cut()
        return len(links)

    def refuse(self) -> None:
        """As a network that is down: every connection is cut, and no new one gets through until `admit`."""
        self._refuses = True
        self.cut_all()

    def admit(self) -> None:
        self._refuses = False

    def move_to(self, broker: str) -> None:
        """From now on new connections go to another address (a broker that came back elsewhere)."""
        host, port = broker.rsplit(":", 1)
        self._broker = (host, int(port))

    def close(self) -> None:
        self._closed = True
        self._listener.close()
        self.cut_all()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._refuses:
                client.close()
                continue
            try:
                broker = socket.create_connection(self._broker, timeout=PATIENCE_S)
            except OSError:
                client.close()
                continue
            broker.settimeout(None)
            link = _Link(self, client, broker)
            with self._lock:
                self._links.add(link)
            link.start()

    def fault_for(self, api_key: int) -> Fault | None:
        with self._lock:
            self.seen[api_key] = self.seen.get(api_key, 0) + 1
            return next((fault for fault in self._faults if fault.takes(api_key)), None)

    def forget(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)


class _Link:
    """One client's connection and the one to the broker behind it."""

    def __init__(self, proxy: Proxy, client: socket.socket, broker: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._broker = broker
        self._asked: deque[tuple[int, int, Fault | None]] = deque()  # api key, version, fault of requests on their way
        for sock in (client, broker):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self) -> None:
        for work in (self._requests, self._answers):
            threading.Thread(target=self._guarded, args=(work,), name="proxy-link", daemon=True).start()

    def cut(self) -> None:
        for sock in (self._client, self._broker):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self._proxy.forget(self)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, EOFError):
            pass
        finally:
            self.cut()

    def _requests(self) -> None:
        while True:
            frame = _read_frame(self._client)
            api_key, version, _ = _START.unpack_from(frame, 4)
            fault = self._proxy.fault_for(api_key)
            if fault is not None and fault.kind in (Kind.CUT_BEFORE, Kind.HALF_REQUEST):
                if fault.kind is Kind.HALF_REQUEST:
                    self._broker.sendall(frame[: len(frame) // 2])
                fault.fire()
                return
            if fault is not None and fault.kind is Kind.LATE:
                fault.fire()
                time.sleep(fault.delay_s)
                fault = None
            self._asked.append((api_key, version, fault))
            self._broker.sendall(frame)

    def _answers(self) -> None:
        while True:
            frame = _read_frame(self._broker)
            api_key, version, fault = self._asked.popleft()
            if fault is not None:
                fault.fire()
                if fault.kind is Kind.CUT_AFTER:
                    return
                if fault.kind is Kind.HALF_ANSWER:
                    self._client.sendall(frame[: max(5, len(frame) // 2)])
                    return
                if fault.kind is Kind.SILENCE:
                    continue
                time.sleep(fault.delay_s)
            self._client.sendall(self._rewritten(api_key, version, frame))

    def _rewritten(self, api_key: int, version: int, frame: bytes) -> bytes:
        """The proxy's own address in place of the broker's."""
        if api_key == METADATA.key:
            correlation_id, answer = METADATA.read_response(frame[4:], version)
            for broker in answer.brokers:
                broker.host, broker.port = self._proxy.host, self._proxy.port
            return b"".join(METADATA.frame_response(answer, version, correlation_id))
        if api_key == FIND_COORDINATOR.key:
            correlation_id, found = FIND_COORDINATOR.read_response(frame[4:], version)
            for coordinator in found.coordinators if version >= 4 else [found]:
                if not coordinator.error_code:
                    coordinator.host, coordinator.port = self._proxy.host, self._proxy.port
            return b"".join(FIND_COORDINATOR.frame_response(found, version, correlation_id))
        return frame


def _read_frame(sock: socket.socket) -> bytes:
    """A frame with its size."""
    head = _read(sock, 4)
    return head + _read(sock, _SIZE.unpack(head)[0])


def _read(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = sock.recv(min(size - len(data), 1 << 20))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)
