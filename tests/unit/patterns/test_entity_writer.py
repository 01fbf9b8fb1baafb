"""What a writer says about a command whose reply it cannot read, without a broker."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from semel.client.errors import ConfigError, FatalError
from semel.client.types import ConsumerRecord
from semel.client.use_guard import UseGuard
from semel.patterns.entity_writer import AppendUncertainError, EntityAppend, EntityWriter, PendingAppend
from tests.support.waiting import PATIENCE_S, until


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
        ([b"x"], "", "command_id is ''"),
    ],
)
def test_what_no_owner_can_read_is_refused_at_once(events: list[Any], command_id: Any, problem: str) -> None:
    """The owner could not even reply to it: the caller would wait for its timeout, and be asked whether one runs."""
    with pytest.raises(ConfigError, match=problem):
        EntityWriter("accounts").append("acc-7", 0, events, command_id=command_id)
    with pytest.raises(ConfigError, match="source is 7"):
        EntityWriter("accounts", source=7)  # type: ignore[arg-type]


class Silence:
    """A consumer that finds nothing, and belongs to the thread that polls."""

    def __init__(self) -> None:
        self._guard = UseGuard("consumer", "wakeup() and metrics()")
        self.woken, self.polled = threading.Event(), threading.Event()
        self.is_closed = False

    def poll(self, timeout_ms: float) -> list[Any]:
        self._guard.enter("poll")
        try:
            self.polled.set()
            self.woken.wait(timeout_ms / 1000)
            return []
        finally:
            self._guard.leave()

    def wakeup(self) -> None:
        self.woken.set()

    def close(self) -> None:
        self._guard.enter("close")
        self.is_closed = True


class Sent:
    """A producer that takes everything."""

    def send(self, *_: Any) -> Any:
        return Future[Any]()

    def close(self) -> None: ...


def writer_of(consumer: Any) -> EntityWriter:
    writer = EntityWriter("accounts")
    writer._producer, writer._consumer, writer._partitions = Sent(), consumer, 1  # type: ignore[assignment]
    return writer


def test_any_thread_may_close_a_writer_while_others_wait_for_replies() -> None:
    """The consumer of the replies belonged to the thread that polled: close() failed, and left it open."""
    consumer = Silence()
    writer = writer_of(consumer)
    errors: list[Exception] = []

    def append(number: int) -> None:
        try:
            writer.append("acc-7", number, [b"x"], timeout_ms=PATIENCE_S * 1000)
        except AppendUncertainError as error:
            errors.append(error)

    threads = [threading.Thread(target=append, args=[number]) for number in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: consumer.polled.is_set() and len(writer._waiting) == len(threads))
    writer.close()
    assert consumer.is_closed
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(errors) == len(threads)
    assert all("closed before the reply" in str(error) for error in errors)


def test_a_command_that_nobody_waits_for_is_not_kept() -> None:
    writer = writer_of(Silence())
    for number in range(100):
        writer.submit("acc-7", number, [b"x"])
    gc.collect()
    assert not writer._waiting


def test_a_reply_that_comes_after_a_timeout_is_found_by_the_next_look() -> None:
    consumer = Silence()
    writer = writer_of(consumer)
    pending = writer.submit("acc-7", 0, [b"x"])
    with pytest.raises(AppendUncertainError, match="no reply within"):
        pending.result(timeout_ms=1)
    reply = msgspec.json.encode({"attempt": pending.command.attempt, "status": "appended", "version": 1})
    replies = [ConsumerRecord("accounts.replies", 0, 0, 0, None, reply, ())]
    consumer.poll = lambda timeout_ms: replies  # type: ignore[method-assign]
    assert pending.result(timeout_ms=PATIENCE_S * 1000).version == 1


def test_ctrl_c_while_one_thread_reads_leaves_the_turn_to_others() -> None:
    consumer = Silence()
    writer = writer_of(consumer)
    pending = writer.submit("acc-7", 0, [b"x"])

    def interrupted(timeout_ms: float) -> Any:
        raise KeyboardInterrupt

    consumer.poll = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        pending.result(timeout_ms=1_000)
    assert writer._reader is None
    free: list[bool] = []
    thread = threading.Thread(target=lambda: free.append(writer._news.acquire(timeout=PATIENCE_S)))
    thread.start()
    thread.join(PATIENCE_S)
    assert free == [True]
