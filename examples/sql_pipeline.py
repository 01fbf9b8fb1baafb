"""A pipeline in SQL on Spark, from topic to topic: each micro-batch is one transaction.

python examples/sql_pipeline.py                       # on a broker of its own; needs pip install "semel[spark]"
python examples/sql_pipeline.py localhost:9092        # on yours
semel consume sql.large_orders --exit                 # the result
"""

from __future__ import annotations

import json
import sys
import tempfile

import semel

ORDERS = 200
STATEMENT = """
SELECT
    CAST(o.country AS BINARY) AS key,
    CAST(to_json(struct(o.id, o.cents / 100 AS euros)) AS BINARY) AS value
FROM (SELECT from_json(CAST(value AS STRING), 'id LONG, country STRING, cents LONG') AS o FROM orders)
WHERE o.cents >= 10000
"""


def main(brokers: str) -> None:
    with semel.Admin(bootstrap_servers=brokers) as admin:
        for topic in ("sql.orders", "sql.large_orders"):
            admin.create_topic(topic, 2, if_not_exists=True)
    with semel.Producer(bootstrap_servers=brokers) as producer:
        for number in range(ORDERS):
            order = {"id": number, "country": ("pt", "fi", "at")[number % 3], "cents": number * 100}
            producer.send("sql.orders", json.dumps(order))
    spark = semel.spark_session("sql pipeline", master="local[2]")
    source = spark.readStream.format("semel").option("kafka.bootstrap.servers", brokers)
    source.option("subscribe", "sql.orders").option("startingOffsets", "committed").option(
        "applicationId", "sql-pipeline"
    ).load().createOrReplaceTempView("orders")
    sink = semel.sink(brokers, application_id="sql-pipeline", topic="sql.large_orders")
    query = spark.sql(STATEMENT).writeStream.foreachBatch(sink).trigger(availableNow=True)
    query.option("checkpointLocation", tempfile.mkdtemp()).start().awaitTermination()
    large = semel.read_table("sql.large_orders", bootstrap_servers=brokers)
    print(f"{large.num_rows} large orders")
    spark.stop()


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1])
    else:
        with semel.Broker() as broker:
            main(broker.bootstrap)
