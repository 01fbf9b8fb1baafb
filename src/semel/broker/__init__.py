"""A one-node Kafka-compatible broker: server, topics, handlers of the protocol's APIs, coordinators."""
