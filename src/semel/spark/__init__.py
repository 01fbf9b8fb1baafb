"""Spark: the source, the sink, and one transaction per micro-batch."""
