"""A member of a consumer group, and a group's offsets.

core       what a member decides; pure                         states     its life as one table; pure
member     its driver: lock, connections, heartbeats           assignors  who gets which partition; pure
offsets    commits them, looks them up
"""
