"""Places outside of Kafka that keep offsets beside the data: PostgreSQL, files."""
