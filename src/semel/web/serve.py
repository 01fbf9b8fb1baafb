"""Runs the page's server until it is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from semel.web.app import UiOptions, make_app

STOP_GRACE_S = 2


def serve(options: UiOptions, sock: socket.socket, *, end_with_stdin: bool = False) -> None:
    """Until SIGTERM or SIGINT, or until stdin closes. Open streams do not hold it up."""
    config = uvicorn.Config(
        make_app(options),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=STOP_GRACE_S,
        lifespan="on",
    )
    asyncio.run(_serve(uvicorn.Server(config), sock, end_with_stdin))


async def _serve(server: uvicorn.Server, sock: socket.socket, end_with_stdin: bool) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.config.app.state.stopping.set()  # type: ignore[union-attr]  # streams end by themselves
        server.should_exit = True

    if end_with_stdin:
        stdin = sys.stdin.fileno()

        def on_stdin() -> None:
            if not os.read(stdin, 4096):
                loop.remove_reader(stdin)
                stop()

        loop.add_reader(stdin, on_stdin)
    with _signals(stop):
        await server._serve(sockets=[sock])  # `serve` would take the signals itself, and end without a word to streams


@contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
