"""What a cluster of several brokers cannot promise with its settings: said once, when a transaction's owner starts.

A cluster that keeps one copy, acknowledges what one replica has, or elects a leader that lacks records can lose what it
acknowledged: an output, a decision, an entry of the ledger. Nothing here stops a program; a broker that is the only one
has nothing to choose.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from semel.client.admin.calls import AdminCalls, ConfigEntry, TopicInfo
from semel.client.errors import KafkaError
from semel.client.timing import Deadline

TRANSACTION_LOG = "__transaction_state"
UNCLEAN = "unclean.leader.election.enable"
MIN_IN_SYNC = "min.insync.replicas"
TIMEOUT_S = 10.0


async def warn_of_risks(calls: AdminCalls, outputs: Iterable[str], log: logging.Logger) -> None:
    """Logs each risk. A cluster that does not respond, or does not allow it, is no reason to stop."""
    try:
        found = await risks(calls, outputs)
    except KafkaError as error:
        log.debug("the settings of the cluster were not looked at: %s", error)
        return
    for risk in found:
        log.warning("at risk: %s", risk)


async def risks(calls: AdminCalls, outputs: Iterable[str]) -> list[str]:
    deadline = Deadline(TIMEOUT_S)  # of all of it: a program waits for it when it starts
    brokers = len((await calls.describe_cluster(timeout_ms=_left_ms(deadline))).brokers)
    if brokers < 2:
        return []
    names = await calls.list_topics(include_internal=True, timeout_ms=_left_ms(deadline))
    wanted = [name for name in dict.fromkeys((*outputs, TRANSACTION_LOG)) if name in names]
    found: list[str] = []
    for topic in await calls.describe_topics(wanted, timeout_ms=_left_ms(deadline)):
        settings = await calls.describe_configs(topic=topic.name, timeout_ms=_left_ms(deadline))
        found += _risks_of(topic, settings, brokers)
    return found


def _left_ms(deadline: Deadline) -> float:
    return deadline.remaining_s() * 1000


def _risks_of(topic: TopicInfo, settings: Mapping[str, ConfigEntry], brokers: int) -> list[str]:
    copies = min(len(part.replicas) for part in topic.partitions)
    in_sync = min(len(part.in_sync) for part in topic.partitions)
    least = int(settings[MIN_IN_SYNC].value or 1) if MIN_IN_SYNC in settings else 1
    found = []
    if copies < 2:
        found.append(
            f"topic {topic.name!r} has 1 replica on a cluster of {brokers} brokers: what it holds is lost with that "
            f"broker. {_more_replicas(topic.name)}"
        )
    elif least < 2:
        found.append(
            f"topic {topic.name!r} has {MIN_IN_SYNC}={least}: what one broker alone has acknowledged is lost with it. "
            f"Set {MIN_IN_SYNC}=2 on the topic"
        )
    elif least > in_sync:
        found.append(
            f"topic {topic.name!r} has {MIN_IN_SYNC}={least}, and {in_sync} replicas in sync: writes to it wait until "
            f"there are more. Start the missing brokers, or lower {MIN_IN_SYNC} to at most {copies - 1}"
        )
    if UNCLEAN in settings and settings[UNCLEAN].value == "true":
        found.append(
            f"topic {topic.name!r} has {UNCLEAN}=true: a replica that lacks acknowledged records may become leader. "
            f"Set {UNCLEAN}=false on the topic"
        )
    return found


def _more_replicas(topic: str) -> str:
    if topic == TRANSACTION_LOG:
        return (
            "Add replicas with kafka-reassign-partitions, and set transaction.state.log.replication.factor=3 on the "
            "brokers of new clusters"
        )
    return "Add replicas with kafka-reassign-partitions"
