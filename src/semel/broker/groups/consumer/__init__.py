"""Groups of the consumer protocol (KIP-848): the broker assigns partitions, members follow by heartbeats.

model       a group as the sum of its changes; pure       records     changes as records, and back
assignors   who shall have what; pure                     reconcile   one step towards it; pure
patterns    topics by regular expression                  heartbeats  ConsumerGroupHeartbeat, and when time passes
"""
