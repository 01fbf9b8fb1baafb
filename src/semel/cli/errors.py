"""How the command line reports what went wrong: one line for the user, a traceback only with SEMEL_DEBUG=1."""

from __future__ import annotations

import os
import sys
import traceback


class CommandError(Exception):
    """The command failed; the message says why and what to do. Exit code 1."""


class UsageError(CommandError):
    """The arguments make no sense together. Exit code 2."""


FAILED, WRONG_USAGE, BUG, INTERRUPTED, READER_GONE = 1, 2, 70, 130, 141


def exit_code_of(error: BaseException) -> int:
    """Reports an error that ended a command, and says with which code to exit."""
    if isinstance(error, SystemExit):
        return _code_of_exit(error)
    if isinstance(error, BrokenPipeError):
        _silence_stdout()
        return READER_GONE
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if os.environ.get("SEMEL_DEBUG") == "1":
        traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, UsageError):
        return _report(str(error), WRONG_USAGE)
    if _is_expected(error):
        return _report(text_of(error), FAILED)
    return _report(f"a bug: {type(error).__name__}: {error} (SEMEL_DEBUG=1 shows where)", BUG)


def _is_expected(error: BaseException) -> bool:
    """semel's own errors explain themselves, and so do the system's (no such file, connection refused, disk full)."""
    own = any(base.__module__.partition(".")[0] == "semel" for base in type(error).__mro__)
    return own or isinstance(error, OSError)


def text_of(error: BaseException) -> str:
    """What the error says; of the system's errors the file and the reason, without Python's `[Errno 2]`."""
    if isinstance(error, OSError) and error.strerror:
        files = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
        return ": ".join(filter(None, [" -> ".join(files), error.strerror]))
    return str(error) or type(error).__name__


def _report(message: str, code: int) -> int:
    one_line = " ".join(message.split())
    print(f"semel: {one_line}", file=sys.stderr)
    return code


def _code_of_exit(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    return _report(str(error.code), FAILED)


def _silence_stdout() -> None:
    """So that the interpreter's last flush does not complain about the reader that went away."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
