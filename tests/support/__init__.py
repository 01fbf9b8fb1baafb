"""What the tests share: real brokers as processes, Apache Kafka and its tools."""
