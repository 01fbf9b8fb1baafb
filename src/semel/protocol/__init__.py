"""Kafka's wire protocol and record batches: pure, no I/O."""
