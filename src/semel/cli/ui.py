"""`semel ui`: the page for a browser."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from semel.cli.client_options import add_connection_options, client_options
from semel.cli.errors import CommandError, UsageError

if TYPE_CHECKING:
    import socket

HELP = """Serves a page that shows a cluster, semel's or any Kafka: topics with start, last stable offset and end,
records with what became of them, transactions step by step, groups and their lag, Spark applications, and what the
doctor finds. It is read-only unless --allow-changes is given, and listens on loopback. On another address a token is
needed; it is printed with the address. Needs pip install 'semel[ui]'."""
EXAMPLE = """semel ui
semel ui --brokers localhost:9092 --listen 127.0.0.1:8080 --allow-changes"""
PACKAGES = ("starlette", "uvicorn")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--listen",
        metavar="[HOST:]PORT",
        default="127.0.0.1:8090",
        help="where to serve the page; port 0 takes a free one (default: 127.0.0.1:8090)",
    )
    parser.add_argument("--allow-changes", action="store_true", help="let the page abort transactions")
    parser.add_argument(
        "--token", metavar="TEXT", help="the token that visitors need (default: none on loopback, else a new one)"
    )
    parser.add_argument("--end-with-stdin", action="store_true", help="stop when stdin closes, for embedding")
    add_connection_options(parser)


def run(args: argparse.Namespace) -> int:
    from urllib.parse import quote

    _check_packages()
    from semel.web.app import UiOptions, serve

    host, sock = _listening_socket(args.listen, "--listen")
    port = sock.getsockname()[1]
    token = args.token or _new_token(host)
    if token and not (token.isascii() and token.isprintable()):
        raise UsageError("--token must be printable ASCII: it is part of an address and of a header")
    options = UiOptions(client_options(args, client_id="semel-ui"), host, port, token, args.allow_changes)
    shown = f"[{host}]" if ":" in host else host
    query = f"?token={quote(token, safe='')}" if token else ""
    print(f"semel ui on http://{shown}:{port}/{query} (brokers {args.brokers})", flush=True)
    serve(options, sock, end_with_stdin=args.end_with_stdin)
    return 0


def check_page(listen: str, option: str) -> None:
    """Raises what would keep the page from being served there."""
    _check_packages()
    _listening_socket(listen, option)[1].close()


def _check_packages() -> None:
    from importlib.util import find_spec

    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise CommandError(f"the page needs {' and '.join(missing)}: pip install 'semel[ui]'")


def _listening_socket(listen: str, option: str) -> tuple[str, socket.socket]:
    import socket

    host, port = _address(listen, option)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return host, socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:  # the latter: no host name, such as `a..b`
        reason = error.strerror if isinstance(error, OSError) else error
        why = str(reason).partition(" (while")[0]  # Python repeats the address
        raise CommandError(f"cannot serve the page on {host}:{port}: {why}; choose another with {option}") from error


def _new_token(host: str) -> str | None:
    import secrets

    return None if host.lower() in LOOPBACK else secrets.token_urlsafe(24)


def _address(text: str, option: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{option} is {text!r}; expected [HOST:]PORT")
    return host.strip("[]") or "127.0.0.1", int(port)
