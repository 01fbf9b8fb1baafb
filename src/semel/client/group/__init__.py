"""A member of a consumer group, and a group's offsets.

core       what a member decides, classic protocol; pure       states     its life as one table; pure
consumer_protocol_core, consumer_protocol_states               the same for group.protocol=consumer (KIP-848)
membership what consumer and driver see of either; pure
member     its driver: lock, connections, heartbeats           assignors  who gets which partition; pure
offsets    commits them, looks them up                         offset_calls, offset_requests  its parts without threads
"""
