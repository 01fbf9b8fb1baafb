"""Topics, configurations, groups and transactions of a cluster, for those who look after it.

admin         `Admin`, which blocks                      calls         topics, configurations, offsets
groups        consumer groups and their lag              transactions  open transactions and their producers
base          settings, calls with a deadline
"""

from semel.client.admin.admin import Admin as Admin
from semel.client.admin.calls import TO_THE_END as TO_THE_END
from semel.client.admin.calls import NewTopic as NewTopic
from semel.client.group.offset_requests import EARLIEST as EARLIEST
from semel.client.group.offset_requests import LATEST as LATEST
