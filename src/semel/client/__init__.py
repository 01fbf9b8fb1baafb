"""A Kafka client for Python: rows for people, Arrow columns for machines, transactions of both generations."""
