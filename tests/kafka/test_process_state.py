"""The processing loop with state on both brokers: what is counted, restored and refused."""

from __future__ import annotations

import logging
import re
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import semel
from semel import KeyedState, Output, StateError
from semel.client.admin import Admin
from semel.client.errors import ConfigError
from semel.client.producer import Producer
from semel.client.types import TopicPartition
from semel.patterns.process import Stats
from semel.patterns.process_state import Changelog
from semel.protocol.messages.transactions import END_TXN
from semel.prove.proxy import Effect, Proxy, Rule
from tests.support.broker import Cluster
from tests.support.reading import create_topic, read_topic

KEYS, COUNT = 7, 140


def count(record: Any, state: Any) -> bytes:
    total = state.get(record.key, 0) + 1
    state.put(record.key, total)
    return b"%d" % total


class Counting:
    """A source, a sink and an application that counts."""

    def __init__(self, cluster: Cluster, sources: int = 1) -> None:
        self.cluster = cluster
        stem = cluster.unique("counted")
        self.sources = [create_topic(cluster.bootstrap, f"{stem}.{n}", partitions=2) for n in range(sources)]
        self.sink = create_topic(cluster.bootstrap, f"{stem}.out", partitions=2)
        self.application = cluster.unique("app")
        self.changelog = f"{self.application}.counts.changelog"
        self.fed = 0

    def feed(self, records: int = COUNT, source: int = 0) -> None:
        with Producer(bootstrap_servers=self.cluster.bootstrap) as producer:
            for number in range(records):
                producer.send(self.sources[source], b"%d" % (self.fed + number), key=b"k%d" % (number % KEYS))
        self.fed += records

    def run(self, function: Any = count, *, state: Any = None, **options: Any) -> Stats:
        given = {"application_id": self.application, "bootstrap_servers": self.cluster.bootstrap, "stop_at_end": True}
        state = state or KeyedState("counts", format="int64")
        return semel.process(self.sources, self.sink, function, state=state, **(given | options))

    def totals(self) -> dict[bytes | None, int]:
        """The last count of each key in the output; every count must be there once."""
        rows = read_topic(self.cluster.bootstrap, self.sink)
        seen = Counter((row.key, row.value) for row in rows)
        assert set(seen.values()) <= {1}, "a count is there twice"
        return {key: max(int(value or 0) for other, value in seen if other == key) for key, _ in seen}

    def state(self) -> dict[bytes | None, int]:
        """The last value of each key in the changelog, through a client that is not ours."""
        rows = read_topic(self.cluster.bootstrap, self.changelog)
        last = {row.key: row.value for row in rows if row.key is not None and not row.key.startswith(b"\x00semel")}
        return {key: int.from_bytes(value, "big") for key, value in last.items() if value is not None}


@pytest.fixture
def counting(cluster: Cluster) -> Counting:
    made = Counting(cluster)
    made.feed()
    return made


def expected(rounds: int) -> dict[bytes, int]:
    return {b"k%d" % key: rounds * COUNT // KEYS for key in range(KEYS)}


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "restored"])
def test_counts_go_on_after_a_restart(counting: Counting, tmp_path: Path, is_kept: bool, monkeypatch) -> None:
    read: list[int] = []
    catch_up = Changelog.catch_up

    def noted(self: Changelog, stores: Any, *args: Any) -> None:
        before = {number: store.offset for number, store in stores.items()}
        catch_up(self, stores, *args)
        read.append(sum(store.offset - before[number] for number, store in stores.items()))

    monkeypatch.setattr(Changelog, "catch_up", noted)
    state = KeyedState("counts", format="int64", directory=tmp_path if is_kept else None)
    counting.run(state=state)
    counting.feed()
    read.clear()
    counting.run(state=state)
    assert counting.totals() == counting.state() == expected(2)
    assert sum(read) <= 2 if is_kept else sum(read) >= KEYS, "a kept store reads the markers of the last commit only"


def test_a_local_store_that_died_before_it_was_written_catches_up(counting: Counting, tmp_path: Path) -> None:
    state = KeyedState("counts", format="int64", directory=tmp_path)
    counting.run(state=state)
    copy = {path: path.read_bytes() for path in tmp_path.rglob("*.sqlite")}
    counting.feed()
    counting.run(state=state)
    for path, content in copy.items():  # as it was before
        path.write_bytes(content)
    counting.feed()
    counting.run(state=state)
    assert counting.totals() == counting.state() == expected(3)


def test_tables_count_by_columns(counting: Counting) -> None:
    def count_table(table: pa.Table, state: Any) -> pa.Table:
        found = table.group_by("key").aggregate([("value", "count")])
        totals = pc.add(found["value_count"], pc.fill_null(state.get_many(found["key"]), 0))
        state.put_many(found["key"], totals)
        return pa.table({"key": found["key"], "value": pc.cast(pc.cast(totals, pa.string()), pa.binary())})

    counting.run(count_table, tables=True)
    counting.feed()
    counting.run(count_table, tables=True, max_records=17)
    assert counting.totals() == counting.state() == expected(2)


def test_state_changes_of_a_dead_letter_are_undone(counting: Counting) -> None:
    def count_or_raise(record: Any, state: Any) -> Any:
        yield Output(count(record, state), record.key)
        if record.key == b"k3":
            raise ValueError("not this one")

    dead = create_topic(counting.cluster.bootstrap, f"{counting.sink}.dead")
    stats = counting.run(count_or_raise, dead_letter_topic=dead)
    assert stats.dead_letters == COUNT // KEYS
    assert counting.totals() == counting.state() == {k: n for k, n in expected(1).items() if k != b"k3"}


@pytest.mark.parametrize("effect", [Effect.DROP_REQUEST, Effect.DROP_RESPONSE])
def test_a_commit_that_is_lost_moves_the_state_once(counting: Counting, effect: Effect) -> None:
    with Proxy(counting.cluster.bootstrap) as proxy:
        injected = proxy.add(Rule(END_TXN, effect, nth=2, times=2))
        counting.run(bootstrap_servers=proxy.bootstrap, max_records=20)
        injected.assert_fired(2)
    assert counting.totals() == counting.state() == expected(1)


def test_two_sources_of_a_key_share_its_state(cluster: Cluster) -> None:
    counting = Counting(cluster, sources=2)
    counting.feed(source=0)
    counting.feed(source=1)
    counting.run()
    assert counting.totals() == counting.state() == expected(2)


# --- what does not fit ---


def test_offsets_that_were_moved_are_refused(counting: Counting) -> None:
    counting.run()
    with Admin(bootstrap_servers=counting.cluster.bootstrap) as admin:
        before = dict(admin.group_offsets(counting.application))
        places = {TopicPartition(counting.sources[0], number): 5 for number in (0, 1)}
        admin.alter_group_offsets(counting.application, places)
        with pytest.raises(StateError, match=r"made of the records up to offset \d+, and the group .* committed 5"):
            counting.run()
        admin.delete_group_offsets(counting.application, list(places))
        with pytest.raises(StateError, match="committed nothing"):
            counting.run()
        admin.alter_group_offsets(counting.application, {place: at.offset for place, at in before.items()})
    counting.feed()
    counting.run()
    assert counting.totals() == expected(2)


def test_a_loop_that_had_no_state_says_that_it_starts_empty(counting: Counting) -> None:
    semel.process(
        counting.sources,
        counting.sink,
        lambda record: None,
        application_id=counting.application,
        bootstrap_servers=counting.cluster.bootstrap,
        stop_at_end=True,
    )
    counting.feed()
    with pytest.raises(StateError, match="adopt=True"):
        counting.run()
    counting.run(state=KeyedState("counts", format="int64", adopt=True))
    assert counting.totals() == expected(1)


def test_a_lost_changelog_is_not_taken_for_empty_state(counting: Counting, tmp_path: Path) -> None:
    kept = KeyedState("counts", format="int64", directory=tmp_path)
    counting.run(state=kept)
    with Admin(bootstrap_servers=counting.cluster.bootstrap) as admin:
        admin.delete_topics([counting.changelog])
    counting.feed()
    with pytest.raises(StateError, match="it was lost"):
        counting.run()
    with pytest.raises(StateError, match="only copy"):
        counting.run(state=kept)


def test_partitions_that_are_added_while_the_loop_runs_end_it(counting: Counting) -> None:
    """It retried for good, with the advice to create the partition of the changelog: keys without their state."""

    def grow(stats: Stats) -> None:
        with Admin(bootstrap_servers=counting.cluster.bootstrap) as admin:
            if len(admin.describe_topics(counting.sources)[0].partitions) == 2:
                admin.create_partitions(counting.sources[0], 3)

    with pytest.raises(StateError, match=r"has 2 partitions, the source got partition 2: keys have moved"):
        counting.run(on_settled=grow, stop_at_end=False, consumer={"metadata.max.age.ms": 300})


@pytest.mark.parametrize("what", ["partitions", "policy", "version", "foreign"])
def test_a_changelog_that_does_not_fit_is_refused(counting: Counting, what: str) -> None:
    state = KeyedState("counts", format="int64")
    with Admin(bootstrap_servers=counting.cluster.bootstrap) as admin:
        if what == "foreign":
            admin.create_topic(counting.changelog, 2, configs={"cleanup.policy": "compact"})
            with Producer(bootstrap_servers=counting.cluster.bootstrap) as producer:
                producer.send(counting.changelog, b"v", key=b"k", partition=0)
                producer.send(counting.changelog, b"v", key=b"k", partition=1)
        else:
            counting.run()
        if what == "partitions":
            admin.create_partitions(counting.sources[0], 3)
        if what == "policy":
            admin.alter_configs({"cleanup.policy": "delete"}, topic=counting.changelog)
        if what == "version":
            state = KeyedState("counts", format="int64", version=2)
    counting.feed()
    messages = {
        "partitions": "has 2 partitions, .* has 3",
        "policy": "deletes state",
        "version": "version=1",
        "foreign": "not semel's",
    }
    with pytest.raises(StateError, match=messages[what]):
        counting.run(state=state)


def test_a_local_store_beyond_the_changelog_is_moved_aside(counting: Counting, tmp_path: Path, caplog) -> None:
    state = KeyedState("counts", format="int64", directory=tmp_path)
    counting.run(state=state)
    paths = sorted(tmp_path.rglob("*.sqlite"))
    for path in paths:
        with sqlite3.connect(path) as file:
            file.execute("UPDATE about SET value = 1000000 WHERE name = 'offset'")
            file.execute("UPDATE state SET value = x'00000000000000FF'")
        file.close()
    counting.feed()
    with caplog.at_level(logging.WARNING):
        counting.run(state=state)
    assert counting.totals() == counting.state() == expected(2)
    assert "rebuilt from the changelog" in caplog.text
    assert all(path.with_name(f"{path.name}.aside-1").exists() for path in paths)


def test_a_local_store_that_is_too_old_to_know_of_deletions_is_moved_aside(counting: Counting, tmp_path: Path) -> None:
    state = KeyedState("counts", format="int64", directory=tmp_path)
    counting.run(state=state)
    for path in tmp_path.rglob("*.sqlite"):
        with sqlite3.connect(path) as file:
            file.execute("UPDATE about SET value = value - 4 * 86400000 WHERE name = 'saved_ms'")
        file.close()
    counting.feed()
    counting.run(state=state)
    assert counting.totals() == counting.state() == expected(2)
    assert list(tmp_path.rglob("*.aside-1"))


def test_one_process_has_a_directory(counting: Counting, tmp_path: Path) -> None:
    state = KeyedState("counts", format="int64", directory=tmp_path)
    refused: list[str] = []

    def count_and_start_another(record: Any, state_: Any) -> bytes:
        if not refused:
            with pytest.raises(StateError, match="another process uses") as error:
                counting.run(state=state)
            refused.append(str(error.value))
        return count(record, state_)

    counting.run(count_and_start_another, state=state)
    assert refused
    assert counting.totals() == expected(1)


def test_sources_that_are_partitioned_differently_are_refused(cluster: Cluster) -> None:
    counting = Counting(cluster, sources=2)
    with Admin(bootstrap_servers=cluster.bootstrap) as admin:
        admin.create_partitions(counting.sources[1], 3)
    with pytest.raises(StateError, match="different numbers of partitions"):
        counting.run()


def test_options_that_do_not_go_with_state_are_refused() -> None:
    def run(**options: Any) -> None:
        semel.process(["a", "b"], "c", count, application_id="x", state="counts", **options)

    with pytest.raises(ConfigError, match="exactly_once"):
        run(guarantee="at_least_once")
    with pytest.raises(ConfigError, match="in the database"):
        semel.process("a", semel.Postgres("dbname=x", table="t"), count, application_id="x", state="counts")
    with pytest.raises(ConfigError, match="read_committed"):
        run(consumer={"isolation.level": "read_uncommitted"})
    with pytest.raises(ConfigError, match="range"):
        run(consumer={"partition.assignment.strategy": "cooperative-sticky"})


def test_the_example_of_the_state_page_runs(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "state.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    stem = cluster.unique("views")
    for name in (stem, f"{stem}.counted"):
        create_topic(cluster.bootstrap, name)
    with Producer(bootstrap_servers=cluster.bootstrap) as producer:
        for number in range(10):
            producer.send(stem, b"", key=b"page-%d" % (number % 2))
    monkeypatch.chdir(tmp_path)
    code = (
        block.replace("localhost:9092", cluster.bootstrap)
        .replace('"views', f'"{stem}')
        .replace('"counter"', f'"{stem}"')
    )
    exec(compile(code, str(page), "exec"), {})
    found = [int(row.value or 0) for row in read_topic(cluster.bootstrap, f"{stem}.counted")]
    assert sorted(found) == sorted([1, 2, 3, 4, 5] * 2)
