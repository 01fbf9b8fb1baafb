"""`semel broker`: run a Kafka-compatible broker."""

from __future__ import annotations

import argparse
import errno

HELP = """Run a Kafka-compatible broker: one process, no JVM, data in a folder.
It prints one line on stdout when it is ready, and logs JSON lines on stderr. SIGTERM and Ctrl-C stop it cleanly; it
survives kill -9."""

EXAMPLE = """semel broker --data ./data
semel broker --data ./data --listen 127.0.0.1:9092 --fsync os --set num.partitions=4"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", metavar="DIR", help="the data folder; made if it is not there (or log.dirs)")
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help="where to listen; port 0 takes a free one (default: 127.0.0.1:9092)"
    )
    parser.add_argument(
        "--fsync",
        choices=("commit", "os"),
        help="commit (default): what is acknowledged is on the disk; os: as a stock Kafka node, faster",
    )
    parser.add_argument("--config", metavar="FILE", help="settings, one NAME=VALUE for each line, with Kafka's names")
    parser.add_argument(
        "--set", metavar="NAME=VALUE", action="append", default=[], dest="settings", help="one setting; may be repeated"
    )
    parser.add_argument("--strict", action="store_true", help="refuse Kafka's settings that have no effect here")
    parser.add_argument(
        "--metrics",
        "--metrics-port",
        metavar="[HOST:]PORT",
        help="serve Prometheus metrics there, on 127.0.0.1 unless a host is named (default: off)",
    )
    parser.add_argument("--ui", metavar="[HOST:]PORT", help="serve the page there, as `semel ui` does (default: off)")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    parser.add_argument("--end-with-stdin", action="store_true", help="stop when stdin closes, for embedding")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from semel.broker.runner import Options, set_up_logs
    from semel.broker.runner import run as run_broker

    if args.ui:
        from semel.cli.ui import check_page

        check_page(args.ui, "--ui")
    set_up_logs(args.log_level)
    settings = _settings(args)
    data = settings["log.dirs"] or settings["log.dir"]
    metrics = _metrics_address(args.metrics) if args.metrics else None
    options = Options(settings, Path(data), metrics, args.end_with_stdin)

    def on_ready(host: str, port: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        print(f"semel broker ready on {shown}:{port} (data {data}, fsync={settings['fsync']})", flush=True)
        if args.ui:
            _start_ui(args.ui, shown if host not in ("0.0.0.0", "::") else "127.0.0.1", port)

    try:
        run_broker(options, on_ready)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise DiskFullError(
            f"no space is left on the disk of {data}, and a start writes a little; nothing is lost: free some "
            "space and start again"
        ) from error
    return 0


_children: list[object] = []  # kept: an object that is collected closes the stdin of its process


def _start_ui(listen: str, host: str, port: int) -> None:
    """The page is a process of its own: what it does costs the broker's clients nothing. It ends with this one, whose
    end closes its stdin."""
    import subprocess
    import sys

    words = ("ui", "--brokers", f"{host}:{port}", "--listen", listen, "--end-with-stdin")
    _children.append(subprocess.Popen([sys.executable, "-m", "semel", *words], stdin=subprocess.PIPE))


class DiskFullError(Exception):
    """There is no space to start with."""


def _settings(args: argparse.Namespace):  # type: ignore[no-untyped-def]
    """All ways to give a setting, the more explicit one wins: file, --set, options."""
    from semel.broker.settings import Settings, read_properties
    from semel.cli.errors import UsageError

    given: dict[str, str] = {}
    if args.config:
        with open(args.config, encoding="utf-8") as lines:
            try:
                given.update(read_properties(lines))
            except UnicodeDecodeError:
                raise UsageError(f"--config {args.config} is no text in UTF-8") from None
    for text in args.settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set is {text!r}; expected NAME=VALUE")
        given[name.strip()] = value.strip()
    if args.listen:
        host, port = _address(args.listen, "--listen")
        given["listeners"] = f"PLAINTEXT://{host}:{port}"
    if args.fsync:
        given["fsync"] = args.fsync
    if args.data:
        given["log.dirs"] = args.data
    settings = Settings(given, strict=args.strict)
    if not (settings["log.dirs"] or settings["log.dir"]):
        raise UsageError("say where the data goes: --data DIR")
    return settings


def _metrics_address(text: str) -> tuple[str, int]:
    host, port = _address(f":{text}" if text.isdecimal() else text, "--metrics")
    return host.strip("[]"), port


def _address(text: str, option: str) -> tuple[str, int]:
    from semel.cli.errors import UsageError

    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{option} is {text!r}; expected HOST:PORT")
    return host or "127.0.0.1", int(port)
