"""The frame of the command line: finding commands, help pages, and errors in one line."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from importlib import import_module

import pytest

import semel
from semel.cli import COMMANDS, available_commands, main
from semel.cli.client_options import print_json
from semel.cli.errors import CommandError, UsageError
from semel.local.brokers import SemelBroker, semel_command
from semel.local.processes import Process
from tests.support.waiting import PATIENCE_S


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], int]], None]:
    """Installs a body as `semel demo`."""

    def install(body: Callable[[], int]) -> None:
        module = types.ModuleType("semel.cli.demo")
        module.HELP, module.EXAMPLE = "A test.", "semel demo"  # type: ignore[attr-defined]
        module.configure = lambda parser: None  # type: ignore[attr-defined]
        module.run = lambda args: body()  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "semel.cli.demo", module)
        monkeypatch.setattr("semel.cli.available_commands", lambda: {"demo": "a test"})

    return install


def raising(error: BaseException) -> Callable[[], int]:
    def body() -> int:
        raise error

    return body


def test_version_is_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"semel {semel.__version__}\n"


def test_help_lists_the_commands_that_exist_and_no_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(COMMANDS, "warp", "does not exist")
    assert main(["--help"]) == 0
    with_flag = capsys.readouterr().out
    assert main([]) == 0
    assert capsys.readouterr().out == with_flag
    assert "  demo " in with_flag
    assert "warp" not in with_flag


def test_an_unknown_command_is_refused_with_the_names_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["brokr"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("semel: there is no command 'brokr'; the commands are ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", available_commands())
def test_every_command_has_a_help_page_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    page = capsys.readouterr().out
    assert "example:\n" in page
    assert f"  semel {name}" in page.partition("example:")[2]


@pytest.mark.parametrize("name", available_commands())
def test_every_command_module_has_the_four_parts(name: str) -> None:
    module = import_module(f"semel.cli.{name}")
    assert module.HELP
    assert module.EXAMPLE
    assert callable(module.run)
    module.configure(argparse.ArgumentParser())


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UsageError("--from needs --to"), 2, "semel: --from needs --to\n"),
        (CommandError("no such\n  topic"), 1, "semel: no such topic\n"),
        (ConnectionRefusedError(111, "Connection refused"), 1, "semel: Connection refused\n"),
        (FileNotFoundError(2, "No such file or directory", "a.txt"), 1, "semel: a.txt: No such file or directory\n"),
        (OSError(18, "Invalid cross-device link", "a", None, "b"), 1, "semel: a -> b: Invalid cross-device link\n"),
        (TimeoutError("no answer in 3 s"), 1, "semel: no answer in 3 s\n"),
        (ZeroDivisionError("oops"), 70, "semel: a bug: ZeroDivisionError: oops (SEMEL_DEBUG=1 shows where)\n"),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(3), 3, ""),
        (SystemExit("stopped"), 1, "semel: stopped\n"),
    ],
)
def test_errors_become_one_line_and_an_exit_code(
    error: BaseException,
    code: int,
    message: str,
    command: Callable[[Callable[[], int]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    command(raising(error))
    assert main(["demo"]) == code
    assert capsys.readouterr().err == message


def test_debug_shows_the_traceback(
    command: Callable[[Callable[[], int]], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEMEL_DEBUG", "1")
    command(raising(CommandError("no such topic")))
    assert main(["demo"]) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.endswith("semel: no such topic\n")


def test_a_wrong_argument_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--seed", "many"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("semel: argument --seed: invalid int value: 'many'")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "page", "hint"),
    [
        (["topic", "create", "t", "--partitons", "4"], "semel topic create", "did you mean --partitions?"),
        (["topic", "create", "t", "--partitons=4"], "semel topic create", "did you mean --partitions?"),
        (["consume", "t", "--exti"], "semel consume", "did you mean --exit?"),
        (["produce", "t", "--compresion", "zstd"], "semel produce", "did you mean --compression?"),
        (["broker", "./data"], "semel broker", None),
    ],
)
def test_unknown_options_are_refused_with_the_nearest_and_the_right_page(
    arguments: list[str], page: str, hint: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("semel: unrecognized arguments: ")
    assert error.endswith(f"(`{page} --help` helps)\n")
    assert ("did you mean" in error) == (hint is not None)
    assert hint is None or hint in error


def test_benchmarks_that_are_not_installed_are_not_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("semel.cli.bench.checkout.module", lambda name: None)
    assert main(["bench", "--help"]) == 0
    assert "one of ," not in capsys.readouterr().out


def run_inline(body: str, **options) -> subprocess.Popen:
    """A real process whose `semel demo` is the given body."""
    script = (
        "import sys, types\n"
        "module = types.ModuleType('semel.cli.demo')\n"
        "module.HELP = module.EXAMPLE = 'semel demo'\n"
        "module.configure = lambda parser: None\n"
        f"def run(args):\n{body}\n    return 0\n"
        "module.run = run\n"
        "from semel import cli\n"
        "cli.available_commands = lambda: {'demo': ''}\n"
        "sys.modules['semel.cli.demo'] = module\n"
        "sys.exit(cli.main(['demo']))\n"
    )
    return subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, **options)


def test_a_reader_that_goes_away_makes_no_noise() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = run_inline("    for i in range(100000): print('line', i)", stdout=writing)
    os.close(writing)
    _, error = process.communicate(timeout=PATIENCE_S)
    assert error == ""
    assert process.returncode == 141


def test_a_terminal_without_utf_8_gets_escapes_and_json_is_utf_8() -> None:
    body = "    from semel.cli.client_options import print_json\n    print('größe'); print_json('größe')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    process = run_inline(body, stdout=subprocess.PIPE, env=environment, encoding="utf-8")
    out, error = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, error) == (0, "")
    assert out == 'gr\\xf6\\xdfe\n"größe"\n'


def test_json_can_be_redirected_to_a_stream_of_text() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print_json("größe")
    assert out.getvalue() == '"größe"\n'


def test_ctrl_c_ends_with_130_and_no_traceback() -> None:
    code = "    import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a shell may ignore it
    process = run_inline(f"{code}\n    print('ready', flush=True)\n    time.sleep(60)", stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=PATIENCE_S)
    assert error == ""
    assert process.returncode == 130


def shell(command: str) -> tuple[int, str]:
    """Code and all output of a shell command; `semel` in it is the command."""
    words = f"semel() {{ '{sys.executable}' -m semel \"$@\"; }}; {command}"
    ended = subprocess.run(["/bin/sh", "-c", words], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    return ended.returncode, ended.stdout + ended.stderr


def test_closed_stdout_is_named() -> None:
    assert shell("semel doctor --list >&-") == (1, "semel: stdout is closed; redirect what is not needed: >/dev/null\n")


def test_closed_stdin_is_named(shared_semel_broker: SemelBroker) -> None:
    code, output = shell(f"semel produce nothing -b {shared_semel_broker.bootstrap} <&-")
    assert (code, output) == (1, "semel: stdin is closed; name files, or pipe the records in\n")


def test_closed_stderr_changes_nothing(shared_semel_broker: SemelBroker) -> None:
    command = f"echo x | semel produce closed-stderr --summary -b {shared_semel_broker.bootstrap} 2>&-"
    assert shell(command) == (0, '{"topic":"closed-stderr","records":1}\n')


def test_python_dash_m_semel_is_the_command() -> None:
    with Process(semel_command("--version")) as process:
        assert process.wait() == 0
        assert process.output == f"semel {semel.__version__}"
