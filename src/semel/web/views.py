"""What the page shows, as JSON: one function for each view, over the admin client."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import msgspec

from semel.aio.admin import AsyncAdmin
from semel.client.admin.transactions import ProducerInfo, TransactionInfo
from semel.client.errors import FatalError, KafkaError
from semel.client.log_view import SeenRecord, view_log
from semel.client.types import TopicPartition
from semel.doctor.checks import Limits, Name, as_json, command_line, examine
from semel.doctor.findings import with_options
from semel.doctor.snapshot import OFFSETS_TOPIC, ledger_entries
from semel.doctor.timeline import timeline
from semel.spark.ledger import SUFFIX, LedgerEntry
from semel.spark.offsets import parse
from semel.web.cache import Cached

EARLIEST, LATEST = -2, -1
TOPICS_PER_PAGE = 25
RECORDS_PER_PAGE = 50
PARTITIONS_SHOWN = 200  # of one topic
TRANSACTIONS_SHOWN = 500
GROUPS_SHOWN = 500
ENTRIES_SHOWN = 200
SHOWN_BYTES = 1_000  # of a key, value or header
LIVE_S = 1.0  # how old what is shown may be
SLOW_S = 5.0
METADATA_S = 3.0  # of ten thousand partitions it is a large response
DOCTOR_S = 20.0
HISTORY_POINTS = 360
HISTORY_EVERY_S = 5.0
UNDER_WAY = ("Ongoing", "PrepareCommit", "PrepareAbort")

Json = dict[str, Any]


class NotFound(Exception):
    """There is no such thing; the message says what."""


class Views:
    """The cluster behind the page."""

    def __init__(self, admin: AsyncAdmin, brokers: str) -> None:
        self.admin, self._brokers = admin, brokers
        self._cached = Cached()
        self._lags: dict[str, deque[tuple[int, int]]] = {}

    def forget(self) -> None:
        self._cached.forget()

    # --- overview -----------------------------------------------------------------------------------------------------
    async def overview(self) -> Json:
        cluster, topics, listed, groups, under_way, events = await asyncio.gather(
            self._cached.get("cluster", SLOW_S, self.admin.describe_cluster),
            self._metadata(),
            self._cached.get("ids", LIVE_S, self.admin.list_transactions),
            self._groups(),
            self._under_way(),
            self._cached.get("has events", DOCTOR_S, self._has_events),
        )
        return {
            "cluster_id": cluster.cluster_id,
            "brokers": [f"{broker.host}:{broker.port} (node {broker.node_id})" for broker in cluster.brokers],
            "features": cluster.features,
            "is_semel": events,
            "topics": sum(not topic.is_internal for topic in topics.values()),
            "partitions": sum(len(topic.partitions) for topic in topics.values()),
            "groups": dict(Counter(group.state for group in groups.values())),
            "transactional_ids": len(listed),
            "states": dict(Counter(entry.state for entry in listed)),
            "open": [self._transaction(each) for each in _oldest_first(under_way)[:10]],
            "open_count": len(under_way),
        }

    async def _has_events(self) -> bool:
        return await self.admin.transaction_events(limit=1) is not None

    async def _metadata(self, *wanted: str, wanted_s: float = 0.0) -> dict[str, Any]:
        """All topics, some seconds old. A topic that is `wanted` and not among them may be new: then as of now,
        or at most `wanted_s` old."""

        async def read() -> dict[str, Any]:
            return await self.admin._all_metadata(None)

        found: dict[str, Any] = await self._cached.get("metadata", METADATA_S, read, is_large=True)
        if any(name not in found for name in wanted):
            found = await self._cached.get("metadata", wanted_s, read)
        return found

    async def _under_way(self) -> list[TransactionInfo]:
        async def read() -> list[TransactionInfo]:
            return await self.admin.describe_transactions(UNDER_WAY)

        found: list[TransactionInfo] = await self._cached.get("under way", LIVE_S, read)
        return found

    # --- topics -------------------------------------------------------------------------------------------------------
    async def topics(self, search: str = "", page: int = 0, internal: bool = False, held: bool = False) -> Json:
        under_way = await self._under_way()
        held_topics = {place.topic for txn in under_way for place in txn.partitions}
        known = await self._metadata(*held_topics, wanted_s=SLOW_S)  # one may be deleted
        names = sorted(
            name
            for name, topic in known.items()
            if search.lower() in name.lower()
            and (internal or not topic.is_internal)
            and (not held or name in held_topics)
        )
        shown = names[page * TOPICS_PER_PAGE : (page + 1) * TOPICS_PER_PAGE]
        places = [
            TopicPartition(name, index)
            for name in shown
            for index in sorted(known[name].partitions)[:PARTITIONS_SHOWN]
            if known[name].partitions[index].leader >= 0
        ]
        bars = await self._bars(places, under_way)
        by_topic: dict[str, list[Json]] = {name: [] for name in shown}
        for bar in bars:
            by_topic[bar["topic"]].append(bar)
        return {
            "total": len(names),
            "page": page,
            "pages": max(1, -(-len(names) // TOPICS_PER_PAGE)),
            "topics": [
                {"name": name, "partitions": len(known[name].partitions), "bars": by_topic[name]} for name in shown
            ],
        }

    async def topic(self, name: str) -> Json:
        known = await self._metadata(name)
        if name not in known:
            raise NotFound(f"there is no topic {name!r}")
        topic = known[name]
        places = [
            TopicPartition(name, index) for index in sorted(topic.partitions) if topic.partitions[index].leader >= 0
        ]
        settings = await self.admin.describe_configs(topic=name)
        return {
            "name": name,
            "is_internal": topic.is_internal,
            "partitions": len(topic.partitions),
            "bars": await self._bars(places[:PARTITIONS_SHOWN], await self._under_way()),
            "left_out": max(0, len(places) - PARTITIONS_SHOWN),
            "settings": [
                {"name": entry.name, "value": entry.value}
                for entry in sorted(settings.values(), key=lambda entry: entry.name)
                if not entry.is_default and not entry.is_sensitive
            ],
        }

    async def _bars(self, places: list[TopicPartition], under_way: list[TransactionInfo]) -> list[Json]:
        """Start, last stable offset and end of partitions; what lies between the last two has a cause."""
        if not places:
            return []

        async def read() -> Any:
            return await asyncio.gather(
                self.admin.list_offsets(dict.fromkeys(places, EARLIEST)),
                self.admin.list_offsets(dict.fromkeys(places, LATEST), read_committed=True),
                self.admin.list_offsets(dict.fromkeys(places, LATEST)),
            )

        starts, stables, ends = await self._cached.get(("bars", tuple(places)), LIVE_S, read)
        behind = [place for place in places if stables[place].offset < ends[place].offset]
        causes = await self._causes(behind, under_way)
        return [
            {
                "topic": place.topic,
                "partition": place.partition,
                "start": starts[place].offset,
                "stable": stables[place].offset,
                "end": ends[place].offset,
                "held_by": causes.get(place, []),
            }
            for place in places
        ]

    async def _causes(
        self, places: list[TopicPartition], under_way: Iterable[TransactionInfo]
    ) -> dict[TopicPartition, list[Json]]:
        """Who holds back the last stable offset: the open transactions of a partition, the earliest first."""
        if not places:
            return {}
        names = {each.producer_id: each.transactional_id for each in under_way}
        opened = await self._opened(places)
        if any(each.producer_id not in names for producers in opened.values() for each in producers):
            # What is under way may have been read before these began, and some have ended by then.
            names |= {
                each.producer_id: each.transactional_id for each in await self.admin.describe_transactions(UNDER_WAY)
            }
            later = await self._opened(places)
            opened = {
                place: [
                    each
                    for each in producers
                    if each.producer_id in names
                    or (each.producer_id, each.transaction_start)
                    in {(seen.producer_id, seen.transaction_start) for seen in later.get(place, ())}
                ]
                for place, producers in opened.items()
            }
        return {
            place: [
                {
                    "transactional_id": names.get(each.producer_id),
                    "producer_id": each.producer_id,
                    "epoch": each.epoch,
                    "since_offset": each.transaction_start,
                }
                for each in producers
            ]
            for place, producers in opened.items()
        }

    async def _opened(self, places: list[TopicPartition]) -> dict[TopicPartition, list[ProducerInfo]]:
        """The producers with an open transaction, the earliest first."""
        return {
            place: sorted(
                (each for each in producers if each.transaction_start >= 0), key=lambda each: each.transaction_start
            )
            for place, producers in (await self.admin.producers_of(places)).items()
        }

    # --- records ------------------------------------------------------------------------------------------------------
    async def records(self, topic: str, partition: int, offset: str, markers: bool) -> Json:
        """A page of records from an offset on, or from "end": the last ones."""
        known, under_way = await asyncio.gather(self._metadata(topic), self._under_way())
        if topic not in known or partition not in known[topic].partitions:
            raise NotFound(f"there is no partition {partition} of topic {topic!r}")
        place = TopicPartition(topic, partition)
        (bar,) = await self._bars([place], under_way)
        at = bar["end"] - RECORDS_PER_PAGE if offset == "end" else int(offset)
        at = min(max(at, bar["start"]), bar["end"])
        view = await view_log(self.admin.cluster, place, at, self.admin.cluster.deadline(None), most=RECORDS_PER_PAGE)
        shown = [record for record in view.records if markers or not record.marker]
        return {
            **bar,
            "from": at,
            "next": view.next_offset,
            "records": [_record(record) for record in shown],
            "left_out": len(view.records) - len(shown),
        }

    async def record_bytes(self, topic: str, partition: int, offset: int, part: str) -> bytes:
        """The whole key or value of one record."""
        view = await view_log(self.admin.cluster, (topic, partition), offset, self.admin.cluster.deadline(None), most=1)
        if not view.records or view.records[0].offset != offset:
            raise NotFound(f"{topic}-{partition} has no record at offset {offset}")
        record = view.records[0]
        return (record.key if part == "key" else record.value) or b""

    # --- transactions -------------------------------------------------------------------------------------------------
    async def transactions(self, search: str = "", state: str = "") -> Json:
        listed = await self._cached.get("ids", LIVE_S, self.admin.list_transactions)
        under_way = {each.transactional_id: each for each in await self._under_way()}
        chosen = [
            entry
            for entry in listed
            if search.lower() in entry.transactional_id.lower() and (not state or entry.state == state)
        ]
        chosen.sort(key=lambda entry: (entry.transactional_id not in under_way, entry.transactional_id))
        rows = [
            self._transaction(under_way[entry.transactional_id])
            if entry.transactional_id in under_way
            else {"id": entry.transactional_id, "state": entry.state, "producer_id": entry.producer_id}
            for entry in chosen[:TRANSACTIONS_SHOWN]
        ]
        return {"total": len(chosen), "rows": rows, "states": sorted({entry.state for entry in listed})}

    def _transaction(self, txn: TransactionInfo) -> Json:
        now_ms = int(time.time() * 1000)
        return {
            "id": txn.transactional_id,
            "state": txn.state,
            "producer_id": txn.producer_id,
            "epoch": txn.epoch,
            "timeout_ms": None if txn.is_two_phase else txn.timeout_ms,
            "is_two_phase": txn.is_two_phase,
            "age_ms": now_ms - txn.start_time_ms if txn.start_time_ms >= 0 else None,
            "partitions": [str(place) for place in txn.partitions[:20]],
            "partition_count": len(txn.partitions),
        }

    async def transaction(self, transactional_id: str) -> Json:
        try:
            found = await timeline(self.admin, transactional_id)
        except FatalError as error:
            raise NotFound(str(error)) from error
        places = [place for place in found.now.partitions if place.topic != OFFSETS_TOPIC][:PARTITIONS_SHOWN]
        return {
            **self._transaction(found.now),
            "has_events": found.has_events,
            "steps": msgspec.to_builtins(found.steps),
            "last": found.last,
            "abort_command": self._with_brokers(
                command_line("txn", "abort", Name(transactional_id), *(["--force"] if found.now.is_two_phase else []))
            ),
            "bars": await self._bars(places, await self._under_way()),
        }

    async def producers(self) -> Json:
        """Who got which epoch of an id, and who was refused: by the events of the broker."""
        events = await self.admin.transaction_events(limit=5_000)
        steps = [
            {
                "time_ms": event.time_ms,
                "id": event.transactional_id,
                "producer_id": event.producer_id,
                "epoch": event.epoch,
                "client": event.client,
                "what": _what(event.error, event.note, event.api),
                "is_refused": bool(event.error),
            }
            for event in events or ()
            if event.step == "2" or event.error in ("PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH")
        ]
        return {"has_events": events is not None, "rows": steps[::-1][:500]}

    async def abort(self, transactional_id: str) -> Json:
        producer_id, epoch = await self.admin.abort_transaction(transactional_id)
        self.forget()
        return {"id": transactional_id, "producer_id": producer_id, "epoch": epoch}

    async def abort_hanging(self, topic: str, partition: int, start_offset: int) -> Json:
        producer = await self.admin.abort_hanging_transaction((topic, partition), start_offset)
        self.forget()
        return {"producer_id": producer.producer_id, "epoch": producer.epoch}

    # --- groups -------------------------------------------------------------------------------------------------------
    async def _groups(self) -> dict[str, Any]:
        found: dict[str, Any] = await self._cached.get("groups", LIVE_S, self.admin.committed_of_all, is_large=True)
        return found

    async def groups(self, search: str = "") -> Json:
        groups = await self._groups()
        chosen = sorted(name for name in groups if search.lower() in name.lower())[:GROUPS_SHOWN]
        lags = await self._lags_of({name: groups[name] for name in chosen})
        return {
            "total": len(groups),
            "rows": [
                {
                    "id": name,
                    "state": groups[name].state,
                    "partitions": len(groups[name].committed),
                    "lag": lags[name],
                    "unstable": len(groups[name].unstable),
                    "history": list(self._lags.get(name, ())),
                }
                for name in chosen
            ],
        }

    async def _lags_of(self, groups: dict[str, Any]) -> dict[str, int]:
        places = sorted({place for group in groups.values() for place in group.committed})
        known = await self._metadata()
        there = [
            place
            for place in places
            if place.topic in known
            and place.partition in known[place.topic].partitions
            and known[place.topic].partitions[place.partition].leader >= 0
        ]
        ends = await self.admin.list_offsets(dict.fromkeys(there, LATEST)) if there else {}
        return {
            name: sum(max(0, ends[place].offset - at.offset) for place, at in group.committed.items() if place in ends)
            for name, group in groups.items()
        }

    async def group(self, group_id: str) -> Json:
        groups = await self._groups()
        info = await self.admin.describe_group(group_id)
        if group_id not in groups and info.state == "Dead":
            raise NotFound(f"there is no group {group_id!r}")
        offsets = await self.admin.group_lag(group_id)
        unstable = groups[group_id].unstable if group_id in groups else []
        return {
            "id": group_id,
            "state": info.state,
            "protocol": info.protocol_type,
            "assignor": info.assignor,
            "members": msgspec.to_builtins(info.members),
            "offsets": msgspec.to_builtins(offsets),
            "unstable": [str(place) for place in unstable],
            "history": list(self._lags.get(group_id, ())),
        }

    async def note_lags(self) -> None:
        """Called every few seconds, for the lines of lag over time."""
        groups = await self._groups()
        lags = await self._lags_of(dict(list(groups.items())[:GROUPS_SHOWN]))
        now_ms = int(time.time() * 1000)
        for name in [name for name in self._lags if name not in lags]:
            del self._lags[name]
        for name, lag in lags.items():
            self._lags.setdefault(name, deque(maxlen=HISTORY_POINTS)).append((now_ms, lag))

    # --- Spark applications -------------------------------------------------------------------------------------------
    async def applications(self) -> Json:
        names = sorted(name for name in await self._metadata() if name.endswith(SUFFIX))[:ENTRIES_SHOWN]
        rows = []
        for name in names:
            entries = await self._entries(name, 20)
            if entries:
                last = entries[-1]
                rows.append(
                    {
                        "id": name.removesuffix(SUFFIX),
                        "sequence": last.sequence,
                        "batch_id": last.batch_id,
                        "rows": last.rows,
                        "took_ms": last.took_ms,
                        "committed_at_ms": last.committed_at_ms,
                    }
                )
        return {"rows": rows}

    async def application(self, application_id: str) -> Json:
        name = f"{application_id}{SUFFIX}"
        if name not in await self._metadata(name):
            raise NotFound(f"there is no ledger {name!r}")
        entries = await self._entries(name, ENTRIES_SHOWN)
        rows = []
        for before, entry in zip([None, *entries], entries, strict=False):
            gap = _gap(before, entry)
            rows.append(
                {
                    "sequence": entry.sequence,
                    "batch_id": entry.batch_id,
                    "query_id": entry.query_id,
                    "rows": entry.rows,
                    "dead_letters": entry.dead_letters,
                    "attempts": entry.attempts,
                    "took_ms": entry.took_ms,
                    "committed_at_ms": entry.committed_at_ms,
                    "ranges": _ranges(entry),
                    "written": [
                        f"{w.topic}-{w.partition}: {w.count} rows, offsets {w.first_offset} to {w.last_offset}"
                        for w in entry.written
                    ],
                    "gap": gap,
                }
            )
        return {"id": application_id, "rows": rows[::-1]}

    async def _entries(self, name: str, most: int) -> list[LedgerEntry]:
        place = TopicPartition(name, 0)
        (bar,) = await self._bars([place], [])
        start, deadline = max(bar["start"], bar["end"] - 3 * most), self.admin.cluster.deadline(None)
        entries = await ledger_entries(self.admin.cluster, name, start, bar["end"], deadline)
        return sorted(entries, key=lambda entry: entry.sequence)[-most:]

    def _with_brokers(self, command: str) -> str:
        return with_options(command, f" -b {shlex.quote(self._brokers)}")

    # --- the doctor ---------------------------------------------------------------------------------------------------
    async def doctor(self, fresh: bool = False) -> Json:
        async def read() -> Json:
            found = await examine(self.admin, Limits())
            return {
                "findings": [
                    {
                        **as_json(each),
                        "cure": self._with_brokers(each.cure) if each.is_command else each.cure,
                        "abort": _abortable(each.name, each.where),
                    }
                    for each in found.findings
                ],
                "not_looked_at": found.not_looked_at,
                "took_ms": found.took_ms,
                "at_ms": int(time.time() * 1000),
            }

        max_age_s = 0.0 if fresh else DOCTOR_S
        found: Json = await self._cached.get(
            "doctor", max_age_s, read, old_is_better_than_late=not fresh, is_large=True
        )
        return found


def _oldest_first(transactions: Iterable[TransactionInfo]) -> list[TransactionInfo]:
    return sorted(transactions, key=lambda each: each.start_time_ms if each.start_time_ms >= 0 else 2**62)


def _abortable(name: str, where: str) -> str | None:
    return where if name == "long-transaction" else None


def _what(error: str, note: str, api: str) -> str:
    if error:
        return f"{api} refused: {error}"
    return f"{api}, {note}" if note else api


def _record(record: SeenRecord) -> Json:
    return {
        "offset": record.offset,
        "timestamp": record.timestamp,
        "state": record.state,
        "marker": record.marker,
        "key": shown(record.key),
        "value": shown(record.value),
        "headers": [[name[:200], shown(value)] for name, value in record.headers[:50]],
        "producer_id": record.producer_id,
        "epoch": record.epoch,
        "sequence": record.sequence,
    }


def shown(data: bytes | None) -> Json | None:
    """Bytes for people: text where they are text, else hexadecimal; the beginning of what is long."""
    if data is None:
        return None
    part = data[:SHOWN_BYTES]
    try:
        text = part.decode() if len(data) <= SHOWN_BYTES else _cut_text(part)
        is_text = all(character.isprintable() or character in "\n\r\t" for character in text)
    except UnicodeDecodeError:
        is_text = False
    return {
        "text": text if is_text else part[: SHOWN_BYTES // 4].hex(" "),
        "is_text": is_text,
        "size": len(data),
        "is_cut": len(data) > (SHOWN_BYTES if is_text else SHOWN_BYTES // 4),
    }


def _cut_text(part: bytes) -> str:
    """The cut may be in the middle of a character."""
    for end in range(len(part), max(len(part) - 4, 0), -1):
        try:
            return part[:end].decode()
        except UnicodeDecodeError:
            continue
    return part.decode()


def _ranges(entry: LedgerEntry) -> list[str]:
    found = []
    for start_text, end_text in zip(entry.starts, entry.ends, strict=False):
        starts, ends = parse(start_text) or {}, parse(end_text) or {}
        for topic, parts in ends.items():
            for index, end in sorted(parts.items()):
                start = starts.get(topic, {}).get(index)
                if start != end:
                    found.append(f"{topic}-{index}: {'start' if start is None else start} to {end}")
    return found


def _gap(before: LedgerEntry | None, entry: LedgerEntry) -> str:
    """What is between two entries that follow each other in the ledger, if anything is."""
    if before is None or before.sequence + 1 != entry.sequence:
        return ""
    for old_text, new_text in zip(before.ends, entry.starts, strict=False):
        old, new = parse(old_text), parse(new_text)
        if old is None or new is None:
            continue
        for topic, parts in old.items():
            for index, offset in parts.items():
                start = new.get(topic, {}).get(index, offset)
                if start != offset:
                    return f"{topic}-{index}: the last batch ended at {offset}, this one starts at {start}"
    return ""


def unreachable(error: KafkaError, brokers: str) -> str:
    return f"the brokers ({brokers}) do not respond: {error}"
