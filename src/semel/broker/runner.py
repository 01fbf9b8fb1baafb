"""Runs a broker until it is stopped: event loop, signals, background work, memory, structured logs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from semel.broker.broker import BrokerNode
from semel.broker.connection import Server
from semel.broker.settings import SettingError, Settings
from semel.broker.turns import Turns
from semel.storage import Compactor, PartitionLog

# --- Background work in small steps: retention, producer expiry, checkpoints, compaction, idle connections ---


log = logging.getLogger(__name__)

IDLE_CHECKS_PER_LIMIT = 10
SHORTEST_PAUSE_S = 0.05
LONGEST_SLEEP_S = 60.0  # an altered setting counts after this at the latest
LOGS_PER_STEP = 20  # between two steps requests are handled
LOGS_OPENED_PER_ROUND = 20  # logs that were not used since the start are read a few at a time


class Maintenance:
    """Periodic jobs. A job that fails is logged and tried again next time."""

    def __init__(self, broker: BrokerNode, server: Server) -> None:
        self._broker, self._server = broker, server
        self._compactor = Compactor()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._every("log.retention.check.interval.ms", self.keep_up_storage)
        self._every("log.cleaner.backoff.ms", self.compact)
        self._every("connections.max.idle.ms", self._close_idle, IDLE_CHECKS_PER_LIMIT)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._compactor.close()

    def _every(self, setting: str, job: Callable[[], Awaitable[object]], times: int = 1) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(self._repeat(setting, job, times)))

    async def _repeat(self, setting: str, job: Callable[[], Awaitable[object]], times: int) -> None:
        """A job, so many times in what a setting says now: it may be altered while the broker runs."""
        clock = asyncio.get_running_loop().time
        while True:
            started_s = clock()
            while (left_s := self._pause_s(setting, times) - (clock() - started_s)) > 0:
                await asyncio.sleep(min(left_s, LONGEST_SLEEP_S))
            try:
                await job()
            except Exception:
                log.exception("background work failed")

    def _pause_s(self, setting: str, times: int) -> float:
        interval_ms: int = self._broker.settings[setting]
        return max(interval_ms / 1000 / times, SHORTEST_PAUSE_S)

    async def keep_up_storage(self) -> None:
        """Retention, expiry of producers, removal of deleted files, checkpoints."""
        data_dir, clock = self._broker.data_dir, self._broker.clock
        opened = [log for log in data_dir.logs.values() if log.is_open]
        closed = (log for log in data_dir.logs.values() if not log.is_open)
        unread = sorted(closed, key=lambda log: log.error is not None)[:LOGS_OPENED_PER_ROUND]  # failed ones come last
        for number, log in enumerate(opened + unread, 1):
            if data_dir.get(log.topic, log.partition) is log:
                data_dir.maintain_log(log, clock.now_ms())
            if number % LOGS_PER_STEP == 0:
                await asyncio.sleep(0)
        await Turns().run(data_dir.garbage_removal(clock.now_ms()))
        await asyncio.to_thread(data_dir.take_checkpoint())

    async def compact(self) -> None:
        """Compacts the dirtiest logs, one after the other, on a thread of its own, until none is dirty enough."""
        if not self._broker.settings["log.cleaner.enable"]:
            return
        done: set[PartitionLog] = set()
        while True:
            waiting = [log for log in self._broker.data_dir.logs.values() if log not in done]
            compacted = await self._compactor.run_once(waiting, self._broker.clock.now_ms())
            if compacted is None:
                return
            done.add(compacted)

    async def _close_idle(self) -> None:
        self._server.close_idle()


PARENT_CHECK_S = 1.0
KEPT_BYTES = 32 << 20  # so much freed memory stays with the process
LARGEST_KEPT_BYTES = 16 << 20  # larger blocks come from the system and go back to it
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # names in glibc's malloc.h
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class Options(NamedTuple):
    """How a broker is started."""

    settings: Settings
    data: Path
    metrics: tuple[str, int] | None = None
    end_with_stdin: bool = False  # the parent process holds the broker's stdin; if it dies, the broker stops


def run(options: Options, on_ready: Callable[[str, int], None]) -> None:
    """Serves until SIGTERM or SIGINT."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(options, on_ready))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def serve(options: Options, on_ready: Callable[[str, int], None]) -> None:
    stopping = asyncio.Event()
    _stop_on_signals(stopping)
    if options.end_with_stdin:
        _stop_with_stdin(stopping)
    listen = listen_address(options.settings)
    advertised_address(options.settings, *listen)
    sock = bind(*listen, options.settings["socket.listen.backlog.size"])  # what can fail, before the data is touched
    broker = BrokerNode(options.settings, options.data)
    await broker.start()
    try:
        await _serve_clients(options, broker, sock, stopping, on_ready)
    finally:
        await broker.stop()


async def _serve_clients(
    options: Options,
    broker: BrokerNode,
    sock: socket.socket,
    stopping: asyncio.Event,
    on_ready: Callable[[str, int], None],
) -> None:
    server = Server(broker)
    host, port = sock.getsockname()[:2]
    broker.advertised = advertised_address(options.settings, host, port)
    await server.listen(sock)
    maintenance = Maintenance(broker, server)
    maintenance.start()
    _calm_garbage_collector()
    async with _metrics(options, broker, server):
        on_ready(host, port)
        keep_freed_memory()  # late: it takes some milliseconds, and nobody needs it before the first large response
        await stopping.wait()
    log.info("stopping", extra={"connections": len(server.connections)})
    await maintenance.stop()
    await server.stop()


def bind(host: str, port: int, backlog: int) -> socket.socket:
    """A listening socket. Clients that connect while the broker still reads its data wait instead of being refused."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=backlog)
    except OSError as error:
        why = str(error.strerror).partition(" (while")[0]  # Python repeats the address
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {why}; choose another with --listen") from error
    except UnicodeError as error:  # no host name, such as `a..b`
        raise OSError(errno.EINVAL, f"cannot listen on {host}:{port}: {error}") from error


def _calm_garbage_collector() -> None:
    """What is alive now lives on: looking through it again and again would only stop requests for milliseconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _metrics(options: Options, broker: BrokerNode, server: Server) -> Any:
    if options.metrics is None:
        return contextlib.nullcontext()
    from semel.broker.metrics import serve_metrics

    return serve_metrics(broker, server, *options.metrics)


def _stop_on_signals(stopping: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)


def _stop_with_stdin(stopping: asyncio.Event) -> None:
    """Stops when whoever started us is gone, whatever killed it: the system closes stdin and gives us a new parent.

    The parent is looked at too, because a forked child of it may hold the other end of stdin open.
    """
    loop = asyncio.get_running_loop()
    stdin, parent = sys.stdin.fileno(), os.getppid()

    def on_stdin() -> None:
        if not os.read(stdin, 4096):
            loop.remove_reader(stdin)
            stopping.set()

    def look_at_parent() -> None:
        if os.getppid() != parent:
            stopping.set()
        else:
            loop.call_later(PARENT_CHECK_S, look_at_parent)

    loop.add_reader(stdin, on_stdin)
    look_at_parent()


def listen_address(settings: Settings) -> tuple[str, int]:
    return parse_listener(settings, "listeners")


def advertised_address(settings: Settings, host: str, port: int) -> tuple[str, int] | None:
    """The advertised address. None if the broker listens everywhere: then each client gets the one that it reached."""
    if settings["advertised.listeners"] is not None:
        named_host, named_port = parse_listener(settings, "advertised.listeners")
        return named_host, named_port or port
    named = listen_address(settings)[0]
    return None if host in ("0.0.0.0", "::") else (named or host, port)


def parse_listener(settings: Settings, name: str) -> tuple[str, int]:
    """PLAINTEXT://host:port, or host:port, one of them. Those of a controller are left out: the broker is its own."""
    controllers = settings["controller.listener.names"] or ()
    listeners = [each for each in settings[name] if each.rpartition("://")[0] not in controllers]
    if len(listeners) != 1:
        raise SettingError(f"{name} is {','.join(settings[name])!r}; expected one PLAINTEXT://HOST:PORT")
    listener, separator, address = listeners[0].rpartition("://")
    host, colon, port = address.rpartition(":")
    is_plain = not separator or _protocol_of(settings, listener) == "PLAINTEXT"
    if not is_plain or not colon or not port.isdecimal() or int(port) > 65535:
        raise SettingError(f"{name} is {listeners[0]!r}; expected PLAINTEXT://HOST:PORT (there is no security layer)")
    return host.strip("[]"), int(port)


def _protocol_of(settings: Settings, listener: str) -> str:
    """The security protocol of a listener: by listener.security.protocol.map, or else its name."""
    pairs = (pair.strip().partition(":") for pair in (settings["listener.security.protocol.map"] or "").split(","))
    protocols = {name.upper(): protocol.upper() for name, _, protocol in pairs}
    return protocols.get(listener.upper(), listener.upper())


def keep_freed_memory() -> bool:
    """Keeps freed memory for the next response. False where the C library is not glibc.

    A fetch response is some megabytes, read into memory, sent and freed. By default glibc returns such blocks to the
    system each time, and the next response pays for every page again: most of what a fetch costs in the kernel.
    """
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))


class JsonFormatter(logging.Formatter):
    """One JSON object for each line."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, object] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields.update((name, value) for name, value in vars(record).items() if name not in _STANDARD_FIELDS)
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields, enc_hook=str).decode()


def set_up_logs(level: str = "INFO") -> None:
    """Logs to stderr: our own from a level on, the warnings of other packages."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("semel").setLevel(level.upper())
