"""Which rows of an outbox may be sent, by their ids, their transactions and the snapshot."""

from __future__ import annotations

import random

import pytest

from semel.sinks.postgres.outbox_table import OutboxRow, Window, released


def row(number: int, transaction: int, key: str = "k") -> OutboxRow:
    return OutboxRow(number, transaction, "t", None, key.encode(), b"", None, None, 0)


def ids(rows: list[OutboxRow], xmin: int, unfinished: tuple[int, ...] = ()) -> list[int]:
    return [each.id for each in released(Window(rows, xmin, False), unfinished).rows]


def test_a_row_waits_for_every_transaction_that_began_before_it() -> None:
    """The gap trap: transaction 5 has id 1 and is open; transaction 10 has id 2 and is committed."""
    assert ids([row(2, 10)], xmin=5) == []
    assert ids([row(1, 5), row(2, 10)], xmin=11) == [1, 2]


def test_a_row_does_not_pass_one_that_waits() -> None:
    """The reorder trap: 10 inserts K and commits; 5, which began before, inserts K and commits; 7 is still open."""
    assert ids([row(1, 10), row(2, 5)], xmin=7) == []
    assert ids([row(1, 10), row(2, 5)], xmin=11) == [1, 2]


def test_rows_before_the_first_one_that_waits_are_sent() -> None:
    assert ids([row(1, 3), row(2, 10), row(3, 4)], xmin=7) == [1]


def test_the_rows_of_a_transaction_stay_together() -> None:
    assert ids([row(1, 3), row(2, 10), row(3, 3)], xmin=7) == [], "its second row is behind one that waits"
    assert ids([row(1, 3), row(2, 4), row(3, 3)], xmin=7, unfinished=(3,)) == [2], "its third one is not in the window"


def test_transactions_are_sent_in_the_order_of_their_last_rows() -> None:
    """Transaction 4 is complete before 3 gets its second row: of a key that both lock, 4 was first."""
    assert ids([row(1, 3, "a"), row(2, 4, "b"), row(3, 3, "b")], xmin=7) == [2, 1, 3]


def test_rows_of_another_servers_transactions_wait_for_nobody() -> None:
    """A dump keeps the ids of transactions; a visible row of this server has one below the snapshot's xmax."""
    window = Window([row(1, 4_000), row(2, 4_001), row(3, 10), row(4, 4_002)], 5, False, 11)
    assert [each.id for each in released(window).rows] == [1, 2]
    window = window._replace(xmin=11)
    assert [each.id for each in released(window).rows] == [1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_lose_nothing_reorder_nothing_and_split_nothing(seed: int) -> None:
    """Transactions begin, insert under a lock per key, and commit in random order; a relay looks at random times."""
    rand = random.Random(seed)
    next_xid, next_id = 1, 1
    open_rows: dict[int, list[OutboxRow]] = {}
    locks: dict[str, int] = {}
    table: list[OutboxRow] = []
    sent: list[OutboxRow] = []
    committed: list[OutboxRow] = []
    for step in range(600):
        choice = rand.random()
        if choice < 0.2 and len(open_rows) < 6 and step < 500:
            open_rows[next_xid] = []
            next_xid += 1
        elif choice < 0.6 and open_rows:
            xid, key = rand.choice(list(open_rows)), rand.choice("abcde")
            if locks.setdefault(key, xid) == xid:
                open_rows[xid].append(row(next_id, xid, key))
                next_id += 1
        elif choice < 0.8 and open_rows:
            xid = rand.choice(list(open_rows))
            rows = open_rows.pop(xid)
            locks = {key: owner for key, owner in locks.items() if owner != xid}
            if rand.random() < 0.8:
                table += rows
                committed += rows
        else:
            limit = rand.choice((3, 10, 1000))
            table.sort(key=lambda each: each.id)
            window = table[:limit]
            beyond = {each.transaction_id for each in table[limit:]}
            release = released(Window(window, min(open_rows, default=next_xid), len(table) > limit), beyond)
            sent += release.rows
            gone = {each.id for each in release.rows}
            assert not {each.transaction_id for each in release.rows} & {
                each.transaction_id for each in table if each.id not in gone
            }, "a transaction was split"
            table = [each for each in table if each.id not in gone]
    for rows in open_rows.values():
        table += rows
        committed += rows
    table.sort(key=lambda each: each.id)
    sent += released(Window(table, next_xid, False)).rows
    assert sorted(each.id for each in sent) == sorted(each.id for each in committed)
    for key in "abcde":
        of_key = [each.id for each in sent if each.key == key.encode()]
        assert of_key == sorted(of_key), f"key {key} was reordered"
