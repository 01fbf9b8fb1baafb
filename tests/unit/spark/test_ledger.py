"""The rule that says whether a micro-batch may be written, case by case."""

from __future__ import annotations

import msgspec
import pytest

from semel.spark.checkpoint import batch_of
from semel.spark.ledger import KEPT_BATCHES, LedgerEntry, LedgerError, MicroBatch, Verdict, decide, decode, refuse_loop
from semel.spark.ledger_topic import is_entry
from semel.spark.sink_options import SinkOptions


def at(offset: int) -> list[str | None]:
    return [f'{{"t":{{"0":{offset}}}}}']


def entry(batch_id: int, start: int, end: int, query: str = "q", sequence: int = 7) -> LedgerEntry:
    return LedgerEntry(sequence=sequence, query_id=query, run_id="r", batch_id=batch_id, starts=at(start), ends=at(end))


def verdict(last: LedgerEntry | None, batch: MicroBatch, **options: bool) -> Verdict:
    return decide(last, batch, **options).verdict


def test_the_first_batch_of_a_new_query_is_written():
    assert verdict(None, MicroBatch("q", 0, at(0), at(10))) is Verdict.WRITE


def test_a_later_batch_with_an_empty_ledger_is_adopted_only_by_name():
    batch = MicroBatch("q", 5, at(50), at(60))
    assert verdict(None, batch) is Verdict.REFUSE
    assert "adopt_checkpoint" in decide(None, batch).reason
    assert verdict(None, batch, adopt=True) is Verdict.WRITE


def test_the_same_batch_again_is_already_written():
    assert verdict(entry(4, 40, 50), MicroBatch("q", 4, at(40), at(50))) is Verdict.ALREADY_WRITTEN


def test_batch_0_of_a_source_that_does_not_say_its_start_is_known_by_its_end():
    assert verdict(entry(0, 0, 50), MicroBatch("q", 0, [None], at(50))) is Verdict.ALREADY_WRITTEN


def test_the_next_batch_is_written_also_after_batches_that_wrote_nothing():
    assert verdict(entry(4, 40, 50), MicroBatch("q", 5, at(50), at(60))) is Verdict.WRITE
    assert verdict(entry(4, 40, 50), MicroBatch("q", 8, at(50), at(60))) is Verdict.WRITE


@pytest.mark.parametrize(
    "batch",
    [
        MicroBatch(
            "q", 4, at(40), at(55)
        ),  # another limit per batch after a crash: the same number covers another range
        MicroBatch("q", 3, at(30), at(40)),  # an older checkpoint
        MicroBatch("q", 5, at(40), at(60)),  # overlaps
        MicroBatch("q", 5, at(55), at(60)),  # leaves a gap
        MicroBatch("other", 5, at(50), at(60)),  # two queries, one application id
        MicroBatch("other", 0, at(0), at(60)),  # a new checkpoint that starts over
        MicroBatch("q", 5, [*at(50), *at(1)], [*at(60), *at(2)]),  # a source more
    ],
)
def test_anything_else_is_refused_with_both_ranges_and_the_way_out(batch):
    decision = decide(entry(4, 40, 50), batch)
    assert decision.verdict is Verdict.REFUSE
    assert '{"t":{"0":50}}' in decision.reason
    assert "startingOffsets=committed" in decision.reason


@pytest.mark.parametrize(("batch_id", "named"), [(6, "batch 5"), (8, "batches 5 to 7")])
def test_batches_that_never_reached_the_sink_are_named_and_not_an_older_checkpoint(batch_id: int, named: str):
    decision = decide(entry(4, 40, 50), MicroBatch("q", batch_id, at(55), at(60)))
    assert decision.verdict is Verdict.REFUSE
    assert f"Spark has finished {named}, but the ledger has no entry" in decision.reason
    assert "isEmpty" in decision.reason
    assert "at_least_once or at_most_once, which keep no ledger, keep the checkpoint and take a new" in decision.reason
    assert "limit per batch" not in decision.reason
    assert "startingOffsets=committed" in decision.reason


def test_a_new_checkpoint_that_continues_where_the_ledger_ends_is_written():
    assert verdict(entry(4, 40, 50), MicroBatch("new", 0, at(50), at(60))) is Verdict.WRITE


def test_partitions_that_are_new_since_then_do_not_break_the_chain():
    start, end = ['{"t":{"0":50,"1":0}}'], ['{"t":{"0":60,"1":5}}']
    assert verdict(entry(4, 40, 50), MicroBatch("new", 0, start, end)) is Verdict.WRITE
    assert verdict(entry(4, 40, 50), MicroBatch("q", 5, start, end)) is Verdict.WRITE


def test_a_partition_that_vanished_does():
    last = LedgerEntry(sequence=1, query_id="q", run_id="r", batch_id=4, starts=at(0), ends=['{"t":{"0":50,"1":9}}'])
    assert verdict(last, MicroBatch("q", 5, at(50), at(60))) is Verdict.REFUSE


def test_sources_that_are_not_kafka_are_compared_as_text():
    last = LedgerEntry(sequence=1, query_id="q", run_id="r", batch_id=0, starts=["3"], ends=["4"])
    assert verdict(last, MicroBatch("q", 1, ["4"], ["5"])) is Verdict.WRITE
    assert verdict(last, MicroBatch("q", 1, ["3"], ["5"])) is Verdict.REFUSE


def test_entries_survive_their_encoding_and_keys_go_round():
    one = entry(4, 40, 50, sequence=KEPT_BATCHES + 3)
    assert decode(one.encode()) == one
    assert one.key == b"3"


def test_an_entry_of_another_format_is_refused_by_name():
    with pytest.raises(LedgerError, match="format 2"):
        decode(entry(0, 0, 1).encode().replace(b'"format":1', b'"format":2'))


def test_an_entry_of_a_later_version_is_known_by_its_format_whatever_else_is_in_it():
    later = b'{"format":3,"sequence":1,"query_id":"q","batch":{"id":7}}'
    with pytest.raises(LedgerError, match="entry of format 3"):
        decode(later)
    assert is_entry(later)


@pytest.mark.parametrize("value", [b"hello", b"\xff\xfe", b"[]", b'{"format":"x"}', b'{"format":1}', b"[" * 100_000])
def test_a_record_that_somebody_else_wrote_is_named(value):
    with pytest.raises(LedgerError, match="offset 7 has a record that is no entry of a ledger"):
        decode(value, "topic 'app.ledger', offset 7")
    assert not is_entry(value)


def counted(batch_id: int, planned_at_ms: int) -> str:
    """A batch of a file source in the offset log: its offset is a counter, whichever files it covers."""
    return f'v1\n{{"batchWatermarkMs":0,"batchTimestampMs":{planned_at_ms},"conf":{{}}}}\n{{"logOffset":{batch_id}}}'


def planned(log: dict[int, str], batch_id: int) -> MicroBatch:
    return batch_of(log.get, "q", batch_id)


def committed(batch: MicroBatch, plan: str) -> LedgerEntry:
    return LedgerEntry(
        sequence=7,
        query_id=batch.query_id,
        run_id="r",
        batch_id=batch.batch_id,
        starts=batch.starts,
        ends=batch.ends,
        plan=plan,
    )


def test_a_batch_planned_again_is_not_taken_for_the_one_that_was_written():
    written = planned({0: counted(0, 1000), 1: counted(1, 2000)}, 1)
    last = committed(written, written.plan)
    assert verdict(last, written) is Verdict.ALREADY_WRITTEN
    again = planned({0: counted(0, 1000), 1: counted(1, 9000)}, 1)  # an older checkpoint, then other files
    assert again.ends == written.ends
    decision = decide(last, again)
    assert decision.verdict is Verdict.REFUSE
    assert "an older copy" in decision.reason


def test_a_batch_whose_predecessor_was_planned_again_is_refused():
    written = planned({0: counted(0, 1000), 1: counted(1, 2000)}, 1)
    last = committed(written, written.plan)
    kept = {1: counted(1, 2000), 2: counted(2, 3000)}
    assert verdict(last, planned(kept, 2)) is Verdict.WRITE
    other = {1: counted(1, 9000), 2: counted(2, 9500)}
    assert verdict(last, planned(other, 2)) is Verdict.REFUSE


def test_an_entry_without_a_plan_is_judged_by_its_offsets_alone():
    written = planned({0: counted(0, 1000), 1: counted(1, 2000)}, 1)
    old = decode(committed(written, "").encode().replace(b',"plan":""', b""))
    assert old.plan == ""
    assert verdict(old, written) is Verdict.ALREADY_WRITTEN
    assert verdict(old, planned({1: counted(1, 2000), 2: counted(2, 3000)}, 2)) is Verdict.WRITE


# --- topics that were created anew ---


def with_id(offset: int, topic_id: str) -> list[str | None]:
    return [f'{{"t":{{"0":{offset}}},"$ids":{{"t":"{topic_id}"}}}}']


def test_a_batch_that_reads_a_topic_created_anew_follows_and_starts_at_0():
    log = {
        3: 'v1\n{}\n{"t":{"0":50},"$ids":{"t":"A"}}',
        4: 'v1\n{}\n{"t":{"0":60},"$ids":{"t":"B"}}',
    }
    batch = batch_of(log.get, "q", 4)
    assert (batch.starts, batch.ends) == (with_id(0, "B"), with_id(60, "B"))
    last = LedgerEntry(sequence=7, query_id="q", run_id="r", batch_id=3, starts=with_id(40, "A"), ends=with_id(50, "A"))
    assert verdict(last, batch) is Verdict.WRITE
    assert verdict(last, MicroBatch("new", 0, with_id(0, "B"), with_id(60, "B"))) is Verdict.WRITE


def test_the_same_topic_must_go_on_where_it_ended():
    last = LedgerEntry(sequence=7, query_id="q", run_id="r", batch_id=3, starts=with_id(40, "A"), ends=with_id(50, "A"))
    assert verdict(last, MicroBatch("q", 4, with_id(50, "A"), with_id(60, "A"))) is Verdict.WRITE
    assert verdict(last, MicroBatch("q", 4, with_id(0, "A"), with_id(60, "A"))) is Verdict.REFUSE
    assert verdict(last, MicroBatch("q", 3, with_id(40, "A"), with_id(50, "A"))) is Verdict.ALREADY_WRITTEN
    assert verdict(last, MicroBatch("q", 3, with_id(40, "B"), with_id(50, "B"))) is Verdict.REFUSE


def test_entries_without_topic_ids_agree_with_batches_that_have_them():
    last = entry(3, 40, 50)
    assert verdict(last, MicroBatch("q", 3, with_id(40, "A"), with_id(50, "A"))) is Verdict.ALREADY_WRITTEN
    assert verdict(last, MicroBatch("q", 4, with_id(50, "A"), with_id(60, "A"))) is Verdict.WRITE
    assert verdict(last, MicroBatch("q", 4, with_id(0, "A"), with_id(60, "A"))) is Verdict.REFUSE


# --- a query that reads what it writes about itself ---


@pytest.mark.parametrize(
    "value", [None, b"", b"\xff", b'{"query_id":"\xff"}', b'{"a":' * 100_000, b"7", b'{"format":2}']
)
def test_a_record_of_any_other_kind_is_no_entry_of_a_ledger(value):
    assert not is_entry(value)


def test_entries_of_this_format_and_of_later_ones_are_known():
    assert is_entry(entry(4, 40, 50).encode())
    assert is_entry(msgspec.json.encode(msgspec.structs.replace(entry(4, 40, 50), format=2)))


@pytest.mark.parametrize("own", ["app.ledger", "bad"])
def test_a_batch_that_reads_the_applications_own_topics_is_refused(own):
    batch = MicroBatch("q", 4, [f'{{"{own}":{{"0":3}},"t":{{"0":1}}}}'], [f'{{"{own}":{{"0":5}},"t":{{"0":9}}}}'])
    refusal = refuse_loop(batch, "app", "bad") or ""
    assert own in refusal
    assert "subscribePattern" in refusal
    assert refuse_loop(batch, "other", None) is None
    options = SinkOptions("b:1", "app", topic="out", dead_letter_topic="bad", source_cluster_is_other=True)
    assert options.refuse_loop(batch) is None


def test_own_topics_that_a_batch_does_not_read_from_are_no_loop():
    """The source leaves them out, but an older checkpoint names them."""
    still = '{"app.ledger":{"0":5},"t":{"0":1}}'
    assert refuse_loop(MicroBatch("q", 4, [still], [still.replace('"0":1', '"0":9')]), "app", "bad") is None
    assert refuse_loop(MicroBatch("q", 0, [None], at(9)), "app", "bad") is None
