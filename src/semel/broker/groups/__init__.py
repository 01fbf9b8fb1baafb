"""Consumer groups: members and generations, and their positions in `__consumer_offsets`.

states       the life of a group as one table            member, group   who is in it; pure
rebalance    from one generation to the next             membership      JoinGroup, SyncGroup, Heartbeat, LeaveGroup
positions    committed and pending ones, in memory       commits         OffsetCommit, OffsetFetch, OffsetDelete
records      their form in the log                       replay          read back when the broker starts
ordered_log  written at once, applied once durable       expiry          what is too old to keep
coordinator  the parts put together                      handlers        one small function for each API
"""

from semel.broker.groups.commits import Commit, Committer
from semel.broker.groups.coordinator import GroupCoordinator

__all__ = ["Commit", "Committer", "GroupCoordinator"]
