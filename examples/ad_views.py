"""Ad views on Spark: views in, counts per campaign and second out, every view counted once.

    python examples/ad_views.py localhost:9092 /tmp/ads    # until Ctrl-C
    echo '{"id": 7, "campaign": "spring", "seen_at": "2026-03-01T12:00:00Z"}' | semel produce ads.views

    ads.views     in    {"id": 7, "campaign": "spring", "seen_at": "2026-03-01T12:00:00.250Z"}
    ads.counts    out   {"start": "2026-03-01T12:00:00.000Z", "campaign": "spring", "views": 41}
    ads.rejected  out   what is no valid view, as it came, with the reason in a header

A window is written once, when no view can come any more that belongs to it: 3 seconds after its end, by the views' own
clock. Who bills by these counts must see each window once, so a micro-batch is one transaction.
"""

from __future__ import annotations

import sys

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import semel

VIEW = "id LONG, campaign STRING, seen_at TIMESTAMP"
WINDOW = "1 second"
MAX_DELAY_MS = 3_000  # views come out of order; later ones are left out

REASON = """CASE
    WHEN v.id IS NULL THEN 'not a view'
    WHEN v.campaign IS NULL OR v.campaign = '' THEN 'campaign is missing'
    WHEN v.seen_at IS NULL THEN 'time is missing'
END"""


def pipeline(views: DataFrame) -> DataFrame:
    """Rows of the input topic to rows for the sink; `reason` marks what is rejected."""
    parsed = views.select("key", "value", F.from_json(F.col("value").cast("string"), VIEW).alias("v"))
    checked = parsed.withColumn("reason", F.expr(REASON))
    counts = (
        checked.where("reason IS NULL")
        .select("v.*")
        .withWatermark("seen_at", f"{MAX_DELAY_MS} milliseconds")
        .groupBy(F.window("seen_at", WINDOW), "campaign")
        .agg(F.count("*").alias("views"))
        .selectExpr("window.start AS start", "campaign", "views")
    )
    written = counts.selectExpr(
        "CAST(campaign AS BINARY) AS key",
        "CAST(to_json(struct(*)) AS BINARY) AS value",
        "CAST(NULL AS STRING) AS reason",
    )
    return written.unionByName(checked.where("reason IS NOT NULL").select("key", "value", "reason"))


def main(brokers: str, folder: str) -> None:
    with semel.Admin(bootstrap_servers=brokers) as admin:
        for topic in ("ads.views", "ads.counts", "ads.rejected"):
            admin.create_topic(topic, 4, if_not_exists=True)
    spark = semel.spark_session("ad views", master="local[2]")
    sink = semel.sink(
        brokers, application_id="ads", topic="ads.counts", dead_letter_topic="ads.rejected", bad_column="reason"
    )
    views = (
        spark.readStream.format("semel")
        .option("kafka.bootstrap.servers", brokers)
        .option("subscribe", "ads.views")
        .option("startingOffsets", "earliest")
        .load()
    )
    query = pipeline(views).writeStream.foreachBatch(sink).option("checkpointLocation", folder).start()
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) == 3 else sys.exit(__doc__)
