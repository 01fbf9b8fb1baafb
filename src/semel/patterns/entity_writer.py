"""Appending to entities: a command goes to the owner of its partition, and the reply comes back by a topic.

A writer reads one partition of the replies, from the end that it had before the first command. Many threads may append
through one writer: one of them reads for all. A reply belongs to one sending of a command (`attempt`): that of an
earlier sending may say less than what the last one leads to.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterable, Mapping
from threading import get_ident
from typing import Any, NamedTuple, Self
from weakref import WeakValueDictionary

import msgspec

from semel.client.consumer import Consumer
from semel.client.errors import ConfigError, DeliveryTimedOutError, FatalError, KafkaError, TimedOutError
from semel.client.producer import Producer
from semel.client.timing import timeout_in_ms
from semel.client.types import ConsumerRecord, TopicPartition
from semel.client.waiting import LastingCondition
from semel.patterns.topics import partition_count
from semel.protocol.errors import ErrorCode, Recovery
from semel.protocol.partitioning import partition_for_key

POLL_MS = 500.0
LAST_POLL_S = 5.0  # it was woken


class EntityAppend(msgspec.Struct, frozen=True):
    """A command, as JSON: events are base64."""

    id: str
    attempt: str
    expected: int
    source: str
    reply_to: int
    events: list[bytes]


class EntityReply(msgspec.Struct, frozen=True):
    """status: appended, conflict, forgotten (too long ago to know) or refused."""

    attempt: str
    status: str
    version: int
    detail: str = ""


_decode_reply = msgspec.json.Decoder(EntityReply).decode


class ConflictError(KafkaError):
    """The entity does not have the expected version; nothing was appended. `version` is the current one."""

    recovery = Recovery.ABORT

    def __init__(self, message: str, code: ErrorCode | None = None, entity: str = "", version: int = -1) -> None:
        super().__init__(message, code)
        self.entity, self.version = entity, version


class AppendRefusedError(FatalError):
    """The owner could not take the events, and nothing was appended."""


class AppendUncertainError(TimedOutError):
    """It is not known whether the events were appended. Append again with the same `command_id`, expected version and
    events: they are there once, whatever has happened. `version` is -1, or the entity's version where the owner has
    replied that it was too long ago to know: then the topic says it."""

    def __init__(self, message: str, code: ErrorCode | None = None, command_id: str = "", version: int = -1) -> None:
        super().__init__(message, code)
        self.command_id, self.version = command_id, version


class Appended(NamedTuple):
    """The entity has this version now. `token` names it for readers."""

    entity: str
    version: int
    command_id: str

    @property
    def token(self) -> str:
        return f"{self.version}@{self.entity}"


class PendingAppend:
    """A command on its way."""

    def __init__(self, writer: EntityWriter, entity: str, command: EntityAppend) -> None:
        self._writer, self.entity, self.command = writer, entity, command
        self.reply: EntityReply | None = None
        self.delivery: Any = None
        self.is_abandoned = False  # the writer was closed: nobody reads the reply

    @property
    def command_id(self) -> str:
        return self.command.id

    @timeout_in_ms
    def result(self, *, timeout_ms: float | None = None) -> Appended:
        """Waits for the reply. ConflictError: nothing was appended. AppendUncertainError: perhaps."""
        reply = self._writer._await(self, timeout_ms)
        entity, expected, command_id = self.entity, self.command.expected, self.command.id
        if reply.status == "appended":
            return Appended(entity, reply.version, command_id)
        if reply.status == "conflict":
            raise ConflictError(
                f"{entity!r} has version {reply.version}, expected {expected}: nothing was appended. Read it again and "
                "decide anew",
                None,
                entity,
                reply.version,
            )
        if reply.status == "forgotten":
            raise AppendUncertainError(
                f"{entity!r} has version {reply.version}; which command took it from version {expected} to the next is "
                "not remembered any more. The header `command` of its event with the next version says it: is it "
                f"{command_id!r}, the events are there",
                None,
                command_id,
                reply.version,
            )
        raise AppendRefusedError(f"{entity!r} has version {reply.version}, nothing was appended: {reply.detail}")


def _uncertain(pending: PendingAppend, why: str) -> AppendUncertainError:
    return AppendUncertainError(
        f"{pending.entity!r}: {why} The command {pending.command.id!r} may be applied yet. To find out, append again "
        "with this command_id, the same expected version and the same events",
        None,
        pending.command.id,
    )


class EntityWriter:
    """What appends. Any thread may use it."""

    def __init__(
        self,
        name: str,
        *,
        bootstrap_servers: str | Iterable[str] = "localhost:9092",
        source: str = "",
        timeout_ms: float = 30_000,
        client: Mapping[str, Any] | None = None,
    ) -> None:
        if not name:
            raise ConfigError("the name of the entities is empty; it names their topics")
        if not isinstance(source, str):
            raise ConfigError(f"source is {source!r}; expected a str")
        self.name, self._source, self._timeout_ms = name, source, timeout_ms
        given = {option.replace(".", "_"): value for option, value in (client or {}).items()}
        self._options: dict[str, Any] = {"bootstrap_servers": bootstrap_servers, **given}
        self._news = LastingCondition()  # guards all below
        self._reader: int | None = None  # the thread that polls
        # By attempt, until the reply has come, or the caller has dropped it.
        self._waiting: WeakValueDictionary[str, PendingAppend] = WeakValueDictionary()
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None
        self._partitions = 0
        self._reply_to = 0

    @timeout_in_ms
    def append(
        self,
        entity: str,
        expected_version: int,
        events: Iterable[bytes | str],
        *,
        command_id: str | None = None,
        timeout_ms: float | None = None,
    ) -> Appended:
        """Appends events if the entity has this version (0: it is new). Of concurrent ones, one succeeds."""
        return self.submit(entity, expected_version, events, command_id=command_id).result(timeout_ms=timeout_ms)

    def submit(
        self, entity: str, expected_version: int, events: Iterable[bytes | str], *, command_id: str | None = None
    ) -> PendingAppend:
        """The same without waiting; `result()` of what it returns waits. Commands for one entity keep their order."""
        data = [event.encode() if isinstance(event, str) else event for event in events]
        if not entity or not data or isinstance(events, bytes | str):
            raise ConfigError(f"append takes the name of an entity and a list of events, not {entity!r} and {events!r}")
        odd = [event for event in data if not isinstance(event, bytes | bytearray | memoryview)]
        if odd:  # no owner could read the command, nor reply to it
            raise ConfigError(f"an event is {type(odd[0]).__name__}; expected bytes or str, such as json.dumps(...)")
        if command_id is not None and not (command_id and isinstance(command_id, str | uuid.UUID)):
            raise ConfigError(f"command_id is {command_id!r}; expected a str that names the command")
        if not isinstance(expected_version, int) or expected_version < 0:
            raise ConfigError(f"the expected version is {expected_version!r}; expected a number, 0 for a new entity")
        attempt = uuid.uuid4().hex
        with self._news:
            producer = self._opened()
            command = EntityAppend(command_id or attempt, attempt, expected_version, self._source, self._reply_to, data)
            pending = self._waiting[attempt] = PendingAppend(self, entity, command)
            count = self._partitions
        try:
            key = entity.encode()
            pending.delivery = producer.send(
                f"{self.name}.commands", msgspec.json.encode(command), key, partition_for_key(key, count)
            )
        except BaseException:
            self._forget(pending)
            raise
        return pending

    def _check_partitions(self) -> int:
        raise NotImplementedError

    def _opened(self) -> Producer:
        if self._producer is not None:
            return self._producer
        self._partitions = self._check_partitions()
        topic = f"{self.name}.replies"
        count = partition_count(self._options, [topic])
        self._reply_to = random.randrange(count)
        place = TopicPartition(topic, self._reply_to)
        fixed = {"isolation_level": "read_committed", "auto_offset_reset": "earliest", "enable_auto_commit": False}
        consumer = Consumer({**self._options, **fixed})
        try:
            (end,) = consumer.end_offsets([place]).values()
            consumer.assign([place])
            consumer.seek(place, end)
            self._producer = Producer({"linger_ms": 0, **self._options})
        except BaseException:
            consumer.close()
            raise
        self._consumer = consumer
        return self._producer

    def close(self) -> None:
        """Any thread may call it. Those that wait for a reply get AppendUncertainError."""
        with self._news:
            producer, consumer, self._producer, self._consumer = self._producer, self._consumer, None, None
            for pending in list(self._waiting.values()):
                pending.is_abandoned = True
            self._waiting.clear()
            self._news.notify_all()
            if consumer is not None:
                consumer.wakeup()  # it belongs to the thread that polls until that is done
                self._news.wait_for(lambda: self._reader in (None, get_ident()), LAST_POLL_S)
        try:
            if producer is not None:
                producer.close()
        finally:
            if consumer is not None:
                consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- replies -------------------------------------------------------------------------------------------------------
    def _await(self, pending: PendingAppend, timeout_ms: float | None) -> EntityReply:
        limit_ms = self._timeout_ms if timeout_ms is None else timeout_ms
        deadline_s = time.monotonic() + limit_ms / 1000
        while pending.reply is None and not pending.is_abandoned and time.monotonic() < deadline_s:
            self._read(pending, deadline_s)
            self._check_delivery(pending)
        if pending.reply is not None:
            return pending.reply
        if pending.is_abandoned:
            raise _uncertain(pending, "the writer was closed before the reply came.")
        raise _uncertain(pending, f"no reply within {limit_ms:g} ms. Is an owner running?")

    def _read(self, pending: PendingAppend, deadline_s: float) -> None:
        """One thread at a time, for all; the others wait."""
        found: list[ConsumerRecord] = []
        try:
            consumer = self._turn(pending, deadline_s)
            if consumer is not None:
                found = consumer.poll(max(0.0, min((deadline_s - time.monotonic()) * 1000, POLL_MS)))
        except KafkaError as error:
            self._forget(pending)
            raise _uncertain(pending, f"the replies cannot be read ({error})") from error
        finally:
            try:
                self._end_turn(found)
            finally:
                self._end_turn(())  # if Ctrl-C came within the first

    def _turn(self, pending: PendingAppend, deadline_s: float) -> Consumer | None:
        """The consumer, when it is this thread's turn to read. None: there is nothing to read for any more."""
        with self._news:
            while pending.reply is None and not pending.is_abandoned and (left_s := deadline_s - time.monotonic()) > 0:
                if self._consumer is None:
                    pending.is_abandoned = True
                elif self._reader is None:
                    self._reader = get_ident()
                    return self._consumer
                else:
                    self._news.wait(left_s)
        return None

    def _end_turn(self, found: Iterable[ConsumerRecord]) -> None:
        with self._news:
            for record in found:
                self._deliver(record)
            if self._reader == get_ident():
                self._reader = None
                self._news.notify_all()

    def _deliver(self, record: ConsumerRecord) -> None:
        try:
            reply = _decode_reply(record.value or b"")
        except msgspec.MsgspecError:
            return  # not written by an owner
        pending = self._waiting.pop(reply.attempt, None)
        if pending is not None:
            pending.reply = reply

    def _check_delivery(self, pending: PendingAppend) -> None:
        """A command that the broker refused gets no reply."""
        if pending.reply is None and pending.delivery.done():
            error = pending.delivery.exception()
            if error is not None and not isinstance(error, DeliveryTimedOutError):
                self._forget(pending)
                raise error

    def _forget(self, pending: PendingAppend) -> None:
        with self._news:
            self._waiting.pop(pending.command.attempt, None)
