"""B3: a coordinator keeps a transaction log, `__transaction_state`. The decision is durable before it is answered."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest

from benchmarks.peers.raw_client import RawClient
from semel.local.apache_kafka import java_tool
from semel.local.brokers import SemelBroker
from semel.protocol.errors import ErrorCode as E
from tests.support.broker import faulty_semel
from tests.support.crashes import MortalBroker
from tests.support.reading import create_topic, read_topic
from tests.support.transactional import transactional, write
from tests.support.waiting import PATIENCE_S


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
@pytest.mark.parametrize("is_v2", [False, True], ids=["TV1", "TV2"])
def test_answered_end_survives_a_power_cut_in_the_same_moment(tmp_path: Path, is_v2: bool, commit: bool):
    with MortalBroker(tmp_path / "broker", power=True) as broker:
        create_topic(broker.bootstrap, "t")
        broker.arm("EndTxn.after_response:kill")
        with RawClient(broker.bootstrap) as client:
            owner = client.init("id")
            who = ("id", owner.producer_id, owner.epoch)
            if not is_v2:
                client.add_partitions(*who, [("t", 0)])
            assert client.produce(*who, ("t", 0), [b"value"], version=12 if is_v2 else 11).error is E.NONE
            assert client.end(*who, commit=commit, version=5 if is_v2 else 3).error is E.NONE
        broker.die_and_return("EndTxn.after_response")
        with RawClient(broker.bootstrap) as client:
            assert client.settled("id").transaction_state == ("CompleteCommit" if commit else "CompleteAbort")
        assert [seen.value for seen in read_topic(broker.bootstrap, "t")] == ([b"value"] if commit else [])


HELD_MS = 10_000  # enough to look at the broker meanwhile on a machine that is busy


def test_no_answer_and_no_visible_record_before_the_decision_is_written(tmp_path: Path):
    point = "prepare_commit.before_log"
    with SemelBroker(tmp_path / "broker", semel=faulty_semel(f"{point}:delay={HELD_MS}")) as broker:
        create_topic(broker.bootstrap, "t")
        producer = transactional(broker.bootstrap, "id")
        producer.begin_transaction()
        write(producer, [b"value"], "t")
        ending = threading.Thread(target=producer.commit_transaction, args=(PATIENCE_S,))
        started_s = time.monotonic()
        ending.start()
        assert broker.process is not None
        broker.process.wait_for_line(f"fault fired: {point}$", PATIENCE_S)
        with RawClient(broker.bootstrap) as client:
            assert client.describe("id").transaction_state == "Ongoing"
        assert read_topic(broker.bootstrap, "t") == []
        assert ending.is_alive(), "the commit is not answered"
        ending.join(PATIENCE_S)
        assert time.monotonic() - started_s >= 0.9 * HELD_MS / 1000
        assert [seen.value for seen in read_topic(broker.bootstrap, "t")] == [b"value"]


@pytest.mark.kafka
def test_kafkas_own_tool_reads_every_state_from_the_transaction_log(
    semel_broker: SemelBroker, kafka_installation: Path
):
    create_topic(semel_broker.bootstrap, "t")
    producer = transactional(semel_broker.bootstrap, "my-id")
    for end in (producer.commit_transaction, producer.abort_transaction):
        producer.begin_transaction()
        write(producer, [b"value"], "t")
        end(30)
    with RawClient(semel_broker.bootstrap) as client:
        client.settled("my-id")
    semel_broker.kill()
    logs = sorted(semel_broker.directory.glob("__transaction_state-*/*.log"))
    files = ",".join(str(path) for path in logs if b"my-id" in path.read_bytes())
    dump = java_tool("DumpLogSegments", "--files", files, "--transaction-log-decoder").stdout
    states = re.findall(r"state[\":=]+\s*(\w+)", dump) or re.findall(r"transactionStatus\"?:\s*(\d)", dump)
    names = {
        "0": "Empty",
        "1": "Ongoing",
        "2": "PrepareCommit",
        "3": "PrepareAbort",
        "4": "CompleteCommit",
        "5": "CompleteAbort",
    }
    seen = [names.get(state, state) for state in states]
    expected = ["Empty", "Ongoing", "PrepareCommit", "CompleteCommit", "Ongoing", "PrepareAbort", "CompleteAbort"]
    assert seen == expected, dump
