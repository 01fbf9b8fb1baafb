"""Fetch sessions remember what a consumer reads, in a bounded number of places."""

from __future__ import annotations

import pytest

from semel.broker.fetch_sessions import EVICTABLE_AFTER_S, FetchSessions, SessionError
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.records import FetchPartition, FetchRequest, FetchTopic, ForgottenTopic, PartitionData
from semel.protocol.schema import NO_UUID


def full(*indexes: int, session: tuple[int, int] = (0, 0), offset: int = 0) -> FetchRequest:
    asks = [FetchPartition(index, fetch_offset=offset) for index in indexes]
    return FetchRequest(session_id=session[0], session_epoch=session[1], topics=[FetchTopic("t", NO_UUID, asks)])


def answer(index: int, high_watermark: int = 5, records: bytes = b"", code: int = 0) -> tuple[tuple, PartitionData]:
    data = PartitionData(index, code, high_watermark, log_start_offset=0, records=records)
    return ("t", NO_UUID, index), data


def test_epochs_count_up_and_wrap_to_one() -> None:
    sessions = FetchSessions(10)
    session = sessions.open(full(0), False, 0.0)
    assert session is not None
    session.epoch = 2**31 - 1
    assert sessions.resume(full(0, session=(session.id, 2**31 - 1)), False, 0.0) is session
    assert session.epoch == 1


def test_only_changes_are_returned_and_partitions_with_records_go_to_the_end() -> None:
    session = FetchSessions(10).open(full(0, 1, 2), False, 0.0)
    assert session is not None
    assert len(session.changes([answer(0), answer(1), answer(2)])) == 3
    assert session.changes([answer(0), answer(1), answer(2)]) == []
    told = session.changes([answer(0, records=b"x"), answer(1, high_watermark=6), answer(2)])
    assert [data.partition_index for _, data in told] == [0, 1]
    assert [index for _, _, index in session.partitions] == [1, 2, 0]


def test_errors_are_returned_again_and_so_is_what_follows_them() -> None:
    session = FetchSessions(10).open(full(0), False, 0.0)
    assert session is not None
    failed = answer(0, high_watermark=-1, code=1)
    assert len(session.changes([failed])) == len(session.changes([failed])) == 1
    assert len(session.changes([answer(0)])) == 1
    assert session.changes([answer(0)]) == []


def test_a_request_moves_offsets_and_forgets_partitions() -> None:
    sessions = FetchSessions(10)
    session = sessions.open(full(0, 1), False, 0.0)
    assert session is not None
    move = full(0, session=(session.id, 1), offset=7)
    move.forgotten_topics_data = [ForgottenTopic("t", NO_UUID, [1])]
    sessions.resume(move, False, 0.0)
    assert [(key[2], cached.requested.fetch_offset) for key, cached in session.partitions.items()] == [(0, 7)]


def test_topic_ids_and_names_do_not_mix() -> None:
    sessions = FetchSessions(10)
    session = sessions.open(full(0), False, 0.0)
    assert session is not None
    with pytest.raises(SessionError) as refused:
        sessions.resume(full(0, session=(session.id, 1)), True, 0.0)
    assert refused.value.code == ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR


def test_room_is_bounded_and_only_the_long_unused_make_place() -> None:
    sessions = FetchSessions(2)
    first, second = (sessions.open(full(0), False, now_s) for now_s in (0.0, 1.0))
    assert first is not None
    assert second is not None
    assert sessions.open(full(0), False, 2.0) is None
    sessions.resume(full(0, session=(first.id, 1)), False, 100.0)
    assert sessions.open(full(0), False, EVICTABLE_AFTER_S + 2) is not None
    assert len(sessions) == 2
    with pytest.raises(SessionError):
        sessions.resume(full(0, session=(second.id, 1)), False, 200.0)
    assert FetchSessions(0).open(full(0), False, 0.0) is None
