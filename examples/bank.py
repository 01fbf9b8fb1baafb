"""A bank on Spark: deposits and transfers in, statements out, every booking exactly once.

    python examples/bank_producer.py localhost:9092
    python examples/bank.py localhost:9092 /tmp/bank    # until Ctrl-C
    semel consume bank.statements                       # in another terminal

    bank.transfers   in    {"id": 7, "kind": "transfer", "from": "acc-03", "to": "acc-11", "cents": 1250}
    bank.statements  out   {"id": 7, "account": "acc-11", "cents": 1250, "balance": 88300}, one line for each booking
    bank.rejected    out   what is no valid transfer, as it came, with the reason in a header

A micro-batch is one transaction: its statements, its rejected transfers and its offsets become visible together.
The balances are state of the query, so they move with it. `semel demo` kills this program while it commits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupStateTimeout

import semel

TRANSFER = "id LONG, kind STRING, `from` STRING, to STRING, cents LONG"
LINE = "id LONG, account STRING, cents LONG, balance LONG"

REASON = """CASE
    WHEN t.id IS NULL THEN 'not a transfer'
    WHEN t.kind NOT IN ('deposit', 'transfer') THEN 'unknown kind'
    WHEN t.cents IS NULL OR t.cents <= 0 THEN 'amount is not above zero'
    WHEN t.to IS NULL OR (t.kind = 'transfer' AND t.from IS NULL) THEN 'account is missing'
    WHEN t.from = t.to THEN 'both accounts are the same'
END"""

BOOKINGS = """inline(CASE t.kind
    WHEN 'deposit' THEN array(struct(t.to AS account, t.cents AS cents))
    ELSE array(struct(t.from AS account, -t.cents AS cents), struct(t.to AS account, t.cents AS cents))
END)"""


def pipeline(transfers: DataFrame) -> DataFrame:
    """Rows of the input topic to rows for the sink; `reason` marks what is rejected."""
    parsed = transfers.select("key", "value", F.from_json(F.col("value").cast("string"), TRANSFER).alias("t"))
    checked = parsed.withColumn("reason", F.expr(REASON))
    lines = (
        checked.where("reason IS NULL")
        .selectExpr("t.id AS id", BOOKINGS)
        .groupBy("account")
        .applyInPandasWithState(book, LINE, "balance LONG", "append", GroupStateTimeout.NoTimeout)
    )
    statements = lines.selectExpr(
        "CAST(account AS BINARY) AS key",
        "CAST(to_json(struct(*)) AS BINARY) AS value",
        "CAST(NULL AS STRING) AS reason",
    )
    return statements.unionByName(checked.where("reason IS NOT NULL").select("key", "value", "reason"))


def book(account: tuple[str], bookings: Iterator[Any], state: Any) -> Iterator[Any]:
    """One account's new bookings: a line for each, with the balance after it."""
    balance = state.get[0] if state.exists else 0
    for rows in bookings:
        lines = rows.sort_values("id")
        lines["balance"] = balance + lines["cents"].cumsum()
        balance = int(lines["balance"].iloc[-1])
        yield lines[["id", "account", "cents", "balance"]]
    state.update((balance,))


def main(brokers: str, folder: str) -> None:
    with semel.Admin(bootstrap_servers=brokers) as admin:
        for topic in ("bank.transfers", "bank.statements", "bank.rejected"):
            admin.create_topic(topic, 4, if_not_exists=True)
    spark = semel.spark_session("bank", master="local[2]")
    sink = semel.sink(
        brokers,
        application_id="bank",
        topic="bank.statements",
        dead_letter_topic="bank.rejected",
        bad_column="reason",
    )
    transfers = (
        spark.readStream.format("semel")
        .option("kafka.bootstrap.servers", brokers)
        .option("subscribe", "bank.transfers")
        .option("startingOffsets", "earliest")
        .load()
    )
    query = pipeline(transfers).writeStream.foreachBatch(sink).option("checkpointLocation", folder).start()
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) == 3 else sys.exit(__doc__)
