"""Orders to a table, on Spark: every micro-batch is one database transaction, with the offsets that it goes up to.

    python examples/orders_to_postgres.py localhost:9092 postgresql://shop:secret@localhost/shop /tmp/orders

Kill it at any moment and start it again: each order counts once, to the cent.
"""

from __future__ import annotations

import json
import random
import sys

import psycopg
from pyspark.sql import functions as F

import semel

CUSTOMERS, ORDERS = 20, 1_000
ORDER = "id BIGINT, customer INT, cents BIGINT"


def fill(brokers: str) -> None:
    with semel.Admin(bootstrap_servers=brokers) as admin:
        admin.create_topic("orders", 4, if_not_exists=True)
    with semel.Producer(bootstrap_servers=brokers) as producer:
        for number in range(ORDERS):
            order = {"id": number, "customer": random.randrange(CUSTOMERS), "cents": 100 + number}
            producer.send("orders", json.dumps(order), str(order["customer"]))


def main(brokers: str, dsn: str, checkpoint: str) -> None:
    fill(brokers)
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS orders (id bigint PRIMARY KEY, customer int, cents bigint)")
    spark = semel.spark_session("orders to PostgreSQL")
    sink = semel.postgres_sink(dsn, application_id="orders", table="orders")
    orders = (
        spark.readStream.format("semel")
        .options(**{"kafka.bootstrap.servers": brokers, "subscribe": "orders", "startingOffsets": "earliest"})
        .option("maxOffsetsPerTrigger", "300")
        .load()
        .select(F.from_json(F.col("value").cast("string"), ORDER).alias("order"))
        .select("order.*")
    )
    query = orders.writeStream.foreachBatch(sink).option("checkpointLocation", checkpoint)
    query.trigger(availableNow=True).start().awaitTermination()
    with psycopg.connect(dsn) as connection:
        count, cents = connection.execute("SELECT count(*), sum(cents) FROM orders").fetchone() or (0, 0)
    print(f"{count} orders, {cents} cents, in {len(sink.reports)} batches")


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) == 4 else sys.exit(__doc__)
