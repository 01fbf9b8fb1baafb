"""Where Spark looks for data sources: it imports every `pyspark_*` package and registers its `DefaultSource`."""

from semel.spark.source import SemelDataSource as DefaultSource

__all__ = ["DefaultSource"]
