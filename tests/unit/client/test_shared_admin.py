"""Threads may share a client: their calls do not get into each other's way."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.metadata import Metadata
from semel.client.settings import ClientSettings
from semel.local.brokers import SemelBroker
from semel.protocol.messages.cluster import MetadataResponse, MetadataResponseTopic
from tests.support.reading import create_topic

CALLS: list[Callable[[Admin], Any]] = [
    lambda admin: admin.list_topics(),
    lambda admin: admin.describe_topics(["shared-admin"]),
    lambda admin: admin.list_offsets({("shared-admin", 0): -1}),
    lambda admin: admin.list_groups(),
    lambda admin: admin.describe_cluster(),
]


def test_four_threads_share_an_admin(shared_semel_broker: SemelBroker) -> None:
    create_topic(shared_semel_broker.bootstrap, "shared-admin", partitions=2)
    errors: list[BaseException] = []
    usual_s = sys.getswitchinterval()
    with Admin(bootstrap_servers=shared_semel_broker.bootstrap) as admin:

        def work(first: int) -> None:
            for number in range(150):
                try:
                    CALLS[(first + number) % len(CALLS)](admin)
                except BaseException as error:
                    errors.append(error)

        threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(usual_s)
    assert errors == []


def test_a_complete_answer_removes_deleted_topics_and_no_other_answer_does() -> None:
    metadata = Metadata()
    both = [MetadataResponseTopic(name="kept"), MetadataResponseTopic(name="deleted")]
    metadata.update(MetadataResponse(topics=both), now_s=1.0)
    metadata.update(MetadataResponse(topics=both[:1]), now_s=2.0)
    assert set(metadata.topics) == {"kept", "deleted"}
    metadata.update(MetadataResponse(topics=both[:1]), now_s=3.0, is_complete=True)
    assert set(metadata.topics) == {"kept"}
    assert (metadata.is_fresh("kept", 3.0, 10), metadata.is_fresh("deleted", 3.0, 10)) == (True, False)


def test_settings_that_are_changed_hold_for_the_next_call(shared_semel_broker: SemelBroker) -> None:
    """A consumer that subscribes by a pattern must not create topics that it looks up."""
    settings = ClientSettings.of(bootstrap_servers=shared_semel_broker.bootstrap)
    with Cluster(settings) as cluster, Admin(settings) as admin:
        cluster.settings = settings.replace(allow_auto_create_topics=False)
        cluster.refresh(["not-to-be-created"])
        assert "not-to-be-created" not in admin.list_topics()
