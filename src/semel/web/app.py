"""The routes of the page, and who may ask what.

Everybody who reaches the port sees everything, so it is loopback by default, and elsewhere a token is
needed. A page of another site that a browser has open must not be able to use it: the Host header must be ours (a name
that somebody points at 127.0.0.1 is not), a request that changes something must come from this page, and none is a GET.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib.resources import files
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from semel.aio.admin import AsyncAdmin
from semel.client.errors import ConnectionFailedError, KafkaError, TimedOutError
from semel.protocol.errors import ProtocolError
from semel.web.cache import LARGE_SHARE
from semel.web.views import HISTORY_EVERY_S, NotFound, Views, unreachable

log = logging.getLogger("semel.web")

TICK_S = 2.0
HTTP_PORT = 80
LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
STATIC = {"app.js": "text/javascript", "style.css": "text/css", "icon.svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class UiOptions(NamedTuple):
    """What the page shows, and to whom."""

    client: dict[str, Any]  # options of the admin client
    host: str
    port: int
    token: str | None = None
    allow_changes: bool = False

    @property
    def brokers(self) -> str:
        return str(self.client["bootstrap_servers"])


def make_app(options: UiOptions) -> Starlette:
    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        async with AsyncAdmin(options.client) as admin:
            app.state.views = Views(admin, options.brokers)
            app.state.stopping = asyncio.Event()
            history = asyncio.ensure_future(_keep_history(app.state.views))
            try:
                yield
            finally:
                app.state.stopping.set()
                history.cancel()
                with suppress(asyncio.CancelledError):
                    await history

    app = Starlette(routes=_routes(), lifespan=life, middleware=[Middleware(RequestGuard, options=options)])
    app.state.options = options
    return app


async def _keep_history(views: Views) -> None:
    clock = asyncio.get_running_loop().time
    while True:
        started_s = clock()
        with suppress(KafkaError):  # the page says that the broker is away
            await views.note_lags()
        await asyncio.sleep(max(HISTORY_EVERY_S, (clock() - started_s) / LARGE_SHARE))


# --- who may ask ------------------------------------------------------------------------------------------------------
class RequestGuard:
    """Looks at every request before anything else does."""

    def __init__(self, app: ASGIApp, options: UiOptions) -> None:
        self._app, self._options = app, options
        self._cookie = f"semel_token_{options.port}"  # a browser sends cookies to all ports of a host
        host = f"[{options.host}]" if ":" in options.host else options.host.lower()
        names = {host, *LOOPBACK} if host in LOOPBACK else {host}
        self._hosts = None if options.host in ("0.0.0.0", "::") else {f"{name}:{options.port}" for name in names}
        if self._hosts is not None and options.port == HTTP_PORT:
            self._hosts |= names  # a browser leaves this port out

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        refusal = self._refusal(request)
        response: ASGIApp = self._app if refusal is None else refusal
        await response(scope, receive, _with_headers(send))

    def _refusal(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        if self._hosts is not None and host.lower() not in self._hosts:
            return PlainTextResponse(f"this page is not served under the name {host!r}\n", 421)
        if self._is_foreign(request, host):
            return PlainTextResponse("this request comes from another site\n", 403)
        if self._options.token is not None:
            return self._token_refusal(request)
        return None

    def _is_foreign(self, request: Request, host: str) -> bool:
        """A navigation to the page may come from anywhere; all else comes from the page itself."""
        site = request.headers.get("sec-fetch-site", "same-origin")
        if site not in ("same-origin", "none") and request.url.path != "/":
            return True
        origin = request.headers.get("origin")
        if origin is not None and _host_of(origin) != host.lower():
            return True
        if request.method in ("GET", "HEAD"):
            return False
        return request.headers.get("x-semel") != "1"  # a form of another site cannot send it

    def _token_refusal(self, request: Request) -> Response | None:
        token = self._options.token or ""
        given = request.query_params.get("token")
        if given is not None and request.method == "GET" and request.url.path == "/" and _same(given, token):
            response = RedirectResponse("./", 303)
            response.set_cookie(self._cookie, token, httponly=True, samesite="strict")
            return response
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if _same(request.cookies.get(self._cookie, ""), token) or _same(bearer, token):
            return None
        return PlainTextResponse("a token is needed: open the address that `semel ui` printed\n", 401)


def _host_of(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:  # no address, such as `http://[`
        return None


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())


def _with_headers(send: Send) -> Send:
    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [
                *message.get("headers", ()),
                *((name.lower().encode(), value.encode()) for name, value in HEADERS.items()),
            ]
        await send(message)

    return sending


# --- routes -----------------------------------------------------------------------------------------------------------
Read = Callable[[Views, Request], Awaitable[Any]]


def _json(read: Read) -> Callable[[Request], Awaitable[Response]]:
    """A view as a response, and what may go wrong with it as a status and a text for people."""

    async def respond(request: Request) -> Response:
        options: UiOptions = request.app.state.options
        try:
            return JSONResponse(await read(request.app.state.views, request))
        except NotFound as error:
            return JSONResponse({"error": str(error)}, 404)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            return JSONResponse({"error": f"this request makes no sense: {error}"}, 400)
        except (ConnectionFailedError, TimedOutError) as error:
            return JSONResponse({"error": unreachable(error, options.brokers)}, 503)
        except (KafkaError, ProtocolError) as error:
            return JSONResponse({"error": str(error)}, 502)

    return respond


def _change(read: Read) -> Callable[[Request], Awaitable[Response]]:
    respond = _json(read)

    async def guarded(request: Request) -> Response:
        if not request.app.state.options.allow_changes:
            return JSONResponse({"error": "this page is read-only; start it with --allow-changes"}, 403)
        return await respond(request)

    return guarded


def _number(request: Request, name: str, default: int = 0) -> int:
    return max(0, min(int(request.query_params.get(name, default)), 2**62))


def _flag(request: Request, name: str) -> bool:
    return request.query_params.get(name) == "1"


async def _abort(views: Views, request: Request) -> Any:
    asked = await request.json()
    return await views.abort(str(asked["id"]))


async def _abort_hanging(views: Views, request: Request) -> Any:
    asked = await request.json()
    return await views.abort_hanging(str(asked["topic"]), int(asked["partition"]), int(asked["start_offset"]))


def _routes() -> list[Route]:
    def get(path: str, read: Read) -> Route:
        return Route(f"/api/{path}", _json(read), methods=["GET"])

    return [
        Route("/", _page, methods=["GET"]),
        Route("/static/{name}", _static, methods=["GET"]),
        Route("/api/live", _live, methods=["GET"]),
        Route("/api/bytes", _bytes, methods=["GET"]),
        get("overview", lambda views, request: views.overview()),
        get(
            "topics",
            lambda views, request: views.topics(
                request.query_params.get("q", ""),
                _number(request, "page"),
                _flag(request, "internal"),
                _flag(request, "held"),
            ),
        ),
        get("topic", lambda views, request: views.topic(request.query_params["name"])),
        get(
            "records",
            lambda views, request: views.records(
                request.query_params["topic"],
                _number(request, "partition"),
                request.query_params.get("offset", "end"),
                _flag(request, "markers"),
            ),
        ),
        get(
            "transactions",
            lambda views, request: views.transactions(
                request.query_params.get("q", ""), request.query_params.get("state", "")
            ),
        ),
        get("transaction", lambda views, request: views.transaction(request.query_params["id"])),
        get("producers", lambda views, request: views.producers()),
        get("groups", lambda views, request: views.groups(request.query_params.get("q", ""))),
        get("group", lambda views, request: views.group(request.query_params["id"])),
        get("applications", lambda views, request: views.applications()),
        get("application", lambda views, request: views.application(request.query_params["id"])),
        get("doctor", lambda views, request: views.doctor(_flag(request, "fresh"))),
        Route("/api/abort", _change(_abort), methods=["POST"]),
        Route("/api/abort-hanging", _change(_abort_hanging), methods=["POST"]),
    ]


async def _page(request: Request) -> Response:
    html = files("semel.web").joinpath("static/index.html").read_text(encoding="utf-8")
    allowed = "1" if request.app.state.options.allow_changes else "0"
    return Response(html.replace("{{allow_changes}}", allowed), media_type="text/html")


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in STATIC:
        return PlainTextResponse("there is no such file\n", 404)
    return Response(files("semel.web").joinpath("static", name).read_bytes(), media_type=STATIC[name])


async def _bytes(request: Request) -> Response:
    """A key or value as it is, to be saved: a browser must never take it for a page."""
    views: Views = request.app.state.views
    try:
        topic, partition, offset = (
            request.query_params["topic"],
            _number(request, "partition"),
            _number(request, "offset"),
        )
        data = await views.record_bytes(topic, partition, offset, request.query_params.get("part", "value"))
    except (NotFound, KeyError, ValueError, KafkaError) as error:
        return JSONResponse({"error": str(error)}, 404)
    headers = {"Content-Disposition": f'attachment; filename="record-{partition}-{offset}.bin"'}
    return Response(data, media_type="application/octet-stream", headers=headers)


async def _live(request: Request) -> Response:
    """Server-sent events: every two seconds whether the cluster responds. The page reads its view again then."""
    return StreamingResponse(_ticks(request), media_type="text/event-stream")


async def _ticks(request: Request) -> AsyncIterator[str]:
    views: Views = request.app.state.views
    options: UiOptions = request.app.state.options
    stopping: asyncio.Event = request.app.state.stopping
    while not stopping.is_set():
        try:
            await views.overview()
            state: dict[str, Any] = {"ok": True}
        except KafkaError as error:
            state = {"ok": False, "error": unreachable(error, options.brokers)}
        yield f"data: {json.dumps(state)}\n\n"
        with suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), TICK_S)


# --- Runs the page's server until it is stopped ---


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
