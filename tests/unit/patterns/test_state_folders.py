"""Where the local copies of state are, and what a new owner does that was frozen while it restored them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from semel.client.errors import AbortableError
from semel.client.types import OffsetAndMetadata, TopicPartition
from semel.patterns.process_state import StateFolder, Stores
from semel.patterns.state import KeyedState, State, StateError, StoreIdentity


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


DIES = """
import os, signal, tempfile
tempfile.tempdir = {folder!r}
from semel.patterns.process_state import StateFolder
from semel.patterns.state import KeyedState
kept = StateFolder(KeyedState("s"), "app")
kept.file(0).write_bytes(b"state")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed_and_nothing_else(temporary: Path) -> None:
    subprocess.run([sys.executable, "-c", DIES.format(folder=str(temporary))], check=False, timeout=60)
    (left,) = temporary.iterdir()
    foreign = temporary / "semel-state-of-somebody"  # not made by a loop
    foreign.mkdir()
    (foreign / "precious").write_text("x")
    living = StateFolder(KeyedState("s"), "app")
    assert not left.exists()
    living.file(0).write_bytes(b"state")
    another = StateFolder(KeyedState("s"), "app")
    assert living.file(0).exists(), "its owner lives"
    assert (foreign / "precious").exists()
    another.close()
    living.close()
    assert list(temporary.iterdir()) == [foreign]


class Frozen:
    """A consumer and a changelog, between whose looks somebody else has committed, or has not."""

    sources = ("in",)

    def __init__(self, *committed: int) -> None:
        self._committed = list(committed)

    def assignment(self) -> set[TopicPartition]:
        return {TopicPartition("in", 0)}

    def committed(self, places: list[TopicPartition]) -> dict[TopicPartition, OffsetAndMetadata]:
        return dict.fromkeys(places, OffsetAndMetadata(self._committed.pop(0)))

    def identity(self, partition: int) -> StoreIdentity:
        return StoreIdentity("app", "s", 1, partition, "t")

    def catch_up(self, stores: Any, is_stopping: Any) -> None:
        """The changelog has what belongs to offset 50."""

    def check_covered(self, store: Any, topic: str, committed: int | None) -> None:
        if committed != 50:
            raise StateError("the offset was moved")


@pytest.mark.parametrize(("committed", "raised"), [((47, 50), AbortableError), ((47, 47), StateError)])
def test_an_owner_that_was_frozen_while_others_went_on_is_no_error_of_the_state(
    temporary: Path, committed: tuple[int, int], raised: type[Exception]
) -> None:
    frozen: Any = Frozen(*committed)
    stores = Stores(StateFolder(KeyedState("s"), "app"), frozen, State(KeyedState().codec(), 1000), frozen)
    with pytest.raises(raised):
        stores.bring_up([0], lambda: False)
    stores.close()
