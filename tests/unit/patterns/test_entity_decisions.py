"""What the owner of an entity decides, command by command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from semel.client.types import ConsumerRecord
from semel.patterns.entities import Decide, _decode_state, _encode_state, parse_token
from semel.patterns.process_output import Output
from semel.patterns.state import KeyedState, State, StateStore, StoreIdentity
from semel.protocol.partitioning import partition_for_key


class Owner:
    """The function of the loop, without the loop."""

    def __init__(self, folder: Path, receipts: int = 3, max_bytes: int = 1 << 20, **options: Any) -> None:
        self._decide = Decide("accounts", 1, 2, options.get("fold"), options.get("every", 2), receipts)
        self._state = State(KeyedState(format=(_encode_state, _decode_state)).codec(), max_bytes)
        self._state.attach(0, StateStore(folder / "0.sqlite", StoreIdentity("a", "s", 1, 0, "t")))

    def take(self, value: bytes | None, key: bytes | None = b"e", partition: int = 0) -> list[Output]:
        self._state.enter(partition)
        return self._decide(ConsumerRecord("accounts.commands", partition, 0, 0, key, value), self._state)

    def append(self, expected: int, command: str = "", events: int = 1) -> tuple[str, int, list[Output]]:
        body = {"id": command or f"c{expected}", "attempt": "x", "expected": expected, "source": "w", "reply_to": 1}
        *outputs, reply = self.take(json.dumps({**body, "events": ["ZQ=="] * events}).encode())
        assert (reply.topic, reply.partition) == ("accounts.replies", 1)
        said = json.loads(reply.value or b"")
        assert said["attempt"] == "x"
        return said["status"], said["version"], outputs


def test_of_two_with_the_same_expected_version_the_first_wins(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    status, version, events = owner.append(0, "first", events=2)
    assert (status, version) == ("appended", 2)
    assert [dict(event.headers)["version"] for event in events] == [b"1", b"2"]
    assert dict(events[0].headers) == {"version": b"1", "source": b"w", "command": b"first"}
    assert owner.append(0, "second") == ("conflict", 2, [])
    assert owner.append(7, "ahead") == ("conflict", 2, [])


def test_a_command_that_comes_again_is_answered_from_its_receipt(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    for version in range(4):
        assert owner.append(version)[:2] == ("appended", version + 1)
    for version in (1, 2, 3):  # those that are remembered
        assert owner.append(version) == ("appended", version + 1, [])
        assert owner.append(version, "other") == ("conflict", 4, [])
    assert owner.append(0) == ("forgotten", 4, [])


def test_what_is_no_command_is_raised(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    good = {"id": "c", "attempt": "x", "expected": 0, "source": "w", "reply_to": 0, "events": ["ZQ=="]}
    bad: list[bytes | None] = [None, b"", b"\xff", b"[]", b"{}", b"7"]
    changes: list[dict[str, Any]] = [
        {"events": []},
        {"events": ["!"]},
        {"events": "ZQ=="},
        {"expected": -1},
        {"expected": "0"},
        {"reply_to": 2},
        {"reply_to": -1},
    ]
    bad += [json.dumps(good | change).encode() for change in changes]
    for value in bad:
        with pytest.raises(ValueError):
            owner.take(value)
    with pytest.raises(ValueError, match="without a key"):
        owner.take(json.dumps(good).encode(), key=None)


def test_a_command_in_a_wrong_partition_is_raised(tmp_path: Path) -> None:
    """Else an entity would have two versions, one in each."""
    decide = Decide("accounts", 8, 2, None, 2, 3)
    home = partition_for_key(b"e", 8)
    good = {"id": "c", "attempt": "x", "expected": 0, "source": "w", "reply_to": 0, "events": ["ZQ=="]}
    record = ConsumerRecord("accounts.commands", (home + 1) % 8, 0, 0, b"e", json.dumps(good).encode())
    with pytest.raises(ValueError, match=f"belongs to partition {home}.*murmur2"):
        decide(record, None)  # type: ignore[arg-type]


def test_snapshots_are_the_fold_of_all_events(tmp_path: Path) -> None:
    owner = Owner(tmp_path, fold=lambda total, event: (total or 0) + len(event), every=2)
    written = [output for version in range(5) for output in owner.append(version)[2]]
    snapshots = [output for output in written if output.topic == "accounts.snapshots"]
    assert [(output.value, dict(output.headers)["version"]) for output in snapshots] == [(b"2", b"2"), (b"4", b"4")]


def test_a_fold_that_fails_refuses_the_append_and_changes_nothing(tmp_path: Path) -> None:
    owner = Owner(tmp_path, fold=lambda _, event: 1 / 0)
    assert owner.append(0) == ("refused", 0, [])
    small = Owner(tmp_path / "..", max_bytes=50, fold=lambda _, event: "x" * 100)
    assert small.append(0) == ("refused", 0, [])


def test_tokens() -> None:
    assert parse_token("4@acc@7") == ("acc@7", 4)
    for text in ("", "4", "@e", "x@e", "4@", "-1@e"):
        with pytest.raises(ValueError, match="VERSION@ENTITY"):
            parse_token(text)


@pytest.mark.parametrize("quoted", ["\ud800", "x" * 100_000], ids=["half a character", "long"])
def test_an_error_of_the_fold_that_quotes_anything_is_replied(tmp_path: Path, quoted: str) -> None:
    def fold(value: Any, event: bytes) -> Any:
        raise ValueError(quoted)

    status, version, outputs = Owner(tmp_path, fold=fold).append(0)
    assert (status, version, outputs) == ("refused", 0, [])
