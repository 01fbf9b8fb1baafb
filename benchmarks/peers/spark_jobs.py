"""What ordinary Spark queries do between two topics, for any source and sink: rows of Kafka in, rows of Kafka out.

It runs in the peers' virtual environment as well, so that nothing but PySpark is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from nexmark_jobs import EVENT, NEXMARK  # type: ignore[import-not-found]  # beside this file

ORDER = "order_id long, user string, product int, amount double, currency string, at timestamp, note string"
PRODUCTS = 1_000
LEAST_AMOUNT = 20
CURRENCIES = ("EUR", "USD", "GBP")


class Output(NamedTuple):
    rows: Any
    mode: str = "append"


def copied(rows: Any, job: dict[str, Any]) -> Output:
    return Output(rows.select("key", "value", "headers"))


def key_changed(rows: Any, job: dict[str, Any]) -> Output:
    return Output(rows.selectExpr("concat('new ', cast(key AS string)) AS key", "value"))


def rekeyed(rows: Any, job: dict[str, Any]) -> Output:
    """JSON in, a filter, another key, JSON out."""
    found = _orders(rows).where(f"amount >= {LEAST_AMOUNT}").withColumn("gross", _sql("round(amount * 1.19, 2)"))
    return Output(_as_records(found, "user", "order_id, user, gross, currency, note"))


def counted(rows: Any, job: dict[str, Any]) -> Output:
    """Orders of each user and minute: state, and every change of a count is written."""
    from pyspark.sql.functions import window

    orders = _orders(rows).withWatermark("at", "1 minute")
    counts = orders.groupBy(window("at", "1 minute").alias("w"), "user").count()
    found = counts.select("user", _sql("w.start AS minute"), _sql("`count` AS orders"))
    return Output(_as_records(found, "user", "user, minute, orders"), "update")


def joined(rows: Any, job: dict[str, Any]) -> Output:
    """Each order with the name of its product, from a table that does not change."""
    products = rows.sparkSession.range(PRODUCTS).selectExpr(
        "cast(id AS int) AS product", "concat('product ', id) AS name", "cast(id % 20 AS string) AS category"
    )
    found = _orders(rows).join(products, "product")
    return Output(_as_records(found, "category", "order_id, name, amount, note"))


def sorted_out(rows: Any, job: dict[str, Any]) -> Output:
    """A topic for each currency, and one for what cannot be read. `targets`: one for each currency, then that one."""
    from pyspark.sql.functions import lit, when

    parsed = rows.withColumn("o", _order(rows))
    *currencies, unread = job["targets"]
    topic = lit(unread)
    for currency, target in zip(CURRENCIES, currencies, strict=True):
        topic = when(_sql("o.order_id IS NOT NULL") & (_sql("o.currency") == currency), target).otherwise(topic)
    return Output(parsed.select(_sql("coalesce(cast(o.user AS binary), key) AS key"), "value", topic.alias("topic")))


def nexmark(rows: Any, job: dict[str, Any]) -> Output:
    return Output(NEXMARK[job["work"]](rows).selectExpr("to_json(struct(*)) AS value"))


def json_schema(work: str) -> str:
    return str(EVENT) if work in NEXMARK else ORDER


JOBS: dict[str, Callable[[Any, dict[str, Any]], Output]] = {
    "copy": copied,
    "new key": key_changed,
    "filter and re-key": rekeyed,
    "windowed count": counted,
    "static join": joined,
    "several topics": sorted_out,
    **dict.fromkeys(NEXMARK, nexmark),
}


def _sql(text: str) -> Any:
    from pyspark.sql.functions import expr

    return expr(text)


def _order(rows: Any) -> Any:
    """The order in a value: read by Spark, or by a source that has read it already."""
    return _sql("json" if "json" in rows.columns else f"from_json(cast(value AS string), '{ORDER}')")


def _orders(rows: Any) -> Any:
    return rows.select(_order(rows).alias("o")).select("o.*").where("order_id IS NOT NULL")


def _as_records(rows: Any, key: str, columns: str) -> Any:
    return rows.selectExpr(f"cast({key} AS string) AS key", f"to_json(struct({columns})) AS value")
