"""Apache Kafka as a process, and its tools."""

from benchmarks.peers.apache_kafka import (
    QUICK_JVM,
    ApacheKafka,
    KafkaMissing,
    ToolFailed,
    free_ports,
    java,
    java_tool,
    kafka_libs,
    start_tool,
)

__all__ = [
    "QUICK_JVM",
    "ApacheKafka",
    "KafkaMissing",
    "ToolFailed",
    "free_ports",
    "java",
    "java_tool",
    "kafka_libs",
    "start_tool",
]
