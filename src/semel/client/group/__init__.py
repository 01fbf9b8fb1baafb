"""A member of a consumer group, and a group's offsets.

member     joins, keeps its session with heartbeats, leaves    states  its life as one table; pure
assignors  who gets which partition; pure                      offsets  commits them, looks them up
"""
