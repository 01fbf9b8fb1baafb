"""Consumer groups: members and generations, and their offsets in `__consumer_offsets`.

classic_group  the life of a classic group as one table; pure   rebalance    from one generation to the next
membership     JoinGroup, SyncGroup, Heartbeat, LeaveGroup       commits      OffsetCommit, OffsetFetch, OffsetDelete
state          groups and offsets in memory, changed by replay   records      their form in the log
consumer       groups of the consumer protocol (KIP-848)         handlers     one small function for each API
coordinator    the parts put together                            migration    from one group protocol to the other
"""

from semel.broker.groups.commits import Committer, OffsetToCommit
from semel.broker.groups.coordinator import GroupCoordinator

__all__ = ["Committer", "GroupCoordinator", "OffsetToCommit"]
