"""The tables say what Apache Kafka's own message specifications say, field by field and version by version.

Kafka ships them as JSON inside its client's jar, so this needs the jars that `make kafka` fetches.
"""

from __future__ import annotations

import json
import re
import zipfile
from typing import Any

import pytest

from semel.local.apache_kafka import kafka_libs
from semel.protocol.api import APIS, FIRST_OWN_KEY, api_of
from semel.protocol.messages import groups as consumer_protocol
from semel.protocol.messages import internal_topics as consumer_group_log
from semel.protocol.messages import internal_topics as group_log
from semel.protocol.messages import internal_topics as transaction_log
from semel.protocol.schema import FieldKind, Struct, fields_of, parse_versions

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("kafka_installation")]

JARS = ("kafka-clients", "kafka-transaction-coordinator", "kafka-group-coordinator")
KAFKAS = [key for key in APIS if key < FIRST_OWN_KEY]
FORMATS = [fmt for key in KAFKAS for fmt in (api_of(key).request, api_of(key).response)] + [
    transaction_log.TRANSACTION_LOG_KEY,
    transaction_log.TRANSACTION_LOG_VALUE,
    group_log.OFFSET_COMMIT_KEY,
    group_log.OFFSET_COMMIT_VALUE,
    group_log.GROUP_METADATA_KEY,
    group_log.GROUP_METADATA_VALUE,
    consumer_group_log.CONSUMER_GROUP_METADATA_KEY,
    consumer_group_log.CONSUMER_GROUP_METADATA_VALUE,
    consumer_group_log.CONSUMER_GROUP_MEMBER_METADATA_KEY,
    consumer_group_log.CONSUMER_GROUP_MEMBER_METADATA_VALUE,
    consumer_group_log.CONSUMER_GROUP_TARGET_ASSIGNMENT_METADATA_KEY,
    consumer_group_log.CONSUMER_GROUP_TARGET_ASSIGNMENT_METADATA_VALUE,
    consumer_group_log.CONSUMER_GROUP_TARGET_ASSIGNMENT_MEMBER_VALUE,
    consumer_group_log.CONSUMER_GROUP_CURRENT_MEMBER_ASSIGNMENT_VALUE,
    consumer_protocol.CONSUMER_SUBSCRIPTION,
    consumer_protocol.CONSUMER_ASSIGNMENT,
]


def specification(name: str) -> Any:
    for jar in JARS:
        (path,) = kafka_libs().glob(f"{jar}-[0-9]*.jar")
        with zipfile.ZipFile(path) as archive:
            member = f"common/message/{name}.json"
            if member in archive.namelist():
                text = archive.read(member).decode()
                return json.loads(re.sub(r"(?m)(^|\s)//.*$", "", text))
    raise LookupError(name)


def our_rows(cls: type[Struct], version: int) -> list[Any]:
    rows: list[Any] = []
    for field in fields_of(cls):
        if version in field.present:
            kind = field.kind.name if isinstance(field.kind, FieldKind) else our_rows(field.kind, version)
            tag = field.tag.number if field.is_tagged(version) else None
            rows.append((field.name.replace("_", ""), kind, field.is_array, version in field.null, tag))
    return rows


def their_rows(fields: list[Any], common: dict[str, Any], version: int) -> list[Any]:
    rows: list[Any] = []
    for field in fields:
        if version not in parse_versions(field.get("versions", "0+")):
            continue
        base = field["type"].removeprefix("[]")
        inner = field.get("fields") or common.get(base)
        kind = their_rows(inner, common, version) if inner else base
        tag = field["tag"] if version in parse_versions(field.get("taggedVersions", "none")) else None
        null = version in parse_versions(field.get("nullableVersions", "none"))
        rows.append((field["name"].lower(), kind, field["type"].startswith("[]"), null, tag))
    return rows


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_the_table_is_what_kafka_specifies(fmt):
    spec = specification(fmt.name)
    common = {item["name"]: item["fields"] for item in spec.get("commonStructs", [])}
    assert fmt.valid == parse_versions(spec["validVersions"])
    assert fmt.flexible == parse_versions(spec["flexibleVersions"])
    for version in range(fmt.valid.low, fmt.valid.high + 1):
        assert our_rows(fmt.struct, version) == their_rows(spec["fields"], common, version)
