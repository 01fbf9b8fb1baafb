"""Every error that a program may meet can be imported from `semel`."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

import semel
import semel.errors

# Raised and caught inside semel: no program sees them.
INTERNAL = {
    "EndUnknownError",  # becomes CommitUncertainError or TimedOutError
    "FailedGuessError",  # the batch runs again with a shuffle
    "MovedRowsError",  # the same
    "UnevenStagingError",  # the same in a database
    "UnevenError",  # the transaction is aborted, the batch runs again
    "LostExecutorError",  # the same
    "NoOtherReplicaError",  # a campaign waits until there is one
    "OutputTooLargeError",  # the cause of a RecordError
    "NoEventIdError",  # the same
    "UnfitRowError",  # the same
}


def error_classes() -> Iterator[type[Exception]]:
    for package in ("client", "patterns", "local", "sinks", "spark"):
        home = importlib.import_module(f"semel.{package}")
        for found in pkgutil.walk_packages(home.__path__, f"semel.{package}."):
            for _, value in inspect.getmembers(importlib.import_module(found.name), inspect.isclass):
                if issubclass(value, Exception) and value.__module__ == found.name:
                    yield value


def test_every_error_that_a_program_may_meet_can_be_imported_from_semel() -> None:
    named = {each.__name__: each for each in error_classes() if each.__name__.endswith("Error")}
    assert len(named) > 40
    public = {name for name in semel.errors.__all__ if name.endswith("Error")}
    assert {name for name in named if not name.startswith("_")} - INTERNAL == public
    for name in public:
        assert getattr(semel, name) is getattr(semel.errors, name) is named[name]
        assert name in dir(semel)
        assert name in dir(semel.errors)


def test_recovery_and_error_code_stand_beside_the_errors() -> None:
    error = semel.errors.FencedError("fenced", semel.errors.ErrorCode.PRODUCER_FENCED)
    assert error.recovery is semel.errors.Recovery.FENCED


def test_an_unknown_name_is_an_attribute_error_of_the_module_it_was_sought_in() -> None:
    with pytest.raises(AttributeError, match=r"'semel' has no attribute 'NoSuchError'"):
        _ = semel.NoSuchError
    with pytest.raises(AttributeError, match=r"'semel\.errors' has no attribute 'NoSuchError'"):
        _ = semel.errors.NoSuchError
    with pytest.raises(ImportError):
        from semel import NoOtherError  # noqa: F401


def loaded_after(statement: str) -> set[str]:
    script = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return set(json.loads(done.stdout))


def test_importing_semel_loads_no_module_of_it() -> None:
    assert {name for name in loaded_after("import semel") if name.startswith("semel")} == {"semel"}


def test_an_error_of_the_client_loads_neither_spark_nor_arrow() -> None:
    loaded = {name.split(".")[0] for name in loaded_after("from semel import KafkaError, CommitFailedError")}
    assert not {"pyspark", "pyarrow", "numpy"} & loaded


@pytest.mark.parametrize("name", ["postgres_sink", "route", "sink", "spark_session", "table_pipeline"])
def test_what_needs_spark_says_so_where_there_is_none(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delitem(vars(semel), name, raising=False)
    monkeypatch.setattr("semel.find_spec", lambda module: None if module == "pyspark" else object())
    with pytest.raises(ModuleNotFoundError, match=rf"semel\.{name} needs PySpark.*pip install 'semel\[spark\]'"):
        getattr(semel, name)
