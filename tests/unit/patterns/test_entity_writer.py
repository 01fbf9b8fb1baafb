"""What a writer says about a command whose reply it cannot read, without a broker."""

from __future__ import annotations

from typing import Any

import pytest

from semel.client.errors import ConfigError, FatalError
from semel.patterns.entity_writer import AppendUncertainError, EntityAppend, EntityWriter, PendingAppend


class Replies:
    """A consumer that may not read any more."""

    def poll(self, timeout_ms: float) -> Any:
        raise FatalError("the broker returned TOPIC_AUTHORIZATION_FAILED")


def test_a_command_that_was_sent_may_be_applied_although_its_reply_cannot_be_read() -> None:
    """Whoever takes that for a refusal, and appends under another command id, meets a conflict with itself."""
    writer = EntityWriter("accounts")
    writer._consumer = Replies()  # type: ignore[assignment]
    pending = PendingAppend(writer, "acc-7", EntityAppend("mine", "attempt", 0, "", 0, [b"x"]))
    writer._waiting["attempt"] = pending
    with pytest.raises(AppendUncertainError, match="may be applied yet") as caught:
        pending.result(timeout_ms=1_000)
    assert caught.value.command_id == "mine"
    assert not writer._waiting


@pytest.mark.parametrize(
    ("events", "command_id", "problem"),
    [
        ([{"type": "withdrawn"}], None, "event is dict"),
        ([b"x", None], None, "event is NoneType"),
        ([b"x"], 42, "command_id is 42"),
    ],
)
def test_what_no_owner_can_read_is_refused_at_once(events: list[Any], command_id: Any, problem: str) -> None:
    """The owner could not even reply to it: the caller would wait for its timeout, and be asked whether one runs."""
    with pytest.raises(ConfigError, match=problem):
        EntityWriter("accounts").append("acc-7", 0, events, command_id=command_id)
    with pytest.raises(ConfigError, match="source is 7"):
        EntityWriter("accounts", source=7)  # type: ignore[arg-type]
