"""Exactly-once Kafka pipelines on PySpark, with a Kafka-compatible broker that pip can install."""

__version__ = "0.1.0"
