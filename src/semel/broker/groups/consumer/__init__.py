"""Groups of the consumer protocol (KIP-848): the broker assigns partitions, members follow by heartbeats.

model       a group as the sum of its changes, and one step of a member towards its target; pure
planner     what a heartbeat changes, on a draft of the group; assignors: which member shall have which partitions
heartbeats  ConsumerGroupHeartbeat, and what happens when time passes
"""
