"""Topics, configurations, groups and transactions of a cluster, for those who look after it.

calls         topics, configurations, offsets; `Admin`   groups        consumer groups and their lag
transactions  open transactions and their producers      observation   a whole cluster with few requests
base          settings, calls with a deadline            risks         settings that put records at risk
"""

from semel.client.admin.calls import TO_THE_END as TO_THE_END
from semel.client.admin.calls import Admin as Admin
from semel.client.admin.calls import NewTopic as NewTopic
from semel.client.group.offset_requests import EARLIEST as EARLIEST
from semel.client.group.offset_requests import LATEST as LATEST
